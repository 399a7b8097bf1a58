"""The parallelism of a job, recognised from what its ranks do: stages, schedule, replicas, shards. Standard library only.

A pipeline is recognised by its point-to-point operations: which rank sends to which, and in which order. torch's names of schedules are not
available; what is not recognised is unknown, with a reason.
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
"""A list of this length was truncated, so its counts mean nothing."""
SEND: Final = "send"
RECV: Final = "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFacts:
    """What one rank reports about its part."""

    operations: Operations = ()
    copies: Sequence[int] = ()
    """Ranks with the same state."""
    sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parallelism of a job."""

    world: int
    stages: tuple[tuple[int, ...], ...] = ()
    """Ranks of each stage of the pipeline; empty without one."""
    pipelines: tuple[tuple[int, ...], ...] = ()
    """Ranks that a sample passes through, in order; one tuple for each copy of the pipeline."""
    width: int | None = None
    """How many ranks or pipelines train on their own data; None: unknown."""
    shards: int = 1
    """Ranks over which each state is sharded."""
    copies: int | None = 1
    """Ranks that hold each shard; None: it differs."""
    schedule: str = "none"
    """``gpipe``, ``1f1b``, ``interleaved``, ``looped``, ``none`` without a pipeline, ``unknown``."""
    microbatches: int | None = None
    chunks: int | None = None
    """Model chunks on each rank of the pipeline."""
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


class _Inconsistent(Exception):
    """The reports of the ranks are inconsistent; the message is the reason."""


def recognise(world: int, facts: Mapping[int, ProfileFacts]) -> Layout:
    """Return the parallelism of *world* ranks from the *facts* of those that reported."""
    try:
        pipelines = _pipelines(world, facts)
    except _Inconsistent as error:
        return Layout(world=world, schedule="unknown", reason=str(error), copies=_copies(facts), shards=_shards(world, 1, facts))
    if not pipelines:
        shards = _shards(world, world, facts)
        return Layout(world=world, width=world, shards=shards, copies=_copies(facts))
    found = {schedule_of(one, facts) for one in pipelines}
    known = {(one.name, one.microbatches, one.chunks) for one in found}
    schedule = found.pop() if len(known) == 1 else Schedule("unknown", reason="the pipelines have different schedules")
    return Layout(
        world=world,
        stages=tuple(zip(*pipelines, strict=True)),
        pipelines=tuple(pipelines),
        width=len(pipelines),
        shards=_shards(world, len(pipelines), facts),
        copies=_copies(facts),
        schedule=schedule.name,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        reason=schedule.reason,
    )


def _copies(facts: Mapping[int, ProfileFacts]) -> int | None:
    sizes = {max(1, len(one.copies)) for one in facts.values()}
    return sizes.pop() if len(sizes) == 1 else None


