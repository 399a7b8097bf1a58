"""Watch a job until it ends. What is watched lives elsewhere: the watcher may vanish at any moment, and nothing happens to the job."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.cli.actor import signature
from holdfast.cli.changes import JobChange, JobFollower, of_end
from holdfast.cli.flow_process import FlowProcess
from holdfast.cli.job_view import JobView, find_job, live_jobs
from holdfast.cli.output import say
from holdfast.cli.rank_output import RankOutput
from holdfast.cli.screens import Screen, screen_for
from holdfast.errors import HistoryError, NoJob
from holdfast.exit_codes import CONTROLLER_DIED, DETACHED, INTERRUPTED, OPERATOR_ERROR, status_of
from holdfast.history import queries
from holdfast.history.lease import this_host
from holdfast.history.models import Job, Request
from holdfast.history.store import History
from holdfast.prefect.server import is_configured

POLL: Final = 0.2
"""Seconds between two looks at the flow's process and at what was pressed."""
LOOK: Final = 0.6
"""Seconds between two looks into the history while nothing is being recovered: each takes milliseconds of a core that training may need."""
CLOSING: Final = 20.0
"""Seconds that a flow gets to close its books once the job's processes have ended."""


class Taps:
    """How often Ctrl-C was pressed, and whether SIGUSR1 came: the order to let go of the job."""

    def __init__(self) -> None:
        self.count = 0
        self.answered = 0
        self.detach_requested = False

    def tap(self, *_: object) -> None:
        """Count one."""
        self.count += 1

    def request_detach(self, *_: object) -> None:
        """Remember the order."""
        self.detach_requested = True

    def next(self) -> int:
        """Return the number of the oldest tap that is not answered yet, or 0."""
        if self.answered == self.count:
            return 0
        self.answered += 1
        return self.answered


