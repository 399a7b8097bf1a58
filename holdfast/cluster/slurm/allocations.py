"""Keep the allocations of one job: submit them, follow them, renew them before they end, and release them.

A thread polls Slurm every second or so. Training and recovery never wait for Slurm: all answers are from the last poll.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.cluster.interface import AllocationRequest, DrainReason
from holdfast.cluster.slurm.commands import IDLE_SECONDS, SbatchRequest, in_queue, logs_of, run_command
from holdfast.cluster.slurm.drains import Drains
from holdfast.cluster.slurm.parsing import Allocation, SlurmNodeState, node_states
from holdfast.detectors.evidence import SchedulerNodeState
from holdfast.errors import HoldfastError, NoSlurm, SlurmRefused, SlurmUnavailable
from holdfast.log import note
from holdfast.plurals import plural
from holdfast.report.text.wording import moment
from holdfast.spec import SlurmCluster

log = logging.getLogger("holdfast.cluster.slurm")

POLL_SECONDS: Final = 1.0
"""Time between two polls while some allocations are pending, and without a job."""
CALM_POLL_SECONDS: Final = 5.0
"""Time between two polls while nothing is missing."""
NODES_SECONDS: Final = 10.0
"""Time between two reads of the states of nodes."""
UNSEEN_SECONDS: Final = 30.0
"""Time for which a submitted allocation may be missing from the queue."""
RETRY_SECONDS: Final = 30.0
"""Time until an allocation is submitted again after Slurm refused one; doubled with each that fails, up to the maximum."""
MAX_RETRY_SECONDS: Final = 600.0
MIN_LIFE_SECONDS: Final = 20.0
"""An allocation that ends sooner than this by itself has failed."""
REQUEUE_SECONDS: Final = 60.0
"""Time to wait for an allocation that Slurm is completing: it may have been requeued."""
STOP_SECONDS: Final = 30.0
"""A node is drained this long before its final checkpoint must begin."""


class Allocations:
    """The allocations of one job, present and requested; without a job, all of this user's."""

    def __init__(self, cluster: SlurmCluster, job: str = "", name: str = "") -> None:
        self._cluster, self._job, self._name, self._directory = cluster, job, name, Path("/")
        self._outer = os.environ.get("SLURM_JOB_ID") if cluster.allocation == "auto" else None
        """The allocation that is used and not ours to end: the one named in the cluster file, or that which this process runs in."""
        if isinstance(cluster.allocation, int):
            self._outer = str(cluster.allocation)
        self.present: tuple[Allocation, ...] = ()
        """All allocations, from the last poll."""
        self.by_node: dict[str, Allocation] = {}
        """Node to its running allocation; of several the one that ends last."""
        self.states: Mapping[str, SlurmNodeState] = {}
        """Node to its state in Slurm."""
        self._submitted: dict[str, tuple[float, int]] = {}
        """Allocations that are not in the queue yet: when they were submitted, and for how many nodes."""
        self._next_submit = self._next_nodes = 0.0
        self._messages: list[str] = []
        self._described: dict[str, str] = {}
        """Allocation to its newest description."""
        self._problem = ""
        self._reported_problems: set[str] = set()
        self.refused: HoldfastError | None = None
        """Why Slurm allocates nothing and will not, if that is so."""
        self._hurried: set[str] = set()
        """Allocations that were to start without the pause after a requeue."""
        self._indivisible: set[str] = set()
        """Allocations of which Slurm does not let us release a part."""
        self._request, self._has_request = AllocationRequest(), False
        self._began: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._completing: dict[str, float] = {}
        """Allocations that Slurm is completing: since when."""
        self._released: set[str] = set()
        self._failures = 0
        self._drains = Drains(cluster)
        self._polled = threading.Event()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def is_followed(self) -> bool:
        """Return whether a thread polls."""
        return self._thread is not None

    def is_allocated(self, node: str) -> bool:
        """Return whether *node* is in a running allocation."""
        return node in self.by_node

    def allocated_since(self, node: str) -> float | None:
        """Return when the allocation of *node* started."""
        allocation = self.by_node.get(node)
        return None if allocation is None else allocation.began

    def drain_reason(self, node: str, now: float) -> DrainReason | None:
        """Return why the job must leave *node*, once that is near: its allocation ends, or an administrator has drained it."""
        allocation, state = self.by_node.get(node), self.states.get(node)
        if allocation is None:
            return None
        if state is not None and state.is_leaving and not self._drains.are_of(state):
            return DrainReason(reason=f"in Slurm it is {state.describe()}", since=now)
        if allocation.ends is None:
            return None
        notice = self._notice()
        if allocation.began is not None:  # half of a short one is for work, whatever it takes to leave it
            notice = min(notice, (allocation.ends - allocation.began) / 2)
        if now < allocation.ends - notice:
            return None
        reason = f"its allocation, Slurm job {allocation.id}, ends at {moment(allocation.ends)}"
        return DrainReason(reason=reason, since=allocation.ends - notice, by=allocation.ends)

    def _notice(self) -> float:
        """Return how many seconds before its end a node is left."""
        return max(self._cluster.lead_time.total_seconds(), self._request.final_checkpoint_seconds + STOP_SECONDS)

    def usable(self, now: float) -> list[str]:
        """Return the nodes that the job has and may go on using."""
        return [
            node
            for node in self.by_node
            if node not in self._request.excluded
            and not self._is_lost(node)
            and not self._is_dead(node)
            and self.drain_reason(node, now) is None
        ]

    def _is_lost(self, node: str) -> bool:
        since, began = self._request.unreachable.get(node), self.allocated_since(node)
        return since is not None and (began is None or began < int(since))  # Slurm reports whole seconds

    def _is_dead(self, node: str) -> bool:
        state = self.states.get(node)
        return state is not None and state.is_dead

    def ends_at(self) -> float | None:
        """Return when this process will be ended, where it runs inside an allocation that the job uses."""
        if self._outer is None or self._outer != os.environ.get("SLURM_JOB_ID"):
            return None
        return next((one.ends for one in self.present if one.id == self._outer), None)

    def scheduler_states(self) -> list[SchedulerNodeState]:
        """Return Slurm's states of the nodes that the job has."""
        now, used = time.time(), {*self.by_node, *self._request.in_use}
        states = [self.states[node] for node in used if node in self.states]
        return [
            SchedulerNodeState(node=one.name, at=now, states=one.states, reason=one.reason, ours=self._drains.are_of(one)) for one in states
        ]

    def describe(self) -> str:
        """Return what is allocated, and why there is not more, as text."""
        parts = [one.describe() for one in self.present]
        return "; ".join([*parts, *([self._problem] if self._problem else [])]) or "Slurm has allocated nothing yet"

    def new_messages(self) -> list[str]:
        """Return the messages since the last call."""
        with self._lock:
            taken, self._messages = self._messages, []
        return taken

    def _report(self, text: str) -> None:
        with self._lock:
            self._messages.append(text)
        note(log, "slurm.message", job=self._name, text=text)

    # -- following ----------------------------------------------------------------------------------------------------

    def begin(self, job: str, name: str, directory: Path) -> None:
        """Follow the allocations of *job* (its id) from now on, and keep as many nodes as requested."""
        self._job, self._name, self._directory = job, name, directory
        self.present, self.by_node = (), {}  # until now those of all jobs
        try:
            self.poll()
        except SlurmUnavailable as error:
            self._report_problem(error)
        self._thread = threading.Thread(target=self._follow, name="slurm", daemon=True)
        self._thread.start()

    def request(self, request: AllocationRequest) -> None:
        """Set what the job needs from now on."""
        before, self._request, self._has_request = self._request, request, True
        if before != request:
            self._wake.set()

    def close(self, *, end: bool) -> None:
        """Stop polling; with *end*, release every allocation that was submitted."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(30.0)
        if end:
            with self._lock:
                ids = list(dict.fromkeys([*(one.id for one in self.present if one.id != self._outer), *self._submitted]))
            self._cancel(ids)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                request = self._request
                self.poll()
                if self._request == request:  # else this poll is older than what the job has lost: the next one follows at once
                    self._adjust(time.time())
                self._polled.set()
            except HoldfastError as error:
                self._report_problem(error)
            calm = self._polled.is_set() and not self._missing(time.time()) and not any(one.is_pending for one in self.present)
            self._wake.wait(CALM_POLL_SECONDS if calm else POLL_SECONDS)
            self._wake.clear()

    def _report_problem(self, error: HoldfastError) -> None:
        self._problem = str(error)
        if self._problem not in self._reported_problems:  # once each: it is tried again and again
            self._reported_problems.add(self._problem)
            self._report(self._problem)

    def is_slurm_reachable(self) -> bool:
        """Return whether Slurm's controller answers now."""
        try:
            in_queue(self._job, self._name, self._outer)
        except HoldfastError:
            return False
        return True

    def poll(self) -> None:
        """Read the state of our allocations and, now and then, of the nodes; raise `HoldfastError` when Slurm does not answer."""
        found = in_queue(self._job, self._name, self._outer)
        with self._lock:
            now, seen = time.time(), {one.id for one in found}
            self._submitted = {id_: one for id_, one in self._submitted.items() if id_ not in seen and now - one[0] < UNSEEN_SECONDS}
            self.present = tuple(found)
            by_end = sorted((one for one in found if one.is_running), key=lambda one: one.ends or float("inf"))
            self.by_node = {node: one for one in by_end for node in one.nodes}
        self._problem = ""
        if self._job:  # those of other jobs are listed, and otherwise left alone
            self._note_changes(found, now)
        if time.monotonic() >= self._next_nodes:
            self._next_nodes = time.monotonic() + NODES_SECONDS
            where = [f"--partition={self._cluster.partition}"] if self._cluster.partition else []
            try:
                self.states = node_states(run_command("sinfo", "--json", *where), self._cluster.partition)
            except HoldfastError as error:  # they are evidence: without them nodes can still be allocated
                if not self.is_followed:
                    raise
                self._report_problem(error)

    def _note_changes(self, found: Sequence[Allocation], now: float) -> None:
        """Report what is new of the job's allocations, and remember what is needed to count them."""
        for one in found:
            self._report_change(one)
            if not one.is_completing:  # of a completing one Slurm counts the nodes that are left
                self._sizes[one.id] = one.count
            self._sizes.setdefault(one.id, one.count)
            if one.is_running:
                self._completing.pop(one.id, None)
                self._began.setdefault(one.id, now)
        for id_ in self._described.keys() - {one.id for one in found}:
            self._report_end(id_, now)

    def _report_change(self, one: Allocation) -> None:
        """Report what is new of an allocation, and have a requeued one start at once."""
        text = one.describe()
        if self._described.get(one.id) != text:
            self._described[one.id] = text
            self._report(f"{text} until {moment(one.ends)}" if one.is_running and one.ends is not None else text)
        if one.is_pending and one.reason == "BeginTime" and one.id not in self._hurried and one.id != self._outer:
            self._hurried.add(one.id)  # a requeued job starts two minutes later at the earliest, unless its owner asks for it
            with suppress(SlurmRefused):
                run_command("scontrol", "update", f"JobId={one.id}", "StartTime=now")

    def _report_end(self, id_: str, now: float) -> None:
        """Report the end of an allocation; after one that failed as soon as it had started, wait before the next is submitted."""
        del self._described[id_]
        began, released = self._began.pop(id_, None), id_ in self._released
        if released or id_ == self._outer or (began is not None and now - began > MIN_LIFE_SECONDS):
            self._failures = 0 if not released else self._failures
            self._report(f"Slurm job {id_} has ended")
            return
        self._failures += 1
        pause = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** (self._failures - 1))
        self._next_submit = time.monotonic() + pause
        logs = logs_of(self._name, self._directory, id_)
        where = next((str(path) for path in logs if path.exists()), f"{logs[0]} or {logs[1]} on its first node, if that has either folder")
        self._report(f"Slurm job {id_} ended as soon as it had started: see {where}. The next request follows in {pause:.0f} s")

    # -- having enough ------------------------------------------------------------------------------------------------

    def _missing(self, now: float) -> int:
        """Return how many nodes to request; below zero: how many requested ones are not needed."""
        ends = self.ends_at()
        if ends is not None and now > ends - self._notice():  # this process ends with its allocation, and requests nothing more
            return 0
        pending = sum(count for _, count in self._submitted.values())
        for one in self.present:
            may_return = one.is_completing and one.id not in self._released and one.id != self._outer  # Slurm may have requeued it
            if one.is_pending or (may_return and now - self._completing.setdefault(one.id, now) < REQUEUE_SECONDS):
                pending += self._sizes[one.id]
        return self._request.nodes - len(self.usable(now)) - pending

    def _adjust(self, now: float) -> None:
        """Submit what is missing, release what is of no use, and drain excluded nodes."""
        if self._has_request and self._cluster.drain:
            messages = list(self._drains.update(self._request.excluded, self._request.returned, self.states))
            self._next_nodes = 0.0 if messages else self._next_nodes
            for text in messages:
                self._report(text)
        self._release(now)
        missing = self._missing(now)
        if missing < 0:
            self._cancel_pending(-missing)
        if missing <= 0 or time.monotonic() < self._next_submit:
            return
        self._next_submit = time.monotonic() + RETRY_SECONDS
        request = SbatchRequest(self._cluster, self._job, self._name, self._directory)
        excluded = self._request.excluded.keys() & self.states.keys()
        try:
            for count in [1] * missing if self.usable(now) else [missing]:  # one by one they come sooner; a launch needs all at once
                id_ = request.submit(count, excluded)
                with self._lock:
                    self._submitted[id_] = time.time(), count
                self._report(f"requested {plural(count, 'node')} from Slurm: job {id_}")
        except (SlurmRefused, NoSlurm) as error:
            self.refused = error
            raise
        self.refused = None
        self._next_submit = 0.0 if not self._failures else self._next_submit

    def _cancel_pending(self, surplus: int) -> None:
        """Cancel pending allocations of no more than *surplus* nodes, smallest first."""
        for one in sorted(self.present, key=lambda one: one.count):
            if one.is_pending and one.id != self._outer and one.count <= surplus:
                surplus -= one.count
                self._report(f"Slurm job {one.id} is cancelled: there are enough nodes")
                self._cancel([one.id])

    def _release(self, now: float) -> None:
        """Release nodes that are of no use to the job any more."""
        useful = {*self.usable(now), *self._request.in_use}
        if self._missing(now) > 0 or any(one.is_pending for one in self.present):  # an unreachable node may return before a new one comes
            useful |= {node for node in self._request.unreachable if self.drain_reason(node, now) is None and not self._is_dead(node)}
        for one in self.present:
            if not one.is_running or one.id == self._outer or not self._request.nodes:
                continue
            if useful.isdisjoint(one.nodes):
                self._report(f"Slurm job {one.id} is released: the job uses none of its nodes")
                self._cancel([one.id])
            elif (excluded := [node for node in one.nodes if node in self._request.excluded and node not in useful]) and (
                one.id not in self._indivisible
            ):
                self._shrink(one, excluded)

    def _shrink(self, one: Allocation, nodes: list[str]) -> None:
        """Release some nodes of an allocation."""
        kept = [node for node in one.nodes if node not in nodes]
        try:
            run_command("scontrol", "update", f"JobId={one.id}", f"NodeList={','.join(kept)}")
        except SlurmRefused as error:
            self._indivisible.add(one.id)
            note(log, "slurm.shrink-rejected", allocation=one.id, why=error)
            return
        self._report(f"Slurm job {one.id} has released {', '.join(nodes)}")

    def _cancel(self, ids: list[str]) -> None:
        if not ids:
            return
        self._released.update(ids)
        try:
            run_command("scancel", *ids)
        except SlurmRefused as error:  # it has ended already
            note(log, "slurm.cancel-rejected", allocations=",".join(ids), why=error)
        except SlurmUnavailable as error:
            jobs = f"Slurm job {ids[0]} ends by itself" if len(ids) == 1 else f"Slurm jobs {', '.join(ids)} end by themselves"
            self._report(f"{error}. {jobs} within {IDLE_SECONDS / 60:.0f} minutes after the last agent has ended")
