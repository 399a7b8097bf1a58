"""How the ranks of a job work together, recognised from what they do: stages, schedule, copies, shards. Standard library only.

A pipeline is known by its point-to-point operations: who sends to whom, and in which order. torch's own names of schedules are never seen;
what is not understood is said to be unknown, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

Operations = Sequence[tuple[str, int]]
"""What a rank did in one step, in order: ``send`` or ``recv``, and the other rank."""

CUT: Final = 2000
"""A list as long as this was cut: nothing is counted in it."""
SEND: Final = "send"
RECV: Final = "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFacts:
    """What one rank says of its place."""

    operations: Operations = ()
    copies: Sequence[int] = ()
    """Ranks with the same state."""
    sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks work together."""

    world: int
    stages: tuple[tuple[int, ...], ...] = ()
    """Ranks of each stage of the pipeline; empty without one."""
    pipelines: tuple[tuple[int, ...], ...] = ()
    """Ranks that a sample passes through, in this order; one for each copy of the pipeline."""
    width: int | None = None
    """How many ranks, or pipelines, train on data of their own; None: unknown."""
    shards: int = 1
    """Ranks over which each state is sharded."""
    copies: int | None = 1
    """Ranks that hold each piece of state; None: it differs."""
    schedule: str = "none"
    """``gpipe``, ``1f1b``, ``interleaved``, ``looped``, ``none`` without a pipeline, ``unknown``."""
    microbatches: int | None = None
    chunks: int | None = None
    """Parts of the model on each rank of the pipeline."""
    reason: str = ""
    """Why something is unknown."""

    def stage_of(self, rank: int) -> int | None:
        """Return the stage, from 0, that *rank* belongs to."""
        return next((number for number, ranks in enumerate(self.stages) if rank in ranks), None)

    @property
    def order(self) -> list[int]:
        """Return all ranks in the order in which they are drawn: pipeline by pipeline."""
        first = [rank for pipeline in self.pipelines for rank in pipeline]
        return first + [rank for rank in range(self.world) if rank not in set(first)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of work in a pipeline."""

    name: str
    microbatches: int | None = None
    chunks: int | None = None
    reason: str = ""


class _Unclear(Exception):
    """What the ranks do does not fit together; the words say why."""


def recognise(world: int, told: Mapping[int, ProfileFacts]) -> Layout:
    """Return how the *world* ranks work together, from what those that are known *told*."""
    try:
        pipelines = _pipelines(world, told)
    except _Unclear as unclear:
        return Layout(world=world, schedule="unknown", reason=str(unclear), copies=_copies(told), shards=_shards(world, 1, told))
    if not pipelines:
        shards = _shards(world, world, told)
        return Layout(world=world, width=world, shards=shards, copies=_copies(told))
    found = {schedule_of(one, told) for one in pipelines}
    known = {(one.name, one.microbatches, one.chunks) for one in found}
    schedule = found.pop() if len(known) == 1 else Schedule("unknown", reason="the pipelines do not work alike")
    return Layout(
        world=world,
        stages=tuple(zip(*pipelines, strict=True)),
        pipelines=tuple(pipelines),
        width=len(pipelines),
        shards=_shards(world, len(pipelines), told),
        copies=_copies(told),
        schedule=schedule.name,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        reason=schedule.reason,
    )


def _copies(told: Mapping[int, ProfileFacts]) -> int | None:
    sizes = {max(1, len(one.copies)) for one in told.values()}
    return sizes.pop() if len(sizes) == 1 else None


def _shards(world: int, width: int, told: Mapping[int, ProfileFacts]) -> int:
    """Return over how many ranks each state is sharded: those of one stage, divided by the copies of each shard."""
    copies = _copies(told)
    if not told or not copies or not all(one.sharded for one in told.values()):
        return 1
    return max(1, min(width, world) // copies)


# -- who stands before whom ---------------------------------------------------------------------------------------------


def _pipelines(world: int, told: Mapping[int, ProfileFacts]) -> list[tuple[int, ...]]:
    """Return the pipelines, each from its first rank to its last."""
    busy = {rank for rank, one in told.items() if one.operations}
    if not busy:
        return []
    silent = [rank for rank in range(world) if rank not in busy]
    if silent:
        raise _Unclear(f"rank {silent[0]} sends and receives nothing that is known, though others do")
    _hold_together(told)
    found, left = [], sorted(busy)
    while left:
        together = _joined(left[0], told)
        found.append(_in_order(together, told))
        left = [rank for rank in left if rank not in together]
    if len({len(one) for one in found}) > 1:
        raise _Unclear(f"the pipelines have different lengths: {', '.join(str(len(one)) for one in found)} ranks")
    return sorted(found)


def _hold_together(told: Mapping[int, ProfileFacts]) -> None:
    """Refuse lists that cannot be of the same kind of step: what one rank sends another receives."""
    counts = {rank: Counter(one.operations) for rank, one in told.items()}
    for rank, one in counts.items():
        for (what, peer), many in one.items():
            other = counts.get(peer, Counter())[RECV if what == SEND else SEND, rank]
            if many != other and len(told[rank].operations) < CUT:
                raise _Unclear(f"rank {rank} has {many} times '{what}' with rank {peer}, which has {other} to match")


def _joined(first: int, told: Mapping[int, ProfileFacts]) -> set[int]:
    """Return all ranks that *first* exchanges anything with, directly or through others."""
    found, edge = {first}, [first]
    while edge:
        fresh = {peer for _, peer in told[edge.pop()].operations} - found
        found |= fresh
        edge += fresh
    return found


def _in_order(together: set[int], told: Mapping[int, ProfileFacts]) -> tuple[int, ...]:
    """Return the ranks of one pipeline in order: the first begins by sending, and each sends its first result to the next."""
    firsts = [rank for rank in sorted(together) if told[rank].operations[0][0] == SEND]
    if len(firsts) != 1:
        raise _Unclear(
            f"of the ranks {', '.join(map(str, sorted(together)))} {len(firsts) or 'none'} begin by sending; of a pipeline one does"
        )
    order, rank = [firsts[0]], firsts[0]
    while len(order) < len(together):
        rank = next((peer for what, peer in told[rank].operations if what == SEND), rank)
        if rank in order:
            raise _Unclear(f"results do not pass through all of the ranks {', '.join(map(str, sorted(together)))}")
        order.append(rank)
    return tuple(order)


# -- in which order they work -------------------------------------------------------------------------------------------


def schedule_of(pipeline: Sequence[int], told: Mapping[int, ProfileFacts]) -> Schedule:
    """Return how the ranks of *pipeline* work."""
    if any(len(told[rank].operations) >= CUT for rank in pipeline):
        return Schedule("unknown", reason=f"a rank has more than {CUT} operations a step: the list is cut")
    first, last = pipeline[0], pipeline[-1]
    begins = "".join("s" if what == SEND else "r" for what, _ in told[first].operations)
    ends = "".join("s" if what == SEND else "r" for what, _ in told[last].operations)
    straight = _straight(begins, ends, len(pipeline))
    if straight:
        return straight
    chunks, many = _folds(pipeline, told, begins)
    if chunks < 2 or many < 1:  # noqa: PLR2004 (who is passed twice holds two)
        return Schedule("unknown", reason="the order of sends and receives is none of GPipe's, 1F1B's or interleaved 1F1B's")
    if many == 1:
        return Schedule("unknown", many, chunks, reason="with one micro-batch all schedules are alike")
    return Schedule("looped" if _looped(pipeline, told, chunks, many) else "interleaved", many, chunks)


def _straight(begins: str, ends: str, ranks: int) -> Schedule | None:
    """Return the schedule of a pipeline with one chunk a rank, by all that its first and its last rank do."""
    many, odd = divmod(len(begins), 2)
    if odd or len(ends) != len(begins):
        return None
    ahead = min(many, ranks)
    flowing = "s" * ahead + "rs" * (many - ahead) + "r" * ahead
    if many == 1 and (begins, ends) == ("sr", "rs"):
        return Schedule("unknown", 1, 1, reason="with one micro-batch all schedules are alike")
    if (begins, ends) == ("s" * many + "r" * many, "r" * many + "s" * many):
        return Schedule("gpipe", many, 1)
    return Schedule("1f1b", many, 1) if (begins, ends) == (flowing, "rs" * many) else None


def _folds(pipeline: Sequence[int], told: Mapping[int, ProfileFacts], begins: str) -> tuple[int, int]:
    """Return how many chunks each rank holds and how many micro-batches pass, or zeros where the numbers do not fit.

    Through the first rank's hands go ``chunks`` x ``many`` results onwards, and all but those of the last chunk come back to it, as
    gradients do the other way round. With two ranks both ways have the same peer: there the beginning tells. Before the first rank
    begins anew each micro-batch of the round has passed it once for every chunk.
    """
    if len(pipeline) > 2:  # noqa: PLR2004 (with two ranks, next and previous are one)
        sent = Counter(peer for what, peer in told[pipeline[0]].operations if what == SEND)
        onwards, around = sent[pipeline[1]], sent[pipeline[-1]]
        many = onwards - around
        return (onwards // many, many) if around and many > 0 and onwards % many == 0 else (0, 0)
    pairs = sum(1 for _ in takewhile(lambda place: begins[place : place + 2] == "sr", range(0, len(begins), 2)))
    sends = begins.count("s")
    looped = sends - 2 * pairs
    if pairs and looped > 0 and pairs % looped == 0:
        return 1 + pairs // looped, looped
    chunks = 1 + pairs // 2
    return (chunks, sends // (2 * chunks - 1)) if pairs and pairs % 2 == 0 and sends % (2 * chunks - 1) == 0 else (0, 0)


def _looped(pipeline: Sequence[int], told: Mapping[int, ProfileFacts], chunks: int, many: int) -> bool:
    """Tell whether the last rank is through with all forward passes before it sends its first gradient."""
    before, done = pipeline[-2], told[pipeline[-1]].operations
    if len(pipeline) > 2:  # noqa: PLR2004 (with two ranks, next and previous are one)
        ahead = takewhile(lambda one: one != (SEND, before), map(tuple, done))
        return sum(one == (RECV, before) for one in ahead) == chunks * many
    through = [SEND if place % 2 else RECV for place in range(2 * (chunks - 1) * many)] + [RECV] * many
    return many > 2 and [what for what, _ in done][: len(through)] == through  # noqa: PLR2004 (with two both are the same order)