@contextmanager
def counted_taps() -> Iterator[Taps]:
    """Count Ctrl-C instead of ending; pass SIGUSR1 on to the flow; end tidily on SIGTERM."""
    taps = Taps()
    heeded = {signal.SIGINT: taps.tap, signal.SIGUSR1: taps.request_detach, signal.SIGTERM: _leave}
    before = {number: signal.signal(number, handler) for number, handler in heeded.items()}
    try:
        yield taps
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
    outlook: JobView | None = None
    output: RankOutput | None = None
    """What ranks write, if that is to be shown."""
    stopping: bool = False
    _begun: float = field(default_factory=time.monotonic)
    _follower: JobFollower | None = None
    _blind: bool = False
    _linked: str = ""
    """The page of the flow run that was shown."""
    _next_look: float = 0.0

    def until_the_end(self, taps: Taps) -> int:
        """Watch, and return the exit status of this command."""
        try:
            while not self._turn(taps):
                time.sleep(POLL)
        finally:
            self.screen.close()
        return self._verdict()

    def say(self, event: str, text: str, **facts: Any) -> None:  # noqa: ANN401 (any JSON)
        """Tell something that the history does not."""
        self.screen.tell(JobChange(event=event, at=time.time(), text=text, record={"text": text, **facts}))

    def _turn(self, taps: Taps) -> bool:
        """Look once; return whether to leave."""
        status = self.flow.status() if self.flow else None  # before the look: what the flow wrote last is then seen
        try:
            if status is not None or time.monotonic() >= self._next_look or self._follows_closely():
                self._next_look = time.monotonic() + LOOK
                self._look()
        except HistoryError as error:
            if not self._blind:
                self.say("notice", f"cannot read the history now, trying on; the job does not need it. {error}")
            self._blind = True
        if number := taps.next():
            self._answer(number)
        if taps.detach_requested and self.flow is not None:
            taps.detach_requested = False
            self.flow.detach()
        return status is not None or (self.outlook is not None and (self._is_over(self.outlook) or self.enough(self.outlook)))

    def _follows_closely(self) -> bool:
        """Tell whether something happens that people wait for."""
        return self.outlook is None or self.outlook.incident is not None or self.outlook.ended or self.stopping

    def _is_over(self, outlook: JobView) -> bool:
        """Tell whether no more is to come: when the job has ended, its flow still ends the processes before it gives its lease back."""
        if not outlook.ended or self.flow is None or outlook.move is None:
            return outlook.ended
        return outlook.holder is None and time.time() - outlook.move.at > CLOSING

    def _look(self) -> None:
        if self.job is None and self.flow is not None:
            self.job = self.flow.submission(self.history)
        if self.job is None:
            own = "" if is_configured() else " and a Prefect server of its own (PREFECT_API_URL names none)"
            self.screen.wait(f"starting the flow{own}, {time.monotonic() - self._begun:.0f} s")
            return
        if self._follower is None:
            self._follower = JobFollower(self.history, self.job, from_now=self.from_now)
        changes, self.outlook = self._follower.look()
        if self.outlook.flow_run_url not in {"", self._linked}:
            self._linked = self.outlook.flow_run_url
            self.say("flow-run", f"in Prefect: {self._linked}", url=self._linked)
        if self.flow is not None and (self.outlook.holder or self.outlook.ended):
            self.flow.settled()
        if self._blind:
            self.say("notice", "the history can be read again")
            self._blind = False
        if self.output is not None and not self.outlook.ended:
            self.output.follow(self.job, self.outlook.members)
            self.screen.show_output(self.output.take())
        self.screen.show(changes, self.outlook)

    def _answer(self, tap: int) -> None:
        """Answer Ctrl-C: ask, then insist, then leave."""
        if self.flow is None or tap > 2:  # noqa: PLR2004 (ask, insist, leave)
            raise KeyboardInterrupt
        if self._stands_by():
            self.flow.terminate()
            self.say("notice", "told the standby to end; the job goes on under the flow that steers it")
            raise KeyboardInterrupt
        self.stopping = True
        if tap == 1 and self.job is not None and self._ask():
            self.say("notice", "asked the job to stop; its workers may save first. Ctrl-C again stops it at once")
            return
        self.flow.terminate()
        self.say("notice", "told the flow to stop the job at once. Ctrl-C again leaves it to itself")

    def _stands_by(self) -> bool:
        """Tell whether our flow waits for the job that another one steers."""
        holder = self.outlook.holder if self.outlook is not None else None
        return self.flow is not None and holder is not None and (holder.host, holder.pid) != (this_host(), self.flow.pid)

    def _ask(self) -> bool:
        """Write the request to stop; tell whether it could be written."""
        assert self.job is not None
        try:
            request_stop(self.history, self.job)
        except HistoryError:
            return False
        return True

    def _verdict(self) -> int:
        """Say how it ended and return the exit status."""
        outlook = self.outlook
        if outlook is not None and outlook.ended:
            return self._ended(outlook)
        if outlook is not None and self.enough(outlook):
            return 0
        return self._flow_gone()

    def _ended(self, outlook: JobView) -> int:
        if self.output is not None and self.job is not None:
            self.output.follow(self.job, outlook.members)  # of a job that was over before it was seen at work
            for lines in self.output.last():
                self.screen.show_output(lines)
        self.screen.tell(of_end(self.history, outlook))
        if self.flow is not None and self.flow.status() is None:
            self.say("notice", f"the flow (pid {self.flow.pid}) is still closing its books; nothing waits for it")
        return INTERRUPTED if self.stopping and outlook.state == "CANCELLED" else status_of(outlook.move)

    def _flow_gone(self) -> int:
        """Tell what the end of the flow means while the history shows no end of the job."""
        assert self.flow is not None
        status, name = self.flow.wait(0), self.flow.job
        if status == OPERATOR_ERROR and (refusal := self.flow.refusal()):
            self.say("refused", refusal)
            return OPERATOR_ERROR
        if status == DETACHED:
            whose = "It had not begun it yet" if self.outlook is None else whose_it_is(name)
            self.say("handed-over", f"this flow has let go of job '{name}', as it was told to. {whose}")
            return DETACHED
        if self.stopping and self.outlook is None:
            self.say("notice", f"stopped before job '{name}' began")
            return INTERRUPTED
        if status is None or status >= 0:  # who was killed had no time to say why
            self.say("log", "\n".join([f"the end of {self.flow.log}:", *self.flow.last_words()]))
        how = f"the flow ended (status {status})" if status is None or status >= 0 else f"the flow was killed by signal {-status}"
        if self.outlook is None:
            self.say("flow-died", f"{how} before job '{name}' began")
            return 1
        self.say(
            "flow-died", f"{how}. Training goes on under its agents; the same `holdfast run` adopts it, `holdfast stop {name}` ends it"
        )
        return CONTROLLER_DIED


def follow(reference: str | None, *, as_json: bool) -> int:
    """Watch a job that runs already (default: the newest live one), until it ends or Ctrl-C."""
    history = History.open(create=False)
    try:
        live = live_jobs(history) if reference is None else []
        if reference is None and not live:
            raise NoJob("No job runs")
        job = find_job(history, reference) if reference is not None else live[0]
        screen = screen_for(as_json=as_json, hint=f"Ctrl-C ends the watching, `holdfast stop {job.name}` the job")
        with counted_taps() as taps:
            return JobWatcher(history, screen, job=job).until_the_end(taps)
    finally:
        history.close()


def whose_it_is(name: str) -> str:
    """Say who goes on with a job whose flow has gone."""
    return f"It goes on: a standby steers it, or its agents keep it until the same `holdfast run` adopts it; `holdfast stop {name}` ends it"


def request_stop(history: History, job: Job) -> None:
    """Ask the flow that steers *job* to stop it; once is enough."""
    if any(request.kind == "stop" for request in queries.pending_requests(history, job.id)):
        return
    with history.session() as session:
        session.add(Request(job_id=job.id, at=time.time(), kind="stop", by=signature()))


def _leave(*_: object) -> None:
    say()
    sys.exit(128 + signal.SIGTERM)
