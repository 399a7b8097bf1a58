"""The layout of a job: recognised from what real schedules of torch did, and never guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.report.layout import CUT, Layout, ProfileFacts, recognise
from tests.mentions import mentions
from tests.report.recorded import CHUNKS, FILE, operations_of

RECORDED: list[dict[str, Any]] = json.loads(FILE.read_text())


def facts_of(operations: list[Any], *, offset: int = 0, times: int = 1, **more: Any) -> dict[int, ProfileFacts]:
    """Return what the ranks of a pipeline report, whose rank r has the number *offset* + r x *times*."""
    return {
        offset + rank * times: ProfileFacts(operations=[(what, offset + peer * times) for what, peer in done], **more)
        for rank, done in enumerate(operations)
    }


def recorded(schedule: str, ranks: int, microbatches: int) -> list[Any]:
    """Return the operations of a recorded pipeline."""
    found = [one for one in RECORDED if (one["schedule"], one["ranks"], one["microbatches"]) == (schedule, ranks, microbatches)]
    operations: list[Any] = found[0]["operations"]
    return operations


def claimed(schedule: str, ranks: int, microbatches: int, found: Layout) -> None:
    """Hold what was found against what was run."""
    name = schedule.rstrip("3")
    assert (found.schedule, found.microbatches, found.chunks, found.reason) == (name, microbatches, CHUNKS[schedule], "")
    assert found.pipelines == (tuple(range(ranks)),)
    assert found.stages == tuple((rank,) for rank in range(ranks))


@pytest.mark.parametrize("case", RECORDED, ids=lambda one: f"{one['schedule']} {one['ranks']}x{one['microbatches']}")
def test_recorded_schedules_are_recognised(case: dict[str, Any]) -> None:
    """GPipe, 1F1B, interleaved 1F1B and looped, by the order of sends and receives alone."""
    found = recognise(case["ranks"], facts_of(case["operations"]))
    claimed(case["schedule"], case["ranks"], case["microbatches"], found)


@pytest.mark.integration
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.long), "1f1b", pytest.param("interleaved", marks=pytest.mark.long)]
)
def test_a_live_pipeline_is_recognised(schedule: str) -> None:
    """Two processes over gloo, with the torch that is installed."""
    operations = operations_of(schedule, 2, 4)
    claimed(schedule, 2, 4, recognise(2, facts_of(operations)))
    assert [[list(one) for one in done] for done in operations] == recorded(schedule, 2, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_parallel_pipelines_are_distinguished(schedule: str) -> None:
    """Two copies of a pipeline: ranks 0 and 2, ranks 1 and 3."""
    operations = recorded(schedule, 2, 4)
    facts = {
        rank: ProfileFacts(operations=one.operations, copies=[rank // 2 * 2, rank // 2 * 2 + 1])
        for offset in (0, 1)
        for rank, one in facts_of(operations, offset=offset, times=2).items()
    }
    found = recognise(4, facts)
    assert (found.pipelines, found.stages) == (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    assert (found.width, found.copies, found.shards, found.schedule) == (2, 2, 1, schedule)
    assert (found.order, found.stage_of(3), found.stage_of(9)) == ([0, 2, 1, 3], 1, None)


@pytest.mark.parametrize(
    ("facts", "width", "shards", "copies"),
    [
        ({rank: ProfileFacts(copies=range(4)) for rank in range(4)}, 4, 1, 4),
        ({rank: ProfileFacts(copies=[rank], sharded=True) for rank in range(4)}, 4, 4, 1),
        ({rank: ProfileFacts(copies=[rank % 2, rank % 2 + 2], sharded=True) for rank in range(4)}, 4, 2, 2),
        ({0: ProfileFacts()}, 4, 1, 1),
    ],
    ids=["DDP", "FSDP2", "HSDP", "one of four"],
)
def test_copies_and_shards(facts: dict[int, ProfileFacts], width: int, shards: int, copies: int) -> None:
    """Without a pipeline all ranks train on data of their own."""
    found = recognise(4, facts)
    assert (found.schedule, found.width, found.shards, found.copies) == ("none", width, shards, copies)


def without_last(operations: list[Any]) -> list[Any]:
    """Leave out what the last rank did last."""
    return [*operations[:-1], operations[-1][:-1]]


RING = [[["send", (rank + 1) % 3], ["recv", (rank - 1) % 3]] for rank in range(3)]
ONE = [[["send", 1], ["recv", 1]], [["recv", 0], ["send", 0]]]
ZERO_BUBBLE_V = [  # three micro-batches through two ranks and back
    [["send", 1], ["send", 1], ["recv", 1], ["send", 1], ["recv", 1], ["send", 1], ["recv", 1], ["recv", 1]],
    [["recv", 0], ["send", 0], ["recv", 0], ["send", 0], ["recv", 0], ["recv", 0], ["send", 0], ["send", 0]],
]
LONG = [[["send", 1]] * (CUT // 2) + [["recv", 1]] * (CUT // 2), [["recv", 0]] * (CUT // 2) + [["send", 0]] * (CUT // 2)]


@pytest.mark.parametrize(
    ("operations", "world", "why"),
    [
        (without_last(recorded("1f1b", 3, 8)), 3, ("rank 1", "8 operations 'recv'", "rank 2", 7)),
        (recorded("1f1b", 3, 8), 4, ("no operations of rank 3",)),
        (RING, 3, (3, "sending")),
        (ONE, 2, ("one micro-batch",)),
        (ZERO_BUBBLE_V, 2, ("GPipe's", "1F1B's", "interleaved 1F1B's")),
        (LONG, 2, (f"{CUT} operations",)),
    ],
    ids=["steps mixed", "a rank is missing", "ring", "one micro-batch", "V", "cut"],
)
def test_what_is_not_understood_is_unknown_with_the_reason(operations: list[Any], world: int, why: tuple[object, ...]) -> None:
    """Rather than a guess."""
    found = recognise(world, facts_of(operations))
    assert found.schedule == "unknown"
    assert mentions(found.reason, *why)


def test_pipelines_that_differ_are_no_schedule() -> None:
    """One by GPipe, one by 1F1B; and of different lengths."""
    mixed = facts_of(recorded("gpipe", 2, 4)) | facts_of(recorded("1f1b", 2, 4), offset=2)
    assert recognise(4, mixed).reason == "the pipelines have different schedules"
    uneven = facts_of(recorded("gpipe", 2, 4)) | facts_of(recorded("gpipe", 3, 8), offset=2)
    assert "different lengths: 2, 3 ranks" in recognise(5, uneven).reason
