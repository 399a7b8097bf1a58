"""The processes of a job on this node: workers, leavers of earlier generations, and hot spares, with all that they forked."""

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

from holdfast.agent import schema
from holdfast.agent.node.identity import Identity
from holdfast.agent.workers.oom import OomDetector
from holdfast.agent.workers.spawner import Spawner, SpawnPlan
from holdfast.agent.workers.worker import ERROR_FILE, GPU_VARIABLES, Worker
from holdfast.detectors.training.tracebacks import HEAD
from holdfast.host.process import children_of, kill, kill_group, parent_of

_ENDED: Final = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
_ANY: Final = os.WEXITED | os.WSTOPPED | os.WCONTINUED


class WorkerGroup:
    """A node's processes of the job: starts, stops, signals and reaps them."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None], oom: OomDetector) -> None:
        self.workers: dict[int, Worker] = {}
        self.ended_at = float("-inf")
        """When one of them, or a hot spare, ended last (monotonic)."""
        self.hot_spares: dict[int, Worker] = {}
        self.leavers: list[Worker] = []
        """Workers of earlier generations whose ranks have been given to others."""
        self.generation = 0
        self.membership: dict[str, list[int]] = {}
        """Which node holds which ranks, as far as the controller has sent it: a few agents know all nodes, most only their own."""
        self.first = 0
        """The lowest rank of the current generation: its steps are reported one by one."""
        self.abandoned: int | None = None
        """The current generation, once it has been abandoned."""
        self.checkpoint_interval: int | None = None
        """Steps between two checkpoints of the current generation, if the controller has changed it meanwhile."""
        self.plan: SpawnPlan | None = None
        self.roles: dict[str, Any] | None = None
        """What the lowest rank has reported of the roles in the job, for controllers that come later."""
        self.before_end: Callable[[Worker], None] = lambda _worker: None
        """Called when a worker has ended, before its end is reported: its last messages are still in its socket."""
        self.helpers: set[int] = set()
        """Other children of the agent, which no worker has forked."""
        self.helper_ended: Callable[[int], None] = lambda _pid: None
        """Called with the pid of every helper that has ended."""
        self.crashed: Callable[[], None] = lambda: None
        """Called when a worker has ended that was neither stopped by a command nor finished."""
        self.may_save = False
        """Workers that are being stopped have the time to save what they have."""
        self._me, self._emit, self._oom = me, emit, oom
        self._spawner = Spawner(me, selector, emit)
        self._spawner.spawned, self._spawner.failed = self._spawned, self._failed
        self._request_ids = count()
        self._expected: dict[int, Worker] = {}
        self._expected_helpers: dict[int, tuple[Callable[[int], None], Callable[[str], None]]] = {}
        self._reaping = False
        self._stopping: int | None = None
        self._kill_at: float | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    def living(self) -> list[Worker]:
        """Return the current workers that have not ended, those that are still being started included."""
        return [worker for worker in self.workers.values() if not worker.exited]

    def everybody(self) -> list[Worker]:
        """Return all that have not ended: workers, leavers, hot spares."""
        return [one for one in (*self.workers.values(), *self.leavers, *self.hot_spares.values()) if not one.exited]

    def set_node_environment(self, environment: dict[str, str]) -> None:
        """Give processes that are started from now on these variables, in place of those that were set here before."""
        self._spawner.node_environment = environment

    @property
    def warm(self) -> bool:
        """Return whether there is a fork server, so that hot spares can be started."""
        return self.plan is not None and self.plan.warm and self._spawner.fork_server_pid is not None

    @property
    def stopping(self) -> bool:
        """Return whether the workers are being stopped."""
        return self._stopping is not None

    def worker_of(self, pid: int) -> Worker | None:
        """Return the living worker that *pid* is, or descends from: a command may run the training script in a child."""
        ours, ancestor = os.getpid(), pid
        for _ in range(64):
            if ancestor in {0, 1, ours}:
                return None
            worker = self._worker_with(ancestor)
            if worker is None and self._spawner.forking:
                self._spawner.receive()  # the pid may have been reported by now
                worker = self._worker_with(ancestor)
            if worker is not None:
                return worker
            ancestor = parent_of(ancestor) or 0
        return None

    def _worker_with(self, pid: int) -> Worker | None:
        return next((worker for worker in self.everybody() if worker.pid == pid), None)

    # -- starting -----------------------------------------------------------------------------------------------------

    def prepare(self, plan: SpawnPlan) -> bool:
        """Use a job's plan; return whether its workers will be forked from a fork server. Raise ``OSError`` when none could be started."""
        plan.log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # somebody else's: it is seen later whether logs can be written there
            if plan.log_directory.stat().st_mode & 0o077:
                plan.log_directory.chmod(0o700)  # scripts print secrets
        warm = self._spawner.prepare(plan)
        self.plan = plan
        return warm

    def start(self, generation: int, membership: schema.WireMembership, environments: dict[int, dict[str, str]]) -> None:
        """Start the workers of a new generation; events report how each was started, or why not."""
        assert self.plan is not None
        self.enter(generation, membership)
        self._oom.reset()
        self._kill_orphans()
        self.workers = {rank: self.new_worker(rank) for rank in environments}
        for rank, environment in environments.items():
            self.launch(self.workers[rank], environment)

    def enter(self, generation: int, membership: schema.WireMembership) -> None:
        """Make a new generation the current one."""
        self.generation, self.membership, self.first = generation, membership.ranks, membership.first
        self.abandoned, self.checkpoint_interval = None, None

    def new_worker(self, rank: int, *, hot_spare: int | None = None) -> Worker:
        """Return a worker of *rank*, or a hot spare, that is still to be launched."""
        assert self.plan is not None
        name = f"rank-{rank}.log" if hot_spare is None else f"hot-spare-{hot_spare}.log"
        return Worker(rank=rank, generation=self.generation, log=self.plan.log_directory / name, hot_spare=hot_spare)

    def launch(self, worker: Worker, environment: dict[str, str]) -> None:
        """Start *worker*. A hot spare needs a fork server: it must start quickly, and share the memory of what is loaded."""
        assert self.plan is not None
        worker.request_id = next(self._request_ids)
        worker.gpu_variables = self.gpu_variables(environment)
        self._expected[worker.request_id] = worker
        try:
            worker.open_log(self.plan.job)
        except OSError as error:
            self._failed(worker.request_id, str(error), error.errno)
        else:
            environment = {**environment, ERROR_FILE: str(worker.make_error_file(self._me.directory))}
            self._spawner.begin(worker.request_id, environment, worker.log, cold=worker.hot_spare is None)

    def gpu_variables(self, environment: dict[str, str]) -> dict[str, str]:
        """Return those of `GPU_VARIABLES` that a process has whose own variables are *environment*: the node's and the job's count too."""
        variables = self._spawner.environment(environment)
        return {name: variables[name] for name in GPU_VARIABLES if name in variables}

    def launch_helper(  # noqa: PLR0913, PLR0917 (what a process is)
        self,
        program: tuple[str, ...],
        python: str,
        variables: dict[str, str],
        log: Path,
        spawned: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        """Run *program* as a helper, in a fork of the fork server or in a new *python*; call *spawned* (its pid) or *failed* (why)."""
        request_id = next(self._request_ids)
        self._expected_helpers[request_id] = spawned, failed
        self._spawner.begin(request_id, variables, log, program=(python, *program))

    def receive_pids(self) -> None:
        """Read which processes the fork server has started by now."""
        self._spawner.receive()

    def _spawned(self, request_id: int, pid: int) -> None:
        if request_id in self._expected_helpers:
            self.helpers.add(pid)
            self._expected_helpers.pop(request_id)[0](pid)
            return
        worker = self._expected.pop(request_id)
        worker.pid, worker.started = pid, time.time()
        worker.advance()
        if worker.hot_spare is None:
            self._emit("worker.started", rank=worker.rank, pid=pid, generation=worker.generation)
        else:
            self._emit("hot-spare.started", id=worker.hot_spare, pid=pid)
        if self._is_unwanted(worker):
            _signal(worker, signal.SIGKILL)

    def _failed(self, request_id: int, why: str, errno: int | None) -> None:
        if request_id in self._expected_helpers:
            self._expected_helpers.pop(request_id)[1](why)
            return
        worker = self._expected.pop(request_id)
        worker.exited = True
        if worker.hot_spare is not None:
            unknown = {"pid": None, "code": None, "signal": None, "oom": None, "raised": None, "output": ""}
            self._hot_spare_exited(worker, **unknown, ordered=worker.ordered, why=why, errno=errno)
        elif not self._is_unwanted(worker):
            self._emit("start.failed", rank=worker.rank, generation=worker.generation, why=why, errno=errno)

    # -- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, generation: int, number: int, grace: float) -> None:
        """Signal all workers up to *generation*; kill what remains after *grace* seconds. ``workers.exited`` reports when none is left.

        Hot spares live on: the next generation may need them.
        """
        self._stopping = max(generation, self._stopping or 0)
        self.may_save = number != signal.SIGKILL
        self._spawner.cancel([worker.request_id for worker in self.everybody() if self._is_stopping(worker)])
        self._signal_all(number)
        if number != signal.SIGKILL:
            at = time.monotonic() + grace
            self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        self._finish_stop()

    def _is_stopping(self, worker: Worker) -> bool:
        return self._stopping is not None and worker.hot_spare is None and worker.generation <= self._stopping

    def _is_unwanted(self, worker: Worker) -> bool:
        return worker.ordered or self._is_stopping(worker)

    def kill(self, worker: Worker) -> None:
        """Kill one, by command."""
        worker.ordered = True
        self._spawner.cancel([worker.request_id])
        _signal(worker, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self.everybody():
            if self._is_stopping(worker):
                _signal(worker, number)

    def _finish_stop(self) -> None:
        """Report that a stop is complete once nothing is left, orphans included: their ends lead here again."""
        if self._stopping is None or any(self._is_stopping(worker) for worker in self.everybody()) or self._spawner.forking:
            return  # one of our children may be a hot spare whose pid is not known yet
        if self._kill_orphans():
            return
        generation, self._stopping, self._kill_at = self._stopping, None, None
        self._emit("workers.exited", generation=generation)

    def _kill_orphans(self) -> bool:
        """Kill what workers forked into sessions of their own: as orphans they are our children now. Return whether there are any."""
        if self._spawner.forking:
            return False  # one of our children may be a process whose pid is not known yet
        orphans = set(children_of(os.getpid())) - {one.pid for one in self.everybody()} - {self._spawner.fork_server_pid} - self.helpers
        for pid in orphans:
            kill(pid, signal.SIGKILL)
        return bool(orphans)

    def end(self) -> None:
        """Kill all workers and hot spares, and start none any more."""
        for hot_spare in [hot_spare for hot_spare in self.hot_spares.values() if not hot_spare.exited]:
            self.kill(hot_spare)
        self.stop(self.generation, signal.SIGKILL, 0.0)
        self._spawner.end()
        self._finish_stop()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Handle every change of state of a child."""
        if self._reaping:  # by a command that was among the last messages of one of them
            return
        self._reaping, changed = True, False
        try:
            for found in _changes():
                changed = True
                self._child_changed(found)
        finally:
            self._reaping = False
        if changed:
            self._finish_stop()

    def _child_changed(self, found: os.waitid_result) -> None:
        worker, has_ended = self._worker_with(found.si_pid), found.si_code in _ENDED
        if worker is None and not self._spawner.reaped(found.si_pid):
            self._spawner.receive()  # a worker's pid is reported before it can end
            worker = self._worker_with(found.si_pid)
        if worker is not None and has_ended:
            kill_group(found.si_pid, signal.SIGKILL)  # its forks; it is not reaped yet, so the pid is still its own
            self._worker_ended(worker, found)
        elif worker is not None and worker.hot_spare is None:  # whether a hot spare is stopped matters when it is needed
            if found.si_code == os.CLD_STOPPED:
                self._emit("worker.stopped", rank=worker.rank, signal=found.si_status, generation=worker.generation, step=worker.step)
            elif found.si_code == os.CLD_CONTINUED:
                self._emit("worker.continued", rank=worker.rank, generation=worker.generation)
        if has_ended:
            if found.si_pid in self.helpers:
                self.helpers.discard(found.si_pid)  # its number may be another's from now on
                self.helper_ended(found.si_pid)
            os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    def _worker_ended(self, worker: Worker, found: os.waitid_result) -> None:
        at = time.time()
        self.before_end(worker)
        worker.exited = True
        self.ended_at = time.monotonic()
        by_signal = found.si_code != os.CLD_EXITED
        killed = by_signal and found.si_status == signal.SIGKILL
        facts: dict[str, Any] = {
            "pid": found.si_pid,
            "ended": at,
            "code": None if by_signal else found.si_status,
            "signal": found.si_status if by_signal else None,
            "oom": self._oom.killed(found.si_pid) if killed else None,
            "oom_blind": self._oom.blind if killed else None,
            "raised": worker.raised,
            "ordered": self._is_unwanted(worker),
            "output": worker.tail() if by_signal or found.si_status or not worker.finished else "",
        }
        error = worker.take_error()
        if facts["raised"] is None and HEAD not in facts["output"] and (by_signal or found.si_status):
            facts["raised"] = error  # only where its output has no traceback: the script may have logged elsewhere
        if worker.hot_spare is not None:
            self._hot_spare_exited(worker, **facts, why=None, errno=None)
            return
        self.leavers = [leaver for leaver in self.leavers if leaver is not worker]
        finished = worker.finished or worker.heartbeats or not worker.managed
        self._emit("worker.exited", rank=worker.rank, generation=worker.generation, finished=finished, step=worker.step, **facts)
        if not facts["ordered"] and not (finished and facts["code"] == 0):
            self.crashed()

    def _hot_spare_exited(self, worker: Worker, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        assert worker.hot_spare is not None
        if self.hot_spares.get(worker.hot_spare) is worker:
            del self.hot_spares[worker.hot_spare]
        self._emit("hot-spare.exited", id=worker.hot_spare, **facts)

    # -- time ---------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return when `tick` has something to do (monotonic)."""
        leaving = [leaver.leave_by for leaver in self.leavers]
        return min([at for at in (self._kill_at, self._spawner.due(), *leaving) if at is not None], default=None)

    def tick(self, now: float) -> None:
        """Do what is due: kill what did not stop or leave in time, give up a stuck fork server."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_all(signal.SIGKILL)
        for leaver in self.leavers:
            if leaver.leave_by is not None and now >= leaver.leave_by:
                leaver.leave_by = None
                self.kill(leaver)
        self._spawner.tick(now)
        self._finish_stop()


def _signal(worker: Worker, number: int) -> None:
    """Signal a worker and its process group, once each; a stopped one must be continued to take the signal."""
    if worker.pid is None:
        return
    if not kill_group(worker.pid, number):
        kill(worker.pid, number)  # before its setsid it leads no group yet
    if number != signal.SIGKILL:
        kill_group(worker.pid, signal.SIGCONT)


def _changes() -> Iterator[os.waitid_result]:
    """Yield changes of state of our children; one that has ended is not reaped here, so that its pid stays its own."""
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
