"""The allocations of one job: asked for, followed, renewed before they end, and given back.

A thread looks every second or so. Nobody who trains or recovers waits for Slurm: what is known is what the thread last saw.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from detectors.evidence import SchedulerNodeState
from holdfast.cluster.interface import AllocationRequest, Leaving
from holdfast.cluster.slurm.allocation_request import IDLE, SbatchRequest, logs_of, submit
from holdfast.cluster.slurm.commands import asked
from holdfast.cluster.slurm.drains import Drains
from holdfast.cluster.slurm.parsing import Allocation, SlurmNodeState, node_states
from holdfast.cluster.slurm.queue import in_queue
from holdfast.errors import HoldfastError, NoSlurm, SlurmRefused, SlurmUnavailable
from holdfast.log import note
from holdfast.report.wording import moment, plural
from holdfast.spec import SlurmCluster

log = logging.getLogger("holdfast.cluster.slurm")

EVERY: Final = 1.0
"""Seconds between two looks at our allocations while some are to come, and without a job."""
CALM: Final = 5.0
"""And while all is there."""
NODES: Final = 10.0
"""Seconds between two looks at the states of nodes."""
UNSEEN: Final = 30.0
"""Seconds for which an allocation that was asked for may be missing from what Slurm tells."""
AGAIN: Final = 30.0
"""Seconds until it is asked again for what was refused."""
LONGEST: Final = 600.0
BRIEF: Final = 20.0
"""Seconds that an allocation lasts at least when all is well."""
CLEANED: Final = 60.0
"""Seconds for which one that is cleaned up is waited for, as it may come back."""
STOP: Final = 30.0
"""Seconds before the last save from which on a node whose time ends is given to nobody."""


class Allocations:
    """What Slurm has given, or will give, to one job of ours; without a job, what it has given to all of this user's."""

    def __init__(self, cluster: SlurmCluster, job: str = "", name: str = "") -> None:
        self._cluster, self._job, self._name, self._directory = cluster, job, name, Path("/")
        self._outer = self._found_outer()
        self._seen: tuple[Allocation, ...] = ()
        self._places: dict[str, Allocation] = {}
        """Node to its allocation."""
        self._states: dict[str, SlurmNodeState] = {}
        self._asked: dict[str, tuple[float, int]] = {}
        """Allocations that were asked for and are not seen yet: when, and for how many nodes."""
        self._again = self._next_nodes = 0.0
        self._news: list[str] = []
        self._told: dict[str, str] = {}
        self._trouble = ""
        self._complaints: set[str] = set()
        self._refused: SlurmRefused | NoSlurm | None = None
        self._hurried: set[str] = set()
        self._whole: set[str] = set()
        """Allocations of which Slurm does not let us give back a part."""
        self._wish, self._wished = AllocationRequest(), False
        self._began: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._ended: dict[str, float] = {}
        """Allocations that are being cleaned up: since when."""
        self._returned: set[str] = set()
        self._failures = 0
        self._drains = Drains(cluster)
        self._looked = threading.Event()
        self._wake, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def _found_outer(self) -> str | None:
        """Return the allocation that is used and not ours to end: the one named, or that which this process runs inside of."""
        if isinstance(self._cluster.allocation, int):
            return str(self._cluster.allocation)
        return os.environ.get("SLURM_JOB_ID") if self._cluster.allocation == "auto" else None

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def present(self) -> tuple[Allocation, ...]:
        """Return all allocations as they were last seen."""
        return self._seen

    @property
    def states(self) -> Mapping[str, SlurmNodeState]:
        """Return the nodes as Slurm last told of them."""
        return self._states

    @property
    def is_followed(self) -> bool:
        """Tell whether a thread looks at them all the time."""
        return self._thread is not None

    @property
    def refused(self) -> HoldfastError | None:
        """Return why Slurm gives us nothing and would not later, if that is so."""
        return self._refused

    def allocation_of(self, node: str) -> Allocation | None:
        """Return the allocation that *node* is in; of several the one that lasts longest."""
        return self._places.get(node)

    def nodes(self) -> list[str]:
        """Return the nodes of all allocations that have begun."""
        return list(self._places)

    def allocated_since(self, node: str) -> float | None:
        """Return when the allocation began that *node* is in."""
        one = self.allocation_of(node)
        return None if one is None else one.began

    def drain_reason(self, node: str, now: float) -> Leaving | None:
        """Return why *node* is to be left, once that is near: its allocation ends, or somebody has drained it."""
        state = self._states.get(node)
        if state is not None and state.is_leaving and not self._drains.are_of(state) and self.allocation_of(node) is not None:
            return Leaving(reason=f"Slurm has it {state.describe()}", since=now)
        return self._ending(node, now)

    def _ending(self, node: str, now: float) -> Leaving | None:
        one = self.allocation_of(node)
        if one is None or one.ends is None:
            return None
        notice = self._notice()
        if one.began is not None:  # half of a short one is for work, whatever it takes to leave it
            notice = min(notice, (one.ends - one.began) / 2)
        if now < one.ends - notice:
            return None
        return Leaving(reason=f"Slurm job {one.id}, which it belongs to, ends at {moment(one.ends)}", since=one.ends - notice, by=one.ends)

    def is_allocated(self, node: str) -> bool:
        """Tell whether *node* is in an allocation that has begun and is not over."""
        return self.allocation_of(node) is not None

    def _notice(self) -> float:
        return max(self._cluster.ahead.total_seconds(), self._wish.save + STOP)

    def usable(self, now: float) -> list[str]:
        """Return the nodes that the job has and may go on using."""
        out = self._wish.out
        return [
            node
            for node in self.nodes()
            if node not in out and not self._is_lost(node) and not self._is_dead(node) and self.drain_reason(node, now) is None
        ]

    def ends_at(self) -> float | None:
        """Return when the time of this very process is over, where it runs inside of an allocation that the job uses."""
        if self._outer is None or self._outer != os.environ.get("SLURM_JOB_ID"):
            return None
        return next((one.ends for one in self._seen if one.id == self._outer), None)

    def scheduler_states(self) -> list[SchedulerNodeState]:
        """Return what Slurm says of the nodes that the job has."""
        now, had = time.time(), set(self.nodes()) | self._wish.used
        states = [self._states[node] for node in had if node in self._states]
        return [
            SchedulerNodeState(node=one.name, at=now, states=one.states, reason=one.reason, ours=self._drains.are_of(one)) for one in states
        ]

    def _is_lost(self, node: str) -> bool:
        at, one = self._wish.lost.get(node), self._places.get(node)
        return at is not None and (one is None or one.began is None or one.began < int(at))  # Slurm tells whole seconds

    def _is_dead(self, node: str) -> bool:
        state = self._states.get(node)
        return state is not None and state.is_dead

    def describe(self) -> str:
        """Say what is there, and why not more."""
        words = [one.describe() for one in self._seen]
        return "; ".join([*words, *([self._trouble] if self._trouble else [])]) or "Slurm has given nothing yet"

    def new_messages(self) -> list[str]:
        """Return what there is to tell since the last time, in words."""
        with self._lock:
            taken, self._news = self._news, []
        return taken

    def _tell(self, text: str) -> None:
        with self._lock:
            self._news.append(text)
        note(log, "slurm.message", job=self._name, text=text)

    # -- following ----------------------------------------------------------------------------------------------------

    def begin(self, job: str, name: str, directory: Path) -> None:
        """Follow the allocations of *job* (its id) from now on, and keep as many nodes as it wishes for."""
        self._job, self._name, self._directory = job, name, directory
        try:
            self.look()
        except SlurmUnavailable as error:
            self._troubled(error)
        self._thread = threading.Thread(target=self._follow, name="slurm", daemon=True)
        self._thread.start()

    def request(self, request: AllocationRequest) -> None:
        """Learn what the job needs from now on."""
        before, self._wish, self._wished = self._wish, request, True
        if before != request:
            self._wake.set()

    def close(self, *, end: bool) -> None:
        """Look no more; with *end*, give everything back that was asked for."""
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(30.0)
        if end:
            self._give_back(self._numbers())

    def _numbers(self) -> list[str]:
        with self._lock:
            return list(dict.fromkeys([*(one.id for one in self._seen if one.id != self._outer), *self._asked]))

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                request = self._wish
                self.look()
                if self._wish == request:  # else what was seen is older than what the job has lost: it is looked again at once
                    self._keep_up(time.time())
                self._looked.set()
            except HoldfastError as error:
                self._troubled(error)
            calm = self._looked.is_set() and not self._missing(time.time()) and not any(one.is_coming for one in self._seen)
            self._wake.wait(CALM if calm else EVERY)
            self._wake.clear()

    def _troubled(self, error: HoldfastError) -> None:
        self._trouble = str(error)
        if self._trouble not in self._complaints:  # each once: it is tried again and again
            self._complaints.add(self._trouble)
            self._tell(self._trouble)

    def answers(self) -> bool:
        """Tell whether Slurm answers now."""
        try:
            in_queue(self._job, self._name, self._outer)
        except HoldfastError:
            return False
        return True

    def look(self) -> None:
        """Ask Slurm how our allocations and, now and then, the nodes stand; raise `HoldfastError` when it does not say."""
        found = in_queue(self._job, self._name, self._outer)
        with self._lock:
            now, seen = time.time(), {one.id for one in found}
            self._asked = {number: told for number, told in self._asked.items() if number not in seen and now - told[0] < UNSEEN}
            self._seen = tuple(found)
            lasting = sorted((one for one in found if one.is_here), key=lambda one: one.ends or float("inf"))
            self._places = {node: one for one in lasting for node in one.nodes}
        self._trouble = ""
        for one in found:
            self._note(one)
            if not one.is_ending:  # of one that is cleaned up Slurm counts the nodes that are left
                self._sizes[one.id] = one.count
            self._sizes.setdefault(one.id, one.count)
            if one.is_here:
                self._ended.pop(one.id, None)
                self._began.setdefault(one.id, now)
        for number in self._told.keys() - seen:
            self._over_is(number, now)
        if time.monotonic() >= self._next_nodes:
            self._next_nodes = time.monotonic() + NODES
            where = [f"--partition={self._cluster.partition}"] if self._cluster.partition else []
            try:
                self._states = node_states(asked("sinfo", "--json", *where), self._cluster.partition)
            except HoldfastError as error:  # they are evidence, and nothing that nodes could not be had without
                if not self.is_followed:
                    raise
                self._troubled(error)

    def _over_is(self, number: str, now: float) -> None:
        """Tell of the end of an allocation; after one that ended by itself as soon as it had begun, wait before asking again."""
        del self._told[number]
        began, given_back = self._began.pop(number, None), number in self._returned
        if given_back or number == self._outer or (began is not None and now - began > BRIEF):
            self._failures = 0 if not given_back else self._failures
            self._tell(f"Slurm job {number} is over")
            return
        self._failures += 1
        pause = min(LONGEST, AGAIN * 2 ** (self._failures - 1))
        self._again = time.monotonic() + pause
        logs = logs_of(self._name, self._directory, number)
        where = next((str(log) for log in logs if log.exists()), f"{logs[0]} or {logs[1]} on its first node, if that has either folder")
        self._tell(f"Slurm job {number} ended as soon as it had begun: see {where}. It is asked again in {pause:.0f} s")

    def _note(self, one: Allocation) -> None:
        """Tell what is new of an allocation."""
        words = one.describe()
        if self._told.get(one.id) != words:
            self._told[one.id] = words
            until = f" until {moment(one.ends)}" if one.is_here and one.ends is not None else ""
            self._tell(f"{words}{until}")
        if one.is_coming and one.reason == "BeginTime" and one.id not in self._hurried and one.id != self._outer:
            self._hurried.add(one.id)  # what is put back into the queue begins two minutes later at the earliest, unless its owner says so
            with suppress(SlurmRefused):
                asked("scontrol", "update", f"JobId={one.id}", "StartTime=now")

    # -- having enough ------------------------------------------------------------------------------------------------

    def _missing(self, now: float) -> int:
        over = self.ends_at()
        if over is not None and now > over - self._notice():  # this process ends with them, and asks for nothing any more
            return 0
        coming = sum(self._sizes[one.id] for one in self._seen if one.is_coming or self._may_come_back(one, now)) + sum(
            count for _, count in self._asked.values()
        )
        return self._wish.nodes - len(self.usable(now)) - coming

    def _keep_out(self) -> None:
        """Have Slurm know which nodes are out of service."""
        told = list(self._drains.keep_up(self._wish.out, self._wish.back, self._states))
        if told:
            self._next_nodes = 0.0
        for text in told:
            self._tell(text)

    def _may_come_back(self, one: Allocation, now: float) -> bool:
        """Tell whether an allocation is just being cleaned up that we did not give back: Slurm may have put it back into the queue."""
        if not one.is_ending or one.id in self._returned or one.id == self._outer:
            return False
        return now - self._ended.setdefault(one.id, now) < CLEANED

    def _keep_up(self, now: float) -> None:
        """Ask for what is missing, give back what is of no use, and have Slurm know which nodes are out."""
        if self._wished and self._cluster.drain:
            self._keep_out()
        self._release(now)
        missing = self._missing(now)
        if missing < 0:
            self._take_back(-missing)
        if missing <= 0 or time.monotonic() < self._again:
            return
        self._again = time.monotonic() + AGAIN
        pieces = [1] * missing if self.usable(now) else [missing]  # one by one they come sooner; a start needs all
        try:
            for count in pieces:
                self._submit(count)
        except (SlurmRefused, NoSlurm) as error:
            self._refused = error
            raise
        self._refused = None
        self._again = 0.0 if not self._failures else self._again

    def _submit(self, count: int) -> None:
        number = submit(
            SbatchRequest(self._cluster, self._job, self._name, self._directory), count, self._wish.out.keys() & self._states.keys()
        )
        with self._lock:
            self._asked[number] = time.time(), count
        self._tell(f"asked Slurm for {plural(count, 'node')}: job {number}")

    def _take_back(self, surplus: int) -> None:
        """Take back what was asked for and has not begun, where others came meanwhile."""
        for one in sorted(self._seen, key=lambda one: one.count):
            if one.is_coming and one.id != self._outer and one.count <= surplus:
                surplus -= one.count
                self._tell(f"Slurm job {one.id} is taken back: there are enough nodes")
                self._give_back([one.id])

    def _release(self, now: float) -> None:
        """Give back nodes that are of no use to the job any more."""
        usable = set(self.usable(now)) | self._wish.used
        if self._missing(now) > 0 or any(
            one.is_coming for one in self._seen
        ):  # what does not answer may come back before another one comes
            usable |= {node for node in self._wish.lost if self.drain_reason(node, now) is None and not self._is_dead(node)}
        for one in self._seen:
            if not one.is_here or one.id == self._outer or not self._wish.nodes:
                continue
            kept = [node for node in one.nodes if node in usable]
            if not kept:
                self._tell(f"Slurm job {one.id} is given back: the job uses none of its nodes")
                self._give_back([one.id])
            elif (gone := [node for node in one.nodes if node in self._wish.out and node not in usable]) and one.id not in self._whole:
                self._shrink(one, [node for node in one.nodes if node not in gone], gone)

    def _shrink(self, one: Allocation, kept: list[str], gone: Iterable[str]) -> None:
        """Let go of some nodes of an allocation."""
        try:
            asked("scontrol", "update", f"JobId={one.id}", f"NodeList={','.join(kept)}")
        except SlurmRefused as error:
            self._whole.add(one.id)
            note(log, "slurm.shrink-rejected", allocation=one.id, why=error)
            return
        self._tell(f"Slurm job {one.id} has let go of {', '.join(gone)}")

    def _give_back(self, numbers: list[str]) -> None:
        if not numbers:
            return
        self._returned.update(numbers)
        try:
            asked("scancel", *numbers)
        except SlurmRefused as error:  # over already
            note(log, "slurm.cancel-rejected", allocations=",".join(numbers), why=error)
        except SlurmUnavailable as error:
            self._tell(
                f"{error}. Slurm job(s) {', '.join(numbers)} end by themselves within {IDLE / 60:.0f} minutes after their last agent"
            )
