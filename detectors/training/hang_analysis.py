"""Find the rank that blocks a hanging job, from the statuses of all ranks.

A rank waits for those that have not started the operation that it has started. A rank that others wait for and that waits for none is the
culprit. If there is none, ranks wait for each other in a cycle. If all ranks have started an operation, they started different ones, or the
network between them is stuck.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from holdfast.detectors.catalogue import Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import GroupProgress, PendingOperation, Progress, RankProgress, RankStatus, Sample

STUCK_SECONDS: Final = 1.0
"""Seconds after which an operation that all ranks have started is stuck (ours)."""
_EVEN: Final = frozenset({"allreduce", "all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single"})
"""Operations with tensors of equal size on all ranks; the flight recorder writes `all_reduce`."""
UNKNOWN_COUNT: Final = 2**62
"""Count of operations of a rank of which it is not known: it is not taken to be behind."""
_LISTED: Final = 8
"""Maximum number of ranks to name."""


class RankWait(NamedTuple):
    """A rank waits for others."""

    rank: int
    words: str
    """The operation."""
    seconds: float
    missing: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """Result of a hang analysis."""

    kind: str
    """Fault kind; empty if only the culprit of a hang is known."""
    rank: int | None
    quote: str
    seconds: float = 0.0
    """How long all ranks concerned have been in their operations; infinite if that is not known."""


def explain(ranks: Mapping[int, RankProgress]) -> HangFinding | None:
    """Return which rank blocks the others, from the statuses reported so far; None if they do not show it."""
    statuses = {rank: held.status for rank, held in ranks.items() if held.status is not None}
    if not statuses:
        return None
    waits = list(_waits(statuses, frozenset(ranks)))
    absent = _absent(ranks, statuses, waits)
    if absent is not None and absent.rank is not None:
        absent = _left_in(ranks, statuses, absent.rank) or absent
    found = _differ(ranks, statuses) or absent or _circle(waits) or _held(statuses)
    found = found or _by_launches(ranks, statuses) or _by_stack(ranks, statuses)
    return found or next((left for rank in sorted(statuses) if (left := _left_in(ranks, statuses, rank)) is not None), None)


def operations(ranks: Iterable[RankStatus]) -> tuple[tuple[str, str, int], ...]:
    """Return all started operations, to compare two statuses."""
    return tuple((group.name, way, number) for one in ranks for group in one.groups for way, number in sorted(group.counts.items()))


# -- waits --------------------------------------------------------------------------------------------------------------


def _waits(statuses: Mapping[int, RankStatus], everybody: frozenset[int]) -> Iterator[RankWait]:
    groups = {(rank, group.name): group for rank, one in statuses.items() for group in one.groups}
    for rank, one in statuses.items():
        if one.waits == "vote":
            missing = frozenset(other for other in everybody if other not in statuses or statuses[other].waits != "vote")
            if missing:
                yield RankWait(rank, "the vote on the step", one.seconds, missing)
        for group in one.groups:
            for work in group.pending:
                missing = _missing(rank, group, work, groups) & everybody
                if missing:
                    yield RankWait(rank, _words(group, work), work.seconds, missing)


def _missing(rank: int, group: GroupProgress, work: PendingOperation, groups: Mapping[tuple[int, str], GroupProgress]) -> frozenset[int]:
    """Return the ranks that have not started the operation of *rank* in *group*."""
    if not work.way:
        others = [other for other in group.ranks if other != rank]
        return frozenset(other for other in others if _count(groups.get((other, group.name)), "") < work.number)
    word, peer = work.way[:5], work.way[5:]
    if not peer.isdigit():
        return frozenset()  # receive from any rank: the sender is unknown
    there = f"recv<{rank}" if word == "send>" else f"send>{rank}"
    return frozenset({int(peer)}) if _count(groups.get((int(peer), group.name)), there) < work.number else frozenset()


def _count(group: GroupProgress | None, way: str) -> int:
    return group.counts.get(way, 0) if group is not None else -1


def _words(group: GroupProgress, work: PendingOperation) -> str:
    what = f"{work.name} #{work.number} of group {group.name}"
    return what if not work.way else f"{what} ({'to' if work.way[4] == '>' else 'from'} rank {work.way[5:]})"


# -- results ------------------------------------------------------------------------------------------------------------


def _absent(ranks: Mapping[int, RankProgress], statuses: Mapping[int, RankStatus], waits: list[RankWait]) -> HangFinding | None:
    """Name the ranks that others wait for and that wait for none."""
    waiting = {wait.rank for wait in waits}
    behind = Counter(rank for wait in waits for rank in wait.missing if rank not in waiting)
    if not behind:
        return None
    culprit = min(behind, key=lambda rank: (rank in statuses, -behind[rank], ranks[rank].step, rank))
    mine = [wait for wait in waits if culprit in wait.missing]
    first = max(mine, key=lambda wait: wait.seconds)
    same = [wait.rank for wait in mine if wait.words == first.words]
    also = sorted(first.missing & behind.keys() - {culprit})
    held = ranks[culprit]
    quote = f"rank {culprit}{_on(held)} did not arrive at {first.words} ({numbered(same)} {_verb(same)}{_since(first.seconds)})"
    if also:
        quote += f", neither did {numbered(also)}"
    return HangFinding(kind="", rank=culprit, quote=f"{quote}; {_where(culprit, ranks)}")


def _differ(ranks: Mapping[int, RankProgress], statuses: Mapping[int, RankStatus]) -> HangFinding | None:
    """Name the ranks that started another operation than most, with the same sequence number."""
    for name, number, here in _meetings(statuses):
        shapes = {rank: _shape(work) for rank, (_, work) in here.items()}
        usual, most = Counter(shapes.values()).most_common(1)[0]
        if most == len(shapes):
            continue
        rest = sorted(rank for rank, shape in shapes.items() if shape != usual)
        clear = most > len(shapes) / 2
        rank, odd = rest[0], here[rest[0]][1]
        there = here[next(rank for rank, shape in shapes.items() if shape == usual)][1]
        agree = sorted(rank for rank, shape in shapes.items() if shape == usual)
        quote = f"{numbered([one for one in rest if shapes[one] == shapes[rank]])} entered {_sized(odd)} as #{number} of group {name}"
        quote += f" where {numbered(agree)} entered {_sized(there)}; {_where(rank, ranks)}; {_where(agree[0], ranks)}"
        seconds = min(work.seconds for _, work in here.values())
        return HangFinding(kind=MISMATCH.id, rank=rank if clear else None, quote=quote, seconds=seconds)
    return None


def _meetings(statuses: Mapping[int, RankStatus]) -> Iterator[tuple[str, int, dict[int, tuple[GroupProgress, PendingOperation]]]]:
    """Yield the collectives that several ranks are in: group, sequence number, and each rank's operation."""
    found: dict[tuple[str, int], dict[int, tuple[GroupProgress, PendingOperation]]] = {}
    for rank, one in statuses.items():
        for group in one.groups:
            for work in group.pending:
                if not work.way:
                    found.setdefault((group.name, work.number), {})[rank] = (group, work)
    for (name, number), here in sorted(found.items()):
        if len(here) > 1:
            yield name, number, here


