"""What training goes on through and a person should know: losses, speed, copies that differ. Looks now and then, tells once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedActions
from detectors.diagnosis import see
from detectors.evidence import Evidence, FrozenParameters, HangLimits, LossHistory, NonFiniteLoss, ReplicaDigests, StepTimes
from detectors.host import LOAD
from detectors.losses import CHECKS
from detectors.stragglers import BASE, DROPPED, LINKS, RECENT, WARM
from holdfast.control.state.generation import GenerationState, Roles

SHORT: Final = 0.1
"""Seconds between two looks."""
PAUSE: Final = 1.0
"""Seconds between two looks at what changes slowly."""
HEARD: Final = 0.5
"""Seconds that other ranks have to tell of a bad loss too, before one is said to have it alone: beats come every quarter of a second."""
TRUSTED: Final = 2
"""Checks in a row at which ranks must have been equal before they count as copies, where they do not know it themselves."""


class Alerts:
    """Sees what one generation's board tells; the next generation begins with another."""

    def __init__(self, recommended_actions: Callable[[], RecommendedActions] = lambda: CATALOGUE_ACTIONS) -> None:
        """Begin with nothing seen; *recommended_actions* says how much faults ask for now."""
        self._recommended_actions = recommended_actions
        self._told: set[str] = set()
        self._next = self._soon = 0.0
        self._bad: list[tuple[float, NonFiniteLoss]] = []
        self._compared = 0
        """The newest step whose copies were compared."""
        self._equal: dict[frozenset[int], int] = {}
        """Sets of ranks that were equal, and at how many checks in a row."""
        self._equal_at: dict[frozenset[int], int] = {}
        """The newest step after which these copies were equal."""
        self._doubt: dict[int, tuple[float, ReplicaDigests]] = {}
        """Copies that differ, by their step, which wait for the sums of single tensors since a time."""
        self._asked: set[int] = set()
        self._same: dict[int, tuple[str, list[int]]] = {}
        """By rank, its newest digest and the steps at which it had that one."""

    def poll(self, board: GenerationState, now: float, *, roles: Roles, limits: HangLimits, good: Callable[[int], str]) -> Iterator[Fault]:
        """Yield what is new at *now* (monotonic) and training goes on through; what asks for an act joins the evidence on *board*.

        *good* says what there is to go back to from before a step.
        """
        if now < self._soon:
            return
        self._soon = now + SHORT
        evidence: list[Evidence] = list(self._losses(board, now, good))
        if now >= self._next:
            self._next = now + PAUSE
            evidence += self._slow_ones(board, roles)
        evidence += self._copies(board, now, good)
        recommended_actions = self._recommended_actions()
        for one in evidence:
            for fault in see([one], limits):
                explained = (fault.kind == DROPPED.id and self._explained()) or (fault.kind == LINKS.id and _overloaded(board))
                is_new = fault.signature not in self._told and not explained
                self._told |= {fault.signature} if is_new else set()
                if is_new and not recommended_actions.needs_action(fault):
                    yield fault
                elif recommended_actions.needs_action(fault) and (is_new or isinstance(one, ReplicaDigests)) and one not in board.evidence:
                    board.evidence.append(one)

    def _explained(self) -> bool:
        """Tell whether it was told already what makes the job slow."""
        return any(told.startswith(("straggler-", "data-")) for told in self._told)

    # -- losses and speed -------------------------------------------------------------------------------------------------

    def _losses(self, board: GenerationState, now: float, good: Callable[[int], str]) -> Iterator[NonFiniteLoss]:
        """Yield the first bad loss of a step, once others had the time to tell of theirs."""
        while board.news:
            one = board.news.popleft()
            if isinstance(one, NonFiniteLoss):
                self._bad.append((now, one))
        due = [one for since, one in self._bad if now >= since + HEARD]
        if due:
            first = min(due, key=lambda one: (one.step, one.rank))
            others = [one for _, one in self._bad if one.rank != first.rank and one.step == first.step]
            self._bad.clear()
            yield replace(first, alone=not others and len(board.ranks) > 1, good=good(first.step))

    def _slow_ones(self, board: GenerationState, roles: Roles) -> Iterator[Evidence]:
        at = board.now
        if board.losses and not self._bad:  # whose loss was bad first is told before it is acted on that all are
            yield LossHistory(at=at, losses=tuple(board.losses))
        steps = list(board.durations)[WARM:]
        paces = board.paces(at, roles)
        if paces is not None:
            yield paces
        if len(steps) >= BASE + RECENT:
            yield StepTimes(at=at, steps=(*steps[:BASE], *steps[BASE:][-RECENT:]))

    # -- copies -----------------------------------------------------------------------------------------------------------

    def _copies(self, board: GenerationState, now: float, good: Callable[[int], str]) -> Iterator[Evidence]:
        """Yield checks that all living ranks have told of: copies that differ, with the sums of their tensors once those are known."""
        living = {view.rank for view in board.ranks.values() if not view.ended}
        if not living:  # the last have ended: there is nothing to compare any more
            return
        for step in sorted(step for step, told in board.checks.items() if step > self._compared and told.keys() >= living):
            self._compared = step
            told = {rank: one for rank, one in board.checks[step].items() if rank in living}
            yield from self._frozen(board, step, told)
            for ranks in self._classes(told):
                nodes = {rank: board.ranks[rank].node for rank in ranks}
                seen = ReplicaDigests(at=board.now, step=step, nodes=nodes, digests={rank: told[rank][1] for rank in ranks})
                if len(set(seen.digests.values())) == 1:
                    self._equal_at[ranks] = step
                elif (before := self._equal_at.get(ranks)) is not None:
                    self._doubt[step] = (now, replace(seen, equal_at=before, good=good(before + 1)))
                else:
                    self._doubt[step] = (now, seen)
        for step, (since, seen) in list(self._doubt.items()):
            sums = {rank: board.sums[rank, step] for rank in seen.digests if (rank, step) in board.sums}
            if len(sums) == len(seen.digests) or now >= since + HEARD:
                del self._doubt[step]
                yield replace(seen, sums=sums)

    def checksum_requests(self, board: GenerationState) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield a step, and the ranks that must be asked for the sums of their tensors after it."""
        for step, (_, seen) in self._doubt.items():
            if step not in self._asked:
                self._asked.add(step)
                yield step, frozenset(rank for rank in seen.digests if not board.ranks[rank].ended)

    def _classes(self, told: Mapping[int, tuple[str, str]]) -> Iterator[frozenset[int]]:
        """Yield the sets of ranks that hold copies: as they know themselves, else those that were equal at the checks before."""
        known: dict[str, set[int]] = {}
        for rank, (shard, _) in told.items():
            if shard:
                known.setdefault(shard, set()).add(rank)
        if known:
            yield from (frozenset(ranks) for ranks in known.values() if len(ranks) > 1)
            return
        trusted = [ranks for ranks, times in self._equal.items() if times >= TRUSTED and ranks <= told.keys()]
        yield from trusted
        equal: dict[str, set[int]] = {}
        for rank, (_, digest) in told.items():
            equal.setdefault(digest, set()).add(rank)
        if not trusted:
            present = [frozenset(ranks) for ranks in equal.values() if len(ranks) > 1]
            self._equal = {ranks: self._equal.get(ranks, 0) + 1 for ranks in present}

    def _frozen(self, board: GenerationState, step: int, told: Mapping[int, tuple[str, str]]) -> Iterator[FrozenParameters]:
        """Yield the lowest rank whose parameters have not changed for some checks."""
        for rank, (_, digest) in sorted(told.items()):
            before, steps = self._same.get(rank, ("", []))
            self._same[rank] = digest, [*steps, step][-CHECKS:] if digest == before else [step]
        rank = min(told)
        steps = self._same[rank][1]
        if len(steps) >= CHECKS:
            yield FrozenParameters(at=board.now, node=board.ranks[rank].node, rank=rank, steps=tuple(steps))


def _overloaded(board: GenerationState) -> bool:
    """Tell whether a node has more work than processors: those who move data wait for one then, and no link is to blame."""
    return any(fault.kind == LOAD.id for fault in board.node_faults)
