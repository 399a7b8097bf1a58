"""The workers of the current generation, those that stand by and those that leave: started, watched, stopped, with all that they forked."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from detectors.tracebacks import HEAD
from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.workers import error_file
from holdfast.agent.workers.oom import OomDetector
from holdfast.agent.workers.spawner import Spawner, SpawnPlan
from holdfast.agent.workers.worker import SEES, Worker
from holdfast.process import children_of, kill, kill_group, parent_of

_ENDED: Final = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
_ANY: Final = os.WEXITED | os.WSTOPPED | os.WCONTINUED


class WorkerGroup:
    """A node's processes of the job."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], memory: OomDetector) -> None:
        self.workers: dict[int, Worker] = {}
        self.ended_at = float("-inf")
        """When one of them, or a standby, ended last (monotonic)."""
        self.standbys: dict[int, Worker] = {}
        self.leavers: list[Worker] = []
        """Workers of earlier generations whose ranks have been given to others."""
        self.generation = 0
        self.membership: dict[str, list[int]] = {}
        """Which node holds which ranks, as far as the flow has told: a few agents know it of all nodes, most of their own."""
        self._first = 0
        self.abandoned: int | None = None
        """The current generation, once it is known to come to nothing."""
        self.pace: int | None = None
        """Steps between two checkpoints that the flow wishes for the current generation, if it said so while that runs."""
        self.plan: SpawnPlan | None = None
        self.roles: dict[str, Any] | None = None
        """What the lowest rank has told of the roles in the job, for a flow that was not there."""
        self.last_words: Callable[[Worker], None] = lambda _worker: None
        """Called when a worker has ended, before its end is told: what it said is in its socket still."""
        self.helpers: set[int] = set()
        """Other children of the agent: they are no worker's strays."""
        self._emit, self._memory = emit, memory
        self._spawner = Spawner(me, selector, emit)
        self._spawner.born, self._spawner.failed = self._born, self._failed
        self._tickets = count()
        self._expected: dict[int, Worker] = {}
        self._expected_helpers: dict[int, tuple[Callable[[int], None], Callable[[str], None]]] = {}
        self.buried: Callable[[int], None] = lambda _pid: None
        """Called with the pid of every helper that has ended."""
        self.fell: Callable[[], None] = lambda: None
        """Called when a worker has ended that was neither told to nor done."""
        self._reaping = False
        self._stopping: int | None = None
        self.may_save = False
        """Workers that were told to stop have the time to save what they have."""
        self._kill_at: float | None = None

    @property
    def first(self) -> int:
        """Return the lowest rank of the current generation: its steps are told one by one."""
        return self._first

    # -- asking -------------------------------------------------------------------------------------------------------

    def living(self) -> list[Worker]:
        """Return the current workers that have not ended, those that are still being started included."""
        return [worker for worker in self.workers.values() if not worker.gone]

    def everybody(self) -> list[Worker]:
        """Return all that have not ended: workers, those that leave, standbys."""
        return [one for one in (*self.workers.values(), *self.leavers, *self.standbys.values()) if not one.gone]

    def tell_of_node(self, environment: dict[str, str]) -> None:
        """Give what is started from now on these variables, and none of those it was told of the node before."""
        self._spawner.local = environment

    @property
    def warm(self) -> bool:
        """Tell whether there is a starter, so that standbys can be had."""
        return self.plan is not None and self.plan.warm and self._spawner.fork_server_pid is not None

    @property
    def stopping(self) -> bool:
        """Tell whether the workers have been told to stop."""
        return self._stopping is not None

    def worker_of(self, pid: int) -> Worker | None:
        """Return the living worker that *pid* is, or descends from: a command may run the training script in a child."""
        for ancestor in _ancestry(pid):
            worker = self._worker_with(ancestor)
            if worker is None and self._spawner.forking:
                self._spawner.hear()  # it may say who that is
                worker = self._worker_with(ancestor)
            if worker is not None:
                return worker
        return None

    def _worker_with(self, pid: int) -> Worker | None:
        return next((worker for worker in self.everybody() if worker.pid == pid), None)

    # -- starting -----------------------------------------------------------------------------------------------------

    def prepare(self, plan: SpawnPlan) -> bool:
        """Take on a job's plan; tell whether its workers will start warm. Raise ``OSError`` when they could not be started at all."""
        _make_private(plan.log_directory)
        warm = self._spawner.prepare(plan)
        self.plan = plan
        return warm

    def start(self, generation: int, membership: schema.WireMembership, places: dict[int, dict[str, str]]) -> None:
        """Start the workers of a new generation; how each came to be, or did not, is told by events."""
        assert self.plan is not None
        self.enter(generation, membership)
        self._memory.forget()
        self._end_strays()
        self.workers = {rank: self.recruit(rank) for rank in places}
        for rank, environment in places.items():
            self.launch(self.workers[rank], environment)

    def enter(self, generation: int, membership: schema.WireMembership) -> None:
        """Let a new generation be the current one."""
        self.generation, self.membership, self._first = generation, membership.ranks, membership.first
        self.abandoned, self.pace = None, None

    def recruit(self, rank: int, *, standby: int | None = None) -> Worker:
        """Return a worker of *rank*, or a standby, that is still to be launched."""
        assert self.plan is not None
        name = f"rank-{rank}.log" if standby is None else f"standby-{standby}.log"
        return Worker(rank=rank, generation=self.generation, log=self.plan.log_directory / name, standby=standby)

    def launch(self, worker: Worker, environment: dict[str, str]) -> None:
        """Have *worker* started; a standby is forked or there is none, as it is to be quick and costs what it has loaded."""
        assert self.plan is not None
        given = self._spawner.environment(environment)
        worker.ticket, worker.sees = next(self._tickets), {name: given[name] for name in SEES if name in given}
        self._expected[worker.ticket] = worker
        try:
            worker.open_log(self.plan.job)
        except OSError as error:
            self._failed(worker.ticket, str(error), error.errno)
        else:
            worker.error_file = self._spawner.error_file(worker.ticket)
            environment = {**environment, error_file.NAME: str(worker.error_file)}
            self._spawner.begin(worker.ticket, environment, worker.log, cold=worker.standby is None)

    def launch_helper(  # noqa: PLR0913, PLR0917 (what a process is)
        self,
        program: tuple[str, ...],
        python: str,
        places: dict[str, str],
        log: Path,
        born: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        """Have *program* run as a helper: a fork of the starter, or cold by *python*; it is told by *born* (its pid) or *failed* (why)."""
        ticket = next(self._tickets)
        self._expected_helpers[ticket] = born, failed
        self._spawner.begin(ticket, places, log, program=(python, *program))

    def hear_spawner(self) -> None:
        """Learn of processes that have come to life by now."""
        self._spawner.hear()

    def _born(self, ticket: int, pid: int) -> None:
        if ticket in self._expected_helpers:
            self.helpers.add(pid)
            self._expected_helpers.pop(ticket)[0](pid)
            return
        worker = self._expected.pop(ticket)
        worker.pid, worker.started = pid, time.time()
        worker.advance()
        if worker.standby is None:
            self._emit("worker.started", rank=worker.rank, pid=pid, generation=worker.generation)
        else:
            self._emit("standby.started", id=worker.standby, pid=pid)
        if self._is_wanted_gone(worker):
            _signal(worker, signal.SIGKILL)

    def _failed(self, ticket: int, why: str, errno: int | None) -> None:
        if ticket in self._expected_helpers:
            self._expected_helpers.pop(ticket)[1](why)
            return
        worker = self._expected.pop(ticket)
        worker.gone = True
        if worker.standby is not None:
            nothing = {"pid": None, "code": None, "signal": None, "oom": None, "raised": None, "output": ""}
            self._lose_standby(worker, **nothing, ordered=worker.ordered, why=why, errno=errno)
        elif not self._is_wanted_gone(worker):
            self._emit("start.failed", rank=worker.rank, generation=worker.generation, why=why, errno=errno)

    # -- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, generation: int, number: int, grace: float) -> None:
        """Signal all workers up to *generation*; kill what is left after *grace* seconds. ``workers.exited`` tells when none is left.

        Standbys live on: the next generation may need them.
        """
        self._stopping = max(generation, self._stopping or 0)
        self.may_save = number != signal.SIGKILL
        self._spawner.forget([worker.ticket for worker in self.everybody() if self._is_stopping(worker)])
        self._signal_all(number)
        if number != signal.SIGKILL:
            at = time.monotonic() + grace
            self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        self._settle()

    def _is_stopping(self, worker: Worker) -> bool:
        return self._stopping is not None and worker.standby is None and worker.generation <= self._stopping

    def _is_wanted_gone(self, worker: Worker) -> bool:
        return worker.ordered or self._is_stopping(worker)

    def kill(self, worker: Worker) -> None:
        """Kill one, by order."""
        worker.ordered = True
        self._spawner.forget([worker.ticket])
        _signal(worker, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self.everybody():
            if self._is_stopping(worker):
                _signal(worker, number)

    def _settle(self) -> None:
        """Say that an ordered stop is complete once nothing is left, strays included: their ends lead here again."""
        if self._stopping is None or any(self._is_stopping(worker) for worker in self.everybody()) or self._spawner.forking:
            return  # one of our children may be a standby that has not been told of yet
        if self._end_strays():
            return
        generation, self._stopping, self._kill_at = self._stopping, None, None
        self._emit("workers.exited", generation=generation)

    def _end_strays(self) -> bool:
        """Kill what workers forked into sessions of their own: as orphans they are our children now. Tell whether there are any."""
        if self._spawner.forking:
            return False  # one of our children may be a process that has not been told of yet
        strays = set(children_of(os.getpid())) - {one.pid for one in self.everybody()} - {self._spawner.fork_server_pid} - self.helpers
        for pid in strays:
            kill(pid, signal.SIGKILL)
        return bool(strays)

    def end(self) -> None:
        """Kill all workers and standbys, and start none any more."""
        for standby in [standby for standby in self.standbys.values() if not standby.gone]:
            self.kill(standby)
        self.stop(self.generation, signal.SIGKILL, 0.0)
        self._spawner.end()
        self._settle()

    # -- watching -----------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Take in every change of state of a child."""
        if self._reaping:  # by an order that was among the last words of one of them
            return
        self._reaping = True
        try:
            changed = self._take_changes()
        finally:
            self._reaping = False
        if changed:
            self._settle()

    def _take_changes(self) -> bool:
        changed = False
        for found in _changes():
            changed = True
            worker = self._worker_with(found.si_pid)
            if worker is None and not self._spawner.buried(found.si_pid):
                self._spawner.hear()  # a worker's pid is told before it can end
                worker = self._worker_with(found.si_pid)
            if worker is not None:
                self._changed(worker, found)
            if found.si_code in _ENDED:
                if found.si_pid in self.helpers:
                    self.helpers.discard(found.si_pid)  # its number may be another's from now on
                    self.buried(found.si_pid)
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)
        return changed

    def _changed(self, worker: Worker, found: os.waitid_result) -> None:
        if found.si_code in _ENDED:
            kill_group(found.si_pid, signal.SIGKILL)  # what it forked goes with it; not reaped yet, the pid is still its own
            self._ended(worker, found)
        elif worker.standby is not None:
            return  # whether it stands still matters when it is needed
        elif found.si_code == os.CLD_STOPPED:
            self._emit("worker.stopped", rank=worker.rank, signal=found.si_status, generation=worker.generation, step=worker.step)
        elif found.si_code == os.CLD_CONTINUED:
            self._emit("worker.continued", rank=worker.rank, generation=worker.generation)

    def _ended(self, worker: Worker, found: os.waitid_result) -> None:
        at = time.time()
        self.last_words(worker)
        worker.gone = True
        self.ended_at = time.monotonic()
        by_signal = found.si_code != os.CLD_EXITED
        killed = by_signal and found.si_status == signal.SIGKILL
        facts: dict[str, Any] = {
            "pid": found.si_pid,
            "ended": at,
            "code": None if by_signal else found.si_status,
            "signal": found.si_status if by_signal else None,
            "oom": self._memory.killed(found.si_pid) if killed else None,
            "oom_blind": self._memory.blind if killed else None,
            "raised": worker.raised,
            "ordered": self._is_wanted_gone(worker),
            "output": worker.tail() if by_signal or found.si_status or not worker.finished else "",
        }
        left = worker.left_error()
        if facts["raised"] is None and HEAD not in facts["output"] and (by_signal or found.si_status):
            facts["raised"] = left  # where its output tells nothing: what it wrote itself may stand elsewhere
        if worker.standby is not None:
            self._lose_standby(worker, **facts, why=None, errno=None)
            return
        self.leavers = [leaver for leaver in self.leavers if leaver is not worker]
        finished = worker.finished or worker.heartbeats or not worker.managed
        self._emit("worker.exited", rank=worker.rank, generation=worker.generation, finished=finished, step=worker.step, **facts)
        if not facts["ordered"] and not (finished and facts["code"] == 0):
            self.fell()

    def _lose_standby(self, worker: Worker, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        assert worker.standby is not None
        if self.standbys.get(worker.standby) is worker:
            del self.standbys[worker.standby]
        self._emit("standby.exited", id=worker.standby, **facts)

    # -- time ---------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        leaving = [leaver.leave_by for leaver in self.leavers]
        return min([at for at in (self._kill_at, self._spawner.due(), *leaving) if at is not None], default=None)

    def tick(self, now: float) -> None:
        """Do what is due: kill what did not stop or leave in time, give up a starter that is stuck."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_all(signal.SIGKILL)
        for leaver in self.leavers:
            if leaver.leave_by is not None and now >= leaver.leave_by:
                leaver.leave_by = None
                self.kill(leaver)
        self._spawner.tick(now)
        self._settle()


def _make_private(folder: Path) -> None:
    """Make the folder for logs, for this user alone, wherever it lies: scripts print what is nobody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # somebody else's: whether logs can be written there is seen when they are
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


def _signal(worker: Worker, number: int) -> None:
    """Signal a worker and its process group, once each; one that is stopped must go on to take it."""
    if worker.pid is None:
        return
    if not kill_group(worker.pid, number):
        kill(worker.pid, number)  # before its setsid it leads no group yet
    if number != signal.SIGKILL:
        kill_group(worker.pid, signal.SIGCONT)


def _changes() -> Iterator[os.waitid_result]:
    """Yield what has happened to our children; one that has ended is still to be waited for, so that its pid stays its own."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, _ANY | os.WNOHANG | os.WNOWAIT)
            if found is not None and found.si_code not in _ENDED:
                found = os.waitid(os.P_PID, found.si_pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) or found
        except ChildProcessError:
            return
        if found is None:
            return
        yield found


def _ancestry(pid: int) -> Iterator[int]:
    """Yield *pid* and its ancestors, as far as they belong to us."""
    ours, ancestor = os.getpid(), pid
    for _ in range(64):
        if ancestor in {0, 1, ours}:
            return
        yield ancestor
        ancestor = parent_of(ancestor) or 0