def _shape(work: PendingOperation) -> tuple[str, int, str]:
    return (work.name, work.size, work.kind) if work.name in _EVEN else (work.name, 0, "")


def _circle(waits: list[RankWait]) -> HangFinding | None:
    """Report ranks that wait for each other."""
    by_rank = {wait.rank: wait for wait in waits}
    if not by_rank:
        return None
    way, rank = list[int](), min(by_rank)
    while rank not in way:
        way.append(rank)
        rank = min(by_rank[rank].missing)  # every rank that is waited for waits itself, or `_absent` would have named it
    ring = way[way.index(rank) :]
    steps = [f"rank {one} waits at {by_rank[one].words} for {numbered(sorted(by_rank[one].missing))}" for one in ring]
    return HangFinding(kind=CIRCLE.id, rank=None, quote="; ".join(steps), seconds=min(by_rank[one].seconds for one in ring))


def _held(statuses: Mapping[int, RankStatus]) -> HangFinding | None:
    """Report an operation that all members have started and that does not finish."""
    for name, number, here in _meetings(statuses):
        group, work = next(iter(here.values()))
        seconds = min(work.seconds for _, work in here.values())
        if len(here) == len(group.ranks) and seconds >= STUCK_SECONDS:
            quote = f"all {len(here)} ranks of group {name} are at {_sized(work)}, #{number}{_since(seconds, ',')}, and it does not finish"
            return HangFinding(kind=STUCK.id, rank=None, quote=quote, seconds=seconds)
    return None


