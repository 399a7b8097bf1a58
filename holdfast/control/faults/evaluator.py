"""The faults of the current generation: those that call for an action, and those through which training continues.

Both judge each piece of evidence once, at a cost that does not grow with the number of polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from holdfast.control.state.generation import GenerationState, Roles
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedActions
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import (
    Evidence,
    FrozenParameters,
    HangLimits,
    LossHistory,
    NonFiniteLoss,
    Progress,
    ReplicaDigests,
    StepTimes,
    WorkerExit,
)
from holdfast.detectors.nodes.host import LOAD
from holdfast.detectors.training.exceptions import PEER_LOST
from holdfast.detectors.training.losses import CHECKS
from holdfast.detectors.training.progress import STALLS, see_progress, without_grace
from holdfast.detectors.training.stragglers import BASE, DROPPED, LINKS, RECENT, WARM

REST: Final = 9.0
"""After a check of all ranks the next one waits this many times as long as it took: with few ranks, every poll checks them."""
SHORT_INTERVAL: Final = 0.1
"""Seconds between two checks for alerts."""
LONG_INTERVAL: Final = 1.0
"""Seconds between two checks of what changes slowly."""
REPORT_SECONDS: Final = 0.5
"""How long other ranks have to report the same: heartbeats come every quarter of a second."""
SAME_TIME: Final = 1.0
"""Seconds by which the clocks of two nodes may differ, where one rank exits and another loses it."""
TRUSTED: Final = 2
"""Consecutive checks at which ranks must have been equal before they count as replicas, where they do not know it themselves."""


class FaultEvaluator:
    """The faults of one generation that call for an action."""

    def __init__(self, state: GenerationState, known_until: Callable[[], float]) -> None:
        """Judge *state*; *known_until* returns until when the state of the ranks is known (wall clock)."""
        self._state, self._known_until = state, known_until
        self._judged = 0
        self._finished: list[WorkerExit] = []
        self._first_missed = False
        self._faults: list[Fault] = []
        self._progress: Progress | None = None
        self._stall_faults: list[Fault] = []
        self._stalled = False
        self._due = 0.0

    def faults(self, limits: HangLimits, *, steps_expected: bool) -> list[Fault]:
        """Return all faults of this generation now, apart from unreachable agents."""
        state, now = self._state, time.time()
        new, self._judged = state.evidence[self._judged :], len(state.evidence)
        self._faults += see(new, limits)
        self._faults += see(self._missed(new), limits)
        self.progress(limits, steps_expected=steps_expected)
        overrun = [state.overrun] if state.overrun is not None else []
        return [*self._faults, *state.unusable, *see(state.stops(now), limits), *self._stall_faults, *see(overrun, limits)]

    def _missed(self, new: list[Evidence]) -> list[WorkerExit]:
        """Return the first rank that exited with status 0, once another rank has failed because a peer was lost; then never again.

        Only ranks whose steps are not known: the others say themselves whether they have finished. The two exits may arrive in any order.
        """
        if new and not self._first_missed:
            exits = (one for one in new if isinstance(one, WorkerExit) and one.code == 0 and one.finished)
            self._finished += [one for one in exits if not self._state.ranks[one.rank].managed]
            first = min(self._finished, key=lambda one: one.at, default=None)
            lost = {fault.rank: fault.at for fault in self._faults if fault.kind == PEER_LOST.id and fault.rank is not None}
            if first is not None and (by := [rank for rank, at in lost.items() if rank != first.rank and at > first.at - SAME_TIME]):
                self._first_missed = True
                return [replace(first, finished=False, missed_by=tuple(sorted(by)))]
        return []

    def is_stalled(self, limits: HangLimits, *, steps_expected: bool) -> bool:
        """Return whether no rank makes progress, for longer than the job's own steps explain: that alone is no fault."""
        self.progress(limits, steps_expected=steps_expected)
        return self._stalled

    def progress(self, limits: HangLimits, *, steps_expected: bool) -> Progress | None:
        """Return the progress of all ranks at the newest check."""
        begin = time.monotonic()
        if begin >= self._due:
            self._check(time.time(), limits, steps_expected=steps_expected)
            if (self._stall_faults or self._stalled) and (until := self._known_until()) < time.time():
                self._check(until, limits, steps_expected=steps_expected)  # what ranks have done since is unknown
            end = time.monotonic()
            self._due = end + REST * (end - begin)
        return self._progress

    def _check(self, at: float, limits: HangLimits, *, steps_expected: bool) -> None:
        self._progress = self._state.progress(at, steps_expected=steps_expected)
        early = None if self._progress is None else see_progress(replace(self._progress, longest_pause=0.0), without_grace(limits))
        self._stalled = early is not None and early.kind in STALLS
        self._stall_faults = see([self._progress], limits) if self._progress is not None and early is not None else []


