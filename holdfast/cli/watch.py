"""Watch a job until it ends. The job runs elsewhere: the watcher may exit at any moment, and nothing happens to the job."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.cli.arguments import operator
from holdfast.cli.changes import JobChange, JobFollower, end_change
from holdfast.cli.flow_process import FlowProcess, waits_for
from holdfast.cli.job_view import JobView, find_job, live_jobs
from holdfast.cli.output import echo
from holdfast.cli.rank_output import RankOutput
from holdfast.cli.screens import Screen, screen_for
from holdfast.control.supervisor.early_launch import NO_FLOW
from holdfast.errors import HistoryError, NoJob
from holdfast.exit_codes import CONTROLLER_DIED, DETACHED, FAILED, INTERRUPTED, OPERATOR_ERROR, status_of
from holdfast.history import holder_of, queries
from holdfast.history.lease import this_host
from holdfast.history.models import Job, Request
from holdfast.history.store import History

POLL_INTERVAL: Final = 0.2
"""Seconds between two polls of the flow's process and of signals."""
HISTORY_INTERVAL: Final = 0.6
"""Seconds between two polls of the history while nothing is being recovered: each takes milliseconds of a core that training may need."""
CLOSING: Final = 20.0
"""Seconds that a controller gets to release its lease once the job's processes have ended."""


ONE_PRESS: Final = 0.7
"""Seconds after Ctrl-C was answered in which another one counts as the same: nobody has read yet what the next one would do."""


class Signals:
    """How often Ctrl-C was pressed, and whether SIGUSR1 came: the request to detach from the job."""

    def __init__(self) -> None:
        self.detach = False
        self._handled, self._answered = 0, -ONE_PRESS
        self._pressed = False

    def note_interrupt(self) -> None:
        """Note a Ctrl-C, unless it belongs to the one before."""
        self._pressed = self._pressed or time.monotonic() - self._answered > ONE_PRESS

    def next_interrupt(self) -> int:
        """Return the number of the Ctrl-C that is not handled yet, or 0."""
        if not self._pressed:
            return 0
        self._handled, self._answered = self._handled + 1, time.monotonic()
        self._pressed = False
        return self._handled