def _left_in(ranks: Mapping[int, RankProgress], statuses: Mapping[int, RankStatus], rank: int) -> HangFinding | None:
    """Report a collective that does not finish on *rank* although others have finished it: what they sent does not reach it."""
    for group in statuses[rank].groups if rank in statuses else ():
        theirs = {
            other: one
            for other in group.ranks
            if other != rank and other in statuses
            for one in statuses[other].groups
            if one.name == group.name
        }
        for work in group.pending:
            if work.way or work.seconds < STUCK_SECONDS or len(theirs) + 1 < len(group.ranks):
                continue
            begun = all(work.number <= _count(one, "") < UNKNOWN_COUNT for one in theirs.values())
            done = [other for other, one in theirs.items() if work.number not in {found.number for found in one.pending if not found.way}]
            if begun and done:
                quote = f"{_sized(work)}, #{work.number} of group {group.name}, does not finish on rank {rank}{_on(ranks[rank])}"
                quote += f"{_since(work.seconds, ',')}, although {numbered(done)} {'has' if len(done) == 1 else 'have'} finished it"
                return HangFinding(kind=STUCK.id, rank=rank, quote=quote, seconds=work.seconds)
    return None


def _by_launches(ranks: Mapping[int, RankProgress], statuses: Mapping[int, RankStatus]) -> HangFinding | None:
    """Name the rank that has launched the fewest collectives in NCCL's communicator of all ranks, where Holdfast counts none itself."""
    for one in (counts for status in statuses.values() for counts in status.launched):
        behind = {rank: number for rank, number in one.behind.items() if rank in ranks}
        if one.ranks != len(ranks) or not behind:  # ranks of a smaller communicator have other numbers
            continue
        culprit = min(behind, key=lambda rank: (behind[rank], rank))
        also = sorted(behind.keys() - {culprit})
        quote = f"rank {culprit}{_on(ranks[culprit])} has launched NCCL's {one.name} operations up to #{behind[culprit]}"
        quote += f", others up to #{one.most}"
        if also:
            quote += f"; {numbered(also)} {'is' if len(also) == 1 else 'are'} behind too"
        return HangFinding(kind="", rank=culprit, quote=f"{quote}; {_where(culprit, ranks)}")
    return None


def _by_stack(ranks: Mapping[int, RankProgress], statuses: Mapping[int, RankStatus]) -> HangFinding | None:
    """Without operation counts, name the ranks that do not wait while all others do.

    A rank in backward may compute or wait: it computes if all others are in a collective, and waits if all others are in backward too.
    """
    inside = sorted(rank for rank, one in statuses.items() if one.waits == "backward")
    waiting = sorted(rank for rank, one in statuses.items() if one.waits not in ("", "data", "backward")) or inside
    odd = sorted(set(ranks) - set(waiting))
    if not waiting or not odd:
        return None
    culprit = min(odd, key=lambda rank: (rank in statuses, ranks[rank].step, rank))
    also = f", neither does {numbered([rank for rank in odd if rank != culprit])}" if len(odd) > 1 else ""
    quote = (
        f"rank {culprit}{_on(ranks[culprit])} does not wait for other ranks{also}, while {numbered(waiting)} {_verb(waiting)} for others"
    )
    return HangFinding(kind="", rank=culprit, quote=f"{quote}; {_where(culprit, ranks)}")


# -- words --------------------------------------------------------------------------------------------------------------