class Alerts:
    """What training continues through and people should know, once each: losses, speed, replicas that differ; for one generation."""

    def __init__(self, recommended_actions: Callable[[], RecommendedActions] = lambda: CATALOGUE_ACTIONS) -> None:
        """Start with nothing seen; *recommended_actions* returns the recommended actions in force."""
        self._recommended_actions = recommended_actions
        self._reported: set[str] = set()
        self._next = self._next_slow = 0.0
        self._bad_losses: list[tuple[float, NonFiniteLoss]] = []
        self._compared = 0
        """The newest step whose replicas were compared."""
        self._equal: dict[frozenset[int], int] = {}
        """Sets of ranks that were equal, and at how many consecutive checks."""
        self._equal_at: dict[frozenset[int], int] = {}
        """The newest step after which these replicas were equal."""
        self._differing: dict[int, tuple[float, ReplicaDigests]] = {}
        """Replicas that differ, by step, and since when they wait for the checksums of single tensors."""
        self._requested: set[int] = set()
        self._same: dict[int, tuple[str, list[int]]] = {}
        """By rank, its newest digest and the steps at which it had that one."""

    def poll(self, state: GenerationState, now: float, *, roles: Roles, limits: HangLimits, good: Callable[[int], str]) -> Iterator[Fault]:
        """Yield the new faults at *now* (monotonic) through which training continues; others are added to the evidence on *state*.

        *good* describes the state before a step that training could resume from.
        """
        if now < self._next:
            return
        self._next = now + SHORT_INTERVAL
        evidence: list[Evidence] = list(self._losses(state, now, good))
        if now >= self._next_slow:
            self._next_slow = now + LONG_INTERVAL
            evidence += self._speed(state, roles)
            evidence += [early] if (early := state.early_exit(time.time())) is not None else []
        evidence += self._replicas(state, now, good)
        recommended_actions = self._recommended_actions()
        overloaded = any(fault.kind == LOAD.id for fault in state.node_faults)  # data movers wait for a processor then, not for a link
        for one in evidence:
            for fault in see([one], limits):
                slow_explained = any(kind.startswith(("straggler-", "data-")) for kind in self._reported)
                explained = (fault.kind == DROPPED.id and slow_explained) or (fault.kind == LINKS.id and overloaded)
                is_new = fault.signature not in self._reported and not explained
                self._reported |= {fault.signature} if is_new else set()
                if is_new and not recommended_actions.needs_action(fault):
                    yield fault
                elif recommended_actions.needs_action(fault) and (is_new or isinstance(one, ReplicaDigests)) and one not in state.evidence:
                    state.evidence.append(one)

    def _losses(self, state: GenerationState, now: float, good: Callable[[int], str]) -> Iterator[NonFiniteLoss]:
        """Yield the first non-finite loss of a step, once other ranks had the time to report theirs."""
        while state.news:
            one = state.news.popleft()
            if isinstance(one, NonFiniteLoss):
                self._bad_losses.append((now, one))
        due = [one for since, one in self._bad_losses if now >= since + REPORT_SECONDS]
        if due:
            first = min(due, key=lambda one: (one.step, one.rank))
            others = [one for _, one in self._bad_losses if one.rank != first.rank and one.step == first.step]
            self._bad_losses.clear()
            yield replace(first, alone=not others and len(state.ranks) > 1, good=good(first.step))

    def _speed(self, state: GenerationState, roles: Roles) -> Iterator[Evidence]:
        at = state.now
        if state.losses and not self._bad_losses:  # the rank with the first bad loss is reported before all losses are judged
            yield LossHistory(at=at, losses=tuple(state.losses))
        breakdowns = state.step_breakdowns(at, roles)
        if breakdowns is not None:
            yield breakdowns
        steps = list(state.durations)[WARM:]
        if len(steps) >= BASE + RECENT:
            yield StepTimes(at=at, steps=(*steps[:BASE], *steps[BASE:][-RECENT:]))

    # -- replicas -----------------------------------------------------------------------------------------------------

    def checksum_requests(self, state: GenerationState) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield a step, and the ranks to query for the checksums of their tensors after it."""
        for step, (_, seen) in self._differing.items():
            if step not in self._requested:
                self._requested.add(step)
                yield step, frozenset(rank for rank in seen.digests if not state.ranks[rank].ended)

    def _replicas(self, state: GenerationState, now: float, good: Callable[[int], str]) -> Iterator[Evidence]:
        """Yield replicas that differ at a check that all running ranks have reported, with their tensors' checksums once known."""
        living = {view.rank for view in state.ranks.values() if not view.ended}
        if not living:  # the last ones have exited: there is nothing to compare any more
            return
        for step in sorted(step for step, reports in state.checks.items() if step > self._compared and reports.keys() >= living):
            self._compared = step
            reports = {rank: one for rank, one in state.checks[step].items() if rank in living}
            yield from self._frozen(state, step, reports)
            for ranks in self._replica_sets(reports):
                nodes = {rank: state.ranks[rank].node for rank in ranks}
                seen = ReplicaDigests(at=state.now, step=step, nodes=nodes, digests={rank: reports[rank][1] for rank in ranks})
                if len(set(seen.digests.values())) == 1:
                    self._equal_at[ranks] = step
                elif (before := self._equal_at.get(ranks)) is not None:
                    self._differing[step] = (now, replace(seen, equal_at=before, good=good(before + 1)))
                else:
                    self._differing[step] = (now, seen)
        for step, (since, seen) in list(self._differing.items()):
            sums = {rank: state.sums[rank, step] for rank in seen.digests if (rank, step) in state.sums}
            if len(sums) == len(seen.digests) or now >= since + REPORT_SECONDS:
                del self._differing[step]
                yield replace(seen, sums=sums)

    def _replica_sets(self, reports: Mapping[int, tuple[str, str]]) -> Iterator[frozenset[int]]:
        """Yield the sets of ranks that are replicas: as they report themselves, else those that were equal at earlier checks."""
        known: dict[str, set[int]] = {}
        equal: dict[str, set[int]] = {}
        for rank, (shard, digest) in reports.items():
            equal.setdefault(digest, set()).add(rank)
            if shard:
                known.setdefault(shard, set()).add(rank)
        if known:
            yield from (frozenset(ranks) for ranks in known.values() if len(ranks) > 1)
            return
        trusted = [ranks for ranks, times in self._equal.items() if times >= TRUSTED and ranks <= reports.keys()]
        yield from trusted
        if not trusted:
            present = [frozenset(ranks) for ranks in equal.values() if len(ranks) > 1]
            self._equal = {ranks: self._equal.get(ranks, 0) + 1 for ranks in present}

    def _frozen(self, state: GenerationState, step: int, reports: Mapping[int, tuple[str, str]]) -> Iterator[FrozenParameters]:
        """Yield the lowest rank if its parameters have not changed for some checks."""
        for rank, (_, digest) in sorted(reports.items()):
            before, steps = self._same.get(rank, ("", []))
            self._same[rank] = digest, [*steps, step][-CHECKS:] if digest == before else [step]
        rank = min(reports)
        steps = self._same[rank][1]
        if len(steps) >= CHECKS:
            yield FrozenParameters(at=state.now, node=state.ranks[rank].node, rank=rank, steps=tuple(steps))