@contextmanager
def counted_signals() -> Iterator[Signals]:
    """Count Ctrl-C instead of ending; note SIGUSR1, to pass it on to the flow; exit cleanly on SIGTERM."""
    signals = Signals()

    def interrupt(*_: object) -> None:
        signals.note_interrupt()

    def detach(*_: object) -> None:
        signals.detach = True

    def terminate(*_: object) -> None:
        echo()
        sys.exit(128 + signal.SIGTERM)

    handlers = {signal.SIGINT: interrupt, signal.SIGUSR1: detach, signal.SIGTERM: terminate}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class JobWatcher:
    """One job, the flow that this command started for it (if it did), and the screen to show them on."""

    history: History
    screen: Screen
    flow: FlowProcess | None = None
    job: Job | None = None
    from_now: bool = True
    enough: Callable[[JobView], bool] = lambda _: False
    """Whether to leave before the job ends."""
    view: JobView | None = None
    output: RankOutput | None = None
    """The output of ranks, if it is to be shown."""
    stopping: bool = False
    _started: float = field(default_factory=time.monotonic)
    _follower: JobFollower | None = None
    _history_failed: bool = False
    _linked: str = ""
    """The page of the flow run that was shown."""
    _next_poll: float = 0.0

    def until_the_end(self, signals: Signals) -> int:
        """Watch, and return the exit status of this command."""
        try:
            while not self._turn(signals):
                time.sleep(POLL_INTERVAL)
        finally:
            self.screen.close()
        view = self.view
        if view is not None and view.ended:
            return self._ended(view)
        if view is not None and self.enough(view):
            return 0
        return self._flow_exited()

    def show(self, event: str, text: str, **facts: Any) -> None:  # noqa: ANN401 (any JSON)
        """Show something that is not in the history."""
        self.screen.show_change(JobChange(event=event, at=time.time(), text=text, record={"text": text, **facts}))

    def _turn(self, signals: Signals) -> bool:
        """Poll once; return whether to leave."""
        status = self.flow.status() if self.flow else None  # before the poll, which then includes what the flow wrote last
        view = self.view
        closely = view is None or view.incident is not None or view.ended or self.stopping  # something happens that people wait for
        try:
            if status is not None or time.monotonic() >= self._next_poll or closely:
                self._next_poll = time.monotonic() + HISTORY_INTERVAL
                self._poll(full=status is not None)  # the last save is recorded after the transition that ended the job
        except HistoryError as error:
            if not self._history_failed:
                self.show("notice", f"cannot read the history now; retrying. The job does not need it. {error}")
            self._history_failed = True
        if number := signals.next_interrupt():
            self._interrupted(number)
        if signals.detach and self.flow is not None:
            signals.detach = False
            self.flow.detach()
        if status is not None and not self._is_ended_by_launcher():
            return True
        return self.view is not None and (self._is_over(self.view) or self.enough(self.view))

    def _is_ended_by_launcher(self) -> bool:
        """Return whether the flow's launcher is about to end the job: it outlives a flow that never took control."""
        view = self.view
        if view is None or view.ended or view.holder is None:
            return False
        return view.holder.host == this_host() and not view.holder.flow_run

    def _is_over(self, view: JobView) -> bool:
        """Return whether nothing follows: when the job has ended, its controller still ends processes before it releases its lease."""
        if not view.ended or self.flow is None or view.move is None:
            return view.ended
        return view.holder is None and time.time() - view.move.at > CLOSING

    def _poll(self, *, full: bool = False) -> None:
        self.job = self.job or self._submission()
        if self.job is None:
            return
        if self._follower is None:
            self._follower = JobFollower(self.history, self.job, from_now=self.from_now)
        changes, view = self._follower.poll(full=full)
        self.view = view
        if view.flow_run_url not in {"", self._linked}:
            self._linked = view.flow_run_url
            self.show("flow-run", f"in Prefect: {self._linked}", url=self._linked)
        if self.flow is not None and (view.holder or view.ended):
            self.flow.release_lock()
        if self._history_failed:
            self.show("notice", "the history can be read again")
            self._history_failed = False
        if self.output is not None and not view.ended:
            self.output.follow(self.job, view.members)
            self.screen.show_output(self.output.take())
        self.screen.show(changes, view)

    def _submission(self) -> Job | None:
        """Return the job that the flow has submitted; show what it waits for while there is none."""
        job = self.flow.submission(self.history) if self.flow is not None else None
        if job is None and self.flow is not None:
            self.screen.wait(waits_for("\n".join(self.flow.last_lines())), time.monotonic() - self._started)
        return job

    def _interrupted(self, number: int) -> None:
        """Handle Ctrl-C: the first requests a stop, the second stops at once, the third leaves."""
        if self.flow is None or number > 2:  # noqa: PLR2004 (request, stop at once, leave)
            raise KeyboardInterrupt
        if self._is_controlled_elsewhere():  # our flow is a standby
            self.flow.terminate()
            self.show("notice", "stopping the standby controller; the job continues under the controller that runs it")
            raise KeyboardInterrupt
        self.stopping = True
        if number == 1 and self.job is not None:
            try:
                request_stop(self.history, self.job)
            except HistoryError:
                pass
            else:
                self.show("notice", "requested a stop of the job; its workers may save first. Ctrl-C again stops it at once")
                return
        self.flow.terminate()
        self.show("notice", "stopping the job at once. Ctrl-C again leaves this command and lets that continue")

    def _is_controlled_elsewhere(self) -> bool:
        """Return whether another controller than our flow has the job now: the last poll may have seen a launcher that is gone."""
        assert self.flow is not None
        holder = self.view.holder if self.view is not None else None
        if self.job is not None:
            with suppress(HistoryError):
                holder = holder_of(self.history, self.job.id)
        return holder is not None and not self.flow.is_holder(holder)

    def _ended(self, view: JobView) -> int:
        """Show the end of the job, and return the exit status."""
        if self.output is not None and self.job is not None:
            self.output.follow(self.job, view.members)  # of a job that ended before its first poll
            for lines in self.output.last():
                self.screen.show_output(lines)
        self.screen.show_change(end_change(self.history, view, self.output.shows if self.output is not None else lambda _rank: False))
        if self.flow is not None and self.flow.status() is None:
            self.show("notice", f"the controller (pid {self.flow.pid}) has not exited yet; nothing waits for it")
        if self.flow is not None and view.move is not None and view.move.reason == NO_FLOW:
            return self._flow_failed()
        return INTERRUPTED if self.stopping and view.state == "CANCELLED" else status_of(view.move, lost_end=view.lost_end)

    def _flow_failed(self) -> int:
        """Show why the flow could not start, whose job has been ended for that; return the exit status."""
        assert self.flow is not None
        if refusal := self.flow.refusal():
            self.show("refused", refusal)
            return OPERATOR_ERROR
        self.show("log", "\n".join([f"the end of {self.flow.log}:", *self.flow.last_lines()]))
        return FAILED

    def _flow_exited(self) -> int:
        """Show what the exit of the flow means while the history shows no end of the job; return the exit status."""
        assert self.flow is not None
        status, name = self.flow.status(), self.flow.job
        if status == OPERATOR_ERROR and (refusal := self.flow.refusal()):
            self.show("refused", refusal)
            return OPERATOR_ERROR
        if status == DETACHED:
            rest = "The job had not started" if self.view is None else who_continues(name)
            self.show("controller-detached", f"the controller detached from job '{name}', as requested. {rest}")
            return DETACHED
        if self.stopping and self.view is None:
            self.show("notice", f"stopped before job '{name}' began")
            return INTERRUPTED
        killed = status is not None and status < 0
        if not killed:
            self.show("log", "\n".join([f"the end of {self.flow.log}:", *self.flow.last_lines()]))
        how = f"the controller was killed by signal {-status}" if killed and status else f"the controller exited with status {status}"
        if self.view is None:
            self.show("controller-died", f"{how} before job '{name}' began")
            return 1
        self.show(
            "controller-died",
            f"{how}. Training continues under its agents; the same `holdfast run` reattaches to it, `holdfast stop {name}` ends it",
        )
        return CONTROLLER_DIED


def follow(reference: str | None, *, as_json: bool) -> int:
    """Watch a job that runs already (default: the newest live one), until it ends or Ctrl-C."""
    with closing(History.open(create=False)) as history:
        live = live_jobs(history) if reference is None else []
        if reference is None and not live:
            raise NoJob("No job runs")
        job = find_job(history, reference) if reference is not None else live[0]
        screen = screen_for(as_json=as_json, hint=f"Ctrl-C ends the watching, `holdfast stop {job.name}` the job")
        with counted_signals() as signals:
            return JobWatcher(history, screen, job=job).until_the_end(signals)


def who_continues(name: str) -> str:
    """Return who runs a job whose controller has detached or exited."""
    return (
        f"Training continues: a standby controller takes over, or its agents keep it until the same `holdfast run` reattaches; "
        f"`holdfast stop {name}` ends it"
    )


def request_stop(history: History, job: Job) -> None:
    """Request that the controller of *job* stop it, unless that is requested already."""
    if any(request.kind == "stop" for request in queries.pending_requests(history, job.id)):
        return
    with history.session() as session:
        session.add(Request(job_id=job.id, at=time.time(), kind="stop", by=operator()))