def _where(rank: int, ranks: Mapping[int, RankProgress]) -> str:
    held = ranks[rank]
    if held.status is None:
        wait = f", waiting in {held.wait}" if held.wait else ""
        return f"rank {rank} does not answer (process state {held.process}{wait})"
    place = held.status.place or (held.status.stack[0] if held.status.stack else "an unknown place")
    reason = {"data": ", waiting for its data"}.get(held.status.waits, "")
    return f"rank {rank} is at {place}{reason}"


def _sized(work: PendingOperation) -> str:
    return f"{work.name} of {work.size} {work.kind} values" if work.kind else work.name


def numbered(ranks: Iterable[int]) -> str:
    """Format *ranks*, the first ones by number."""
    found = sorted(ranks)
    names = ", ".join(map(str, found[:_LISTED])) + (f" and {len(found) - _LISTED} more" if len(found) > _LISTED else "")
    return f"rank {names}" if len(found) == 1 else f"ranks {names}"


def _on(held: RankProgress) -> str:
    return f" on {held.node}" if held.node else ""


def _since(seconds: float, before: str = "") -> str:
    """Format how long; nothing if it is not known, and infinite."""
    return f"{before} since {seconds:.1f} s" if math.isfinite(seconds) else ""


def _verb(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


# -- kinds --------------------------------------------------------------------------------------------------------------


def _rank(number: int, name: str, *, group: str = "0", count: int | None = None) -> RankProgress:
    work = PendingOperation(number=number, name=name, size=1024, kind="float32", seconds=8.0)
    mine = GroupProgress(name=group, ranks=(0, 1), counts={"": number}, pending=(work,))
    other = () if count is None else (GroupProgress(name="1" if group == "0" else "0", ranks=(0, 1), counts={"": count}),)
    return RankProgress(node="n0", step=40, age=9.0, status=RankStatus(waits="collective", seconds=8.0, groups=(mine, *other)))


def _sample(one: RankProgress, other: RankProgress) -> Sample:
    return Sample(Progress(at=0.0, ranks={0: one, 1: other}, step_seconds=(0.3,) * 8, status_requested=True))


def _well(one: RankProgress, other: RankProgress) -> Sample:
    ranks = {rank: RankProgress(node="n0", step=40, age=0.6, status=held.status) for rank, held in enumerate((one, other))}
    return Sample(Progress(at=0.0, ranks=ranks, step_seconds=(0.3,) * 8, status_requested=True))


_define = partial(fault_kind, component="job", source="statuses of the ranks", recommended_action=RecommendedAction.RESTART)
MISMATCH: Final = _define(
    id="collective-mismatch",
    title="Ranks entered different collectives, or one with tensors of different sizes",
    attributed_to=Attribution.USER_CODE,
    action="fix the script: all ranks of a group must enter the same operations in the same order, with tensors of the same size",
    unhealthy=_sample(_rank(7, "allreduce"), _rank(7, "broadcast")),
    healthy=_well(_rank(7, "allreduce"), _rank(7, "broadcast")),
    weight=45,
    confused_with=("nccl-desync", "job-hang"),
)
CIRCLE: Final = _define(
    id="collective-deadlock",
    title="Ranks wait for each other in different groups",
    attributed_to=Attribution.USER_CODE,
    action="fix the script: ranks that share several groups must use them in the same order",
    unhealthy=_sample(_rank(7, "allreduce", count=2), _rank(3, "allreduce", group="1", count=6)),
    healthy=_well(_rank(7, "allreduce", count=2), _rank(3, "allreduce", group="1", count=6)),
    weight=45,
    confused_with=("job-hang",),
)
STUCK: Final = _define(
    id="collective-stuck",
    title="All ranks are in a collective and it does not finish",
    attributed_to=Attribution.NETWORK,
    action="restart the workers; check the network between the nodes if it happens again",
    unhealthy=_sample(_rank(7, "allreduce"), _rank(7, "allreduce")),
    healthy=_well(_rank(7, "allreduce"), _rank(7, "allreduce")),
    weight=42,
    confused_with=("nccl-hang", "job-hang"),
)