def _shards(world: int, width: int, facts: Mapping[int, ProfileFacts]) -> int:
    """Return over how many ranks each state is sharded: those of one stage, divided by the copies of each shard."""
    copies = _copies(facts)
    if not facts or not copies or not all(one.sharded for one in facts.values()):
        return 1
    return max(1, min(width, world) // copies)


# -- the order of the stages -------------------------------------------------------------------------------------------


def _pipelines(world: int, facts: Mapping[int, ProfileFacts]) -> list[tuple[int, ...]]:
    """Return the pipelines, each from its first rank to its last."""
    busy = {rank for rank, one in facts.items() if one.operations}
    if not busy:
        return []
    idle = [rank for rank in range(world) if rank not in busy]
    if idle:
        raise _Inconsistent(f"no operations of rank {idle[0]} are known, but those of other ranks are")
    _check_matching(facts)
    found, remaining = [], sorted(busy)
    while remaining:
        connected = _connected(remaining[0], facts)
        found.append(_in_order(connected, facts))
        remaining = [rank for rank in remaining if rank not in connected]
    if len({len(one) for one in found}) > 1:
        raise _Inconsistent(f"the pipelines have different lengths: {', '.join(str(len(one)) for one in found)} ranks")
    return sorted(found)


def _check_matching(facts: Mapping[int, ProfileFacts]) -> None:
    """Raise unless every operation has a matching one on the other rank, as in lists of the same step."""
    counts = {rank: Counter(one.operations) for rank, one in facts.items()}
    for rank, one in counts.items():
        for (what, peer), many in one.items():
            other = counts.get(peer, Counter())[RECV if what == SEND else SEND, rank]
            if many != other and len(facts[rank].operations) < CUT:
                raise _Inconsistent(f"rank {rank} has {many} operations '{what}' with rank {peer}, which has {other} matching ones")


def _connected(first: int, facts: Mapping[int, ProfileFacts]) -> set[int]:
    """Return all ranks that *first* communicates with, directly or through others."""
    found, edge = {first}, [first]
    while edge:
        fresh = {peer for _, peer in facts[edge.pop()].operations} - found
        found |= fresh
        edge += fresh
    return found


def _in_order(connected: set[int], facts: Mapping[int, ProfileFacts]) -> tuple[int, ...]:
    """Return the ranks of one pipeline in order: the first begins by sending, and each sends its first result to the next."""
    firsts = [rank for rank in sorted(connected) if facts[rank].operations[0][0] == SEND]
    if len(firsts) != 1:
        raise _Inconsistent(
            f"of the ranks {', '.join(map(str, sorted(connected)))} {len(firsts) or 'none'} begin by sending; of a pipeline one does"
        )
    order, rank = [firsts[0]], firsts[0]
    while len(order) < len(connected):
        rank = next((peer for what, peer in facts[rank].operations if what == SEND), rank)
        if rank in order:
            raise _Inconsistent(f"results do not pass through all of the ranks {', '.join(map(str, sorted(connected)))}")
        order.append(rank)
    return tuple(order)


# -- the schedule -------------------------------------------------------------------------------------------------------


def schedule_of(pipeline: Sequence[int], facts: Mapping[int, ProfileFacts]) -> Schedule:
    """Return the schedule of *pipeline*."""
    if any(len(facts[rank].operations) >= CUT for rank in pipeline):
        return Schedule("unknown", reason=f"a rank has more than {CUT} operations per step: the list is truncated")
    first = "".join("s" if what == SEND else "r" for what, _ in facts[pipeline[0]].operations)
    last = "".join("s" if what == SEND else "r" for what, _ in facts[pipeline[-1]].operations)
    if single := _single_chunk(first, last, len(pipeline)):
        return single
    chunks, microbatches = _chunks(pipeline, facts, first)
    if chunks < 2 or microbatches < 1:  # noqa: PLR2004 (one chunk was tried above)
        return Schedule("unknown", reason="the order of sends and receives is none of GPipe's, 1F1B's or interleaved 1F1B's")
    if microbatches == 1:
        return Schedule("unknown", microbatches, chunks, reason="with one micro-batch all schedules are the same")
    return Schedule("looped" if _is_looped(pipeline, facts, chunks, microbatches) else "interleaved", microbatches, chunks)


def _single_chunk(first: str, last: str, ranks: int) -> Schedule | None:
    """Return the schedule of a pipeline with one chunk per rank, by the operations of its *first* and its *last* rank."""
    microbatches, odd = divmod(len(first), 2)
    if odd or len(last) != len(first):
        return None
    ahead = min(microbatches, ranks)
    alternating = "s" * ahead + "rs" * (microbatches - ahead) + "r" * ahead
    if microbatches == 1 and (first, last) == ("sr", "rs"):
        return Schedule("unknown", 1, 1, reason="with one micro-batch all schedules are the same")
    if (first, last) == ("s" * microbatches + "r" * microbatches, "r" * microbatches + "s" * microbatches):
        return Schedule("gpipe", microbatches, 1)
    return Schedule("1f1b", microbatches, 1) if (first, last) == (alternating, "rs" * microbatches) else None


def _chunks(pipeline: Sequence[int], facts: Mapping[int, ProfileFacts], first: str) -> tuple[int, int]:
    """Return the chunks on each rank and the micro-batches, or zeros if the counts do not match.

    The first rank sends ``chunks`` x ``microbatches`` results forward, and all but those of the last chunk return to it; gradients go the
    other way. With two ranks both directions have the same peer, so the beginning decides: before the first rank starts the next round,
    each micro-batch of the round has passed it once per chunk.
    """
    if len(pipeline) > 2:  # noqa: PLR2004 (with two ranks, next and previous are the same)
        sent = Counter(peer for what, peer in facts[pipeline[0]].operations if what == SEND)
        forward, backward = sent[pipeline[1]], sent[pipeline[-1]]
        microbatches = forward - backward
        is_whole = backward and microbatches > 0 and forward % microbatches == 0
        return (forward // microbatches, microbatches) if is_whole else (0, 0)
    pairs = sum(1 for _ in takewhile(lambda place: first[place : place + 2] == "sr", range(0, len(first), 2)))
    sends = first.count("s")
    looped = sends - 2 * pairs
    if pairs and looped > 0 and pairs % looped == 0:
        return 1 + pairs // looped, looped
    chunks = 1 + pairs // 2
    return (chunks, sends // (2 * chunks - 1)) if pairs and pairs % 2 == 0 and sends % (2 * chunks - 1) == 0 else (0, 0)


def _is_looped(pipeline: Sequence[int], facts: Mapping[int, ProfileFacts], chunks: int, microbatches: int) -> bool:
    """Return whether the last rank finishes all forward passes before it sends its first gradient."""
    before, operations = pipeline[-2], facts[pipeline[-1]].operations
    if len(pipeline) > 2:  # noqa: PLR2004 (with two ranks, next and previous are the same)
        ahead = takewhile(lambda one: one != (SEND, before), map(tuple, operations))
        return sum(one == (RECV, before) for one in ahead) == chunks * microbatches
    forward = [SEND if place % 2 else RECV for place in range(2 * (chunks - 1) * microbatches)] + [RECV] * microbatches
    return microbatches > 2 and [what for what, _ in operations][: len(forward)] == forward  # noqa: PLR2004 (with two both have one order)
