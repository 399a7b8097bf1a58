"""The way back to one step: examples to read, and laws that hold whatever the ranks hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.snapshots.restore_planner import Fetch, NoPlan, RankHolding, RestorePlan, SnapshotRef, Transfer, plan
from tests.mentions import mentions

STEPS = st.integers(0, 4)
PIECES = ("a", "b", "c")
NODES = ("north", "south")


def new(rank: int, shard: str = "model") -> RankHolding:
    """Return what a rank holds whose process is new: nothing."""
    return RankHolding(rank=rank, shard=shard)


def keeps(
    rank: int, live: int, shard: str = "model", *, rank_states: dict[int, set[int]] | None = None, prepared: bool = False
) -> RankHolding:
    """Return what a survivor holds after step *live*, with *rank_states* of others."""
    kept = {ward: frozenset(steps) for ward, steps in (rank_states or {}).items()}
    return RankHolding(rank=rank, shard=shard, live=live, prepared=live + 1 if prepared else None, rank_states=kept)


def kept(rank: int, step: int, shard: str, *, part: int = 0, parts: int = 1, node: str = "", lineage: int = 0) -> SnapshotRef:
    """Return a snapshot in the memory of *node*, by default the one of *rank*."""
    node = node or f"node-{rank}"
    return SnapshotRef(step=step, lineage=lineage, rank=rank, shard=shard, part=part, parts=parts, node=node, name=f"{rank}.{step}")


def planned(
    holdings: list[RankHolding], checkpoints: tuple[int, ...] = (), stored: tuple[SnapshotRef, ...] = (), most: int = 8
) -> RestorePlan:
    """Return the plan, which there must be."""
    found = plan(holdings, checkpoints, stored, most=most)
    assert isinstance(found, RestorePlan), found
    return found


# -- examples -------------------------------------------------------------------------------------------------------------


def test_a_new_rank_receives_its_shard_from_all_copies_and_its_rank_state_from_its_backup() -> None:
    """Plain data parallelism: three survivors send a third each."""
    found = planned([keeps(0, 12), keeps(1, 12), new(2), keeps(3, 12, rank_states={2: {11, 12}})])
    assert found.step == 12
    assert [(one.source, one.target, one.share, one.shares) for one in found.transfers] == [(0, 2, 0, 3), (1, 2, 1, 3), (3, 2, 2, 3)]
    assert found.rank_states == ((3, 2),)
    assert not found.roll_forward | found.roll_back
    assert not found.fetches
    assert mentions(found.reason, "surviving ranks", "step 12")


def test_nothing_is_sent_when_all_ranks_survive() -> None:
    """Only process groups were broken."""
    found = planned([keeps(0, 5), keeps(1, 5)])
    assert (found.step, found.transfers, found.rank_states, found.checkpoint) == (5, (), (), False)


def test_a_lost_stage_comes_from_its_replica_and_from_no_other_stage() -> None:
    """Pipeline by data: the other rank of the stage is the only one that can help."""
    found = planned([keeps(0, 7, "first"), keeps(1, 7, "first", rank_states={2: {7}}), new(2, "last"), keeps(3, 7, "last")])
    assert found.transfers == (Transfer(shard="last", source=3, target=2, share=0, shares=1),)


def test_a_lost_shard_without_a_copy_comes_from_the_checkpoint_with_all_others() -> None:
    """Fully sharded, nothing stored in memory: the newest live step is not complete."""
    found = planned([keeps(0, 14, "shard 0", rank_states={1: {14}}), new(1, "shard 1")], (10, 5))
    assert (found.step, found.checkpoint, found.transfers, set(found.roll_back)) == (10, True, (), {0})
    assert mentions(found.reason, "checkpoint of step 10", "rank 1 at step 14")


def test_a_lost_shard_comes_from_its_replica_while_the_others_go_back_to_their_own_snapshots() -> None:
    """Memory is newer than disk; the replica of the lost rank's snapshot contains its per-rank state."""
    ranks = [RankHolding(rank=rank, shard=f"shard {rank}", live=14, node=f"node-{rank}") for rank in (0, 1)]
    stored = (*(kept(rank, 12, f"shard {rank}") for rank in (0, 1)), kept(2, 12, "shard 2", node="node-1"), kept(0, 13, "shard 0"))
    found = planned([*ranks, new(2, "shard 2")], (10,), stored)
    assert (found.step, set(found.roll_back), found.transfers, found.rank_states) == (12, {0, 1}, (), ())
    assert found.fetches == tuple(Fetch(target=rank, parts=(stored[rank],), rank_state=stored[rank]) for rank in (0, 1, 2))
    assert mentions(found.reason, "memory of nodes", "step 12", "rank 2")


def test_parts_of_copies_are_combined() -> None:
    """Everything ended at once: rank 0's part is in the memory of its node, rank 1's only in the replica that node 0 keeps."""
    stored = (
        kept(0, 8, "model", part=0, parts=2),
        kept(1, 8, "model", part=1, parts=2, node="node-0"),
        kept(0, 9, "model", part=0, parts=2),
    )
    found = planned([new(0), new(1)], (), stored)
    assert found.step == 8
    assert found.fetches == (
        Fetch(target=0, parts=stored[:2], rank_state=stored[0]),
        Fetch(target=1, parts=stored[:2], rank_state=stored[1]),
    )


def test_each_rank_reads_the_memory_of_its_own_node() -> None:
    """Own snapshot and replica are the same bytes; the local ones need no network."""
    stored = tuple(kept(rank, 4, f"shard {rank}", node=node) for rank in (0, 1) for node in ("node-0", "node-1"))
    ranks = [RankHolding(rank=rank, shard=f"shard {rank}", node=f"node-{rank}") for rank in (0, 1)]
    found = planned(ranks, (), stored)
    assert [[part.node for part in one.parts] for one in found.fetches] == [["node-0"], ["node-1"]]


def test_state_of_two_lineages_is_never_mixed() -> None:
    """Step 9 was computed twice: before and after the ranks went back to step 8."""
    stored = (
        kept(0, 9, "shard 0", lineage=1),
        kept(1, 9, "shard 1", lineage=2),
        *(kept(rank, 8, f"shard {rank}", lineage=1) for rank in (0, 1)),
    )
    found = planned([new(0, "shard 0"), new(1, "shard 1")], (5,), stored)
    assert (found.step, found.lineage) == (8, 1)
    live = RankHolding(rank=0, shard="shard 0", live=9, lineage=2)
    assert planned([live, new(1, "shard 1")], (5,), stored).lineage == 2
    assert planned([replace(live, lineage=3), new(1, "shard 1")], (5,), stored).step == 8


def test_a_rank_that_receives_its_shard_from_a_survivor_may_read_its_rank_state_from_memory() -> None:
    """Its backup ranks were lost with it; its snapshot of this step is on the node."""
    stored = (kept(1, 6, "model", node="node-0"),)
    found = planned([keeps(0, 6), new(1)], (), stored)
    assert found.step == 6
    assert [(one.source, one.target) for one in found.transfers] == [(0, 1)]
    assert found.fetches == (Fetch(target=1, parts=(), rank_state=stored[0]),)


def test_a_rank_without_the_result_of_the_vote_applies_the_step_that_another_has_applied() -> None:
    """All have voted for it, or no rank would have applied it."""
    found = planned([keeps(0, 9), keeps(1, 8, prepared=True, rank_states={2: {8, 9}}), new(2)])
    assert (found.step, set(found.roll_forward), set(found.roll_back)) == (9, {1}, set())
    assert {one.source for one in found.transfers} == {0, 1}


def test_a_step_that_only_some_are_prepared_for_is_given_up_by_all() -> None:
    """One survivor has no gradients of it, and no rank has applied it."""
    found = planned([keeps(0, 8, prepared=True), keeps(1, 8, rank_states={2: {8}}), new(2)])
    assert (found.step, set(found.roll_forward), set(found.roll_back)) == (8, set(), {0})


def test_a_step_that_all_survivors_are_prepared_for_is_applied() -> None:
    """The outcome of the vote is unknown, and all can continue from here."""
    found = planned([keeps(0, 8, prepared=True, rank_states={1: {8, 9}}), new(1)])
    assert (found.step, set(found.roll_forward)) == (9, {0})


def test_a_step_with_a_lost_rank_state_is_not_complete() -> None:
    """The lost rank had not voted for step 9: its generators after it are unknown."""
    found = planned([keeps(0, 8, prepared=True, rank_states={1: {8}}), new(1)])
    assert (found.step, set(found.roll_forward), set(found.roll_back)) == (8, set(), {0})
    assert mentions(found.reason, "generators", "rank 1 at step 9")


def test_survivors_that_no_vote_explains_are_not_trusted() -> None:
    """Steps 9 and 7 cannot both be the last: whatever happened, the checkpoint is complete."""
    ranks = [keeps(0, 9), keeps(1, 7)]
    found = planned(ranks, (5,))
    assert (found.step, found.checkpoint, set(found.roll_back)) == (5, True, {0, 1})
    apart = "the surviving ranks are at steps that do not match: rank 0 at 9 and rank 1 at 7"
    assert mentions(found.reason, "checkpoint of step 5", apart)
    refused = plan(ranks)
    assert isinstance(refused, NoPlan)
    assert mentions(refused.why, apart, "no complete checkpoint")


def test_the_reason_for_no_plan_names_what_is_missing() -> None:
    """People read it in the history."""
    found = plan([keeps(0, 3, "first"), *(new(rank, "last") for rank in range(1, 7))])
    lost = "ranks 1, 2, 3 and 3 more"
    said = f"nobody has the state of {lost} or the generators and the position in the data of {lost} at step 3"
    assert isinstance(found, NoPlan)
    assert mentions(found.why, said, "no complete checkpoint")
    nothing = plan([new(0)])
    assert isinstance(nothing, NoPlan)
    assert mentions(nothing.why, "no rank", "no complete checkpoint")


def test_many_targets_share_the_sources_evenly() -> None:
    """Eight new ranks, eight survivors, two sources each: every survivor sends one complete shard."""
    protected_ranks = {rank: {4} for rank in range(8, 16)}
    found = planned([*(keeps(rank, 4, rank_states=protected_ranks) for rank in range(8)), *(new(rank) for rank in range(8, 16))], most=2)
    assert set(Counter(one.source for one in found.transfers).values()) == {2}
    assert {one.shares for one in found.transfers} == {2}


@pytest.mark.parametrize("wrong", [{"live": 3, "prepared": 5}, {"prepared": 1}])
def test_an_invalid_holding_is_refused(wrong: dict[str, object]) -> None:
    """It would be a mistake of ours."""
    with pytest.raises(ValueError, match="rank 0"):
        RankHolding(rank=0, shard="a", **wrong)  # type: ignore[arg-type]


def test_two_holdings_of_one_rank_are_refused() -> None:
    """It would be a mistake of ours."""
    with pytest.raises(ValueError, match="two holdings"):
        plan([new(0), new(0)])


# -- laws -----------------------------------------------------------------------------------------------------------------


@st.composite
def holding(draw: st.DrawFn, rank: int, world: int) -> RankHolding:
    """Draw what a rank holds: often near step 2, at times anything."""
    shard = draw(st.sampled_from(PIECES))
    live = draw(st.sampled_from([None, 2, 2, 2, 1, 1, 3, 0]))
    return RankHolding(
        rank=rank,
        shard=shard,
        live=live,
        node=draw(st.sampled_from(NODES)),
        prepared=None if live is None or draw(st.booleans()) else live + 1,
        lineage=1,
        rank_states=draw(st.dictionaries(st.integers(0, world - 1), st.frozensets(STEPS, min_size=1), max_size=world)),
    )


@st.composite
def generations(draw: st.DrawFn) -> list[RankHolding]:
    """Draw the holdings of all ranks."""
    world = draw(st.integers(1, 5))
    return [draw(holding(rank, world)) for rank in range(world)]


STORED = st.lists(
    st.builds(
        lambda step, lineage, rank, shard, cut, node: SnapshotRef(
            step=step, lineage=lineage, rank=rank, shard=shard, part=cut[0], parts=cut[1], node=node, name="any"
        ),
        STEPS,
        st.sampled_from([1, 1, 1, 0]),
        st.integers(0, 4),
        st.sampled_from(PIECES),
        st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 2)]),
        st.sampled_from(NODES),
    ),
    max_size=12,
    unique=True,
).map(tuple)


def counts(step: int, ranks: list[RankHolding]) -> bool:
    """Return whether the ranks that are prepared for *step* may apply it."""
    survivors = [one for one in ranks if one.live is not None]
    return any(one.live == step for one in survivors) or all(one.prepared == step for one in survivors)


def sane(ranks: list[RankHolding]) -> bool:
    """Say whether the survivors' steps can come of votes: each can be at the last one that anybody has applied."""
    survivors = [one for one in ranks if one.live is not None]
    last = max((one.live or 0 for one in survivors), default=0)
    return all(last in (one.live, one.prepared) for one in survivors)


def lives(one: RankHolding, step: int, ranks: list[RankHolding]) -> bool:
    """Say whether *one* can be at *step* with its live state."""
    return one.live is not None and sane(ranks) and (one.live == step or (one.prepared == step and counts(step, ranks)))


def in_memory(shard: str, moment: tuple[int, int], stored: tuple[SnapshotRef, ...]) -> bool:
    """Say whether the memory of nodes has all of *shard*."""
    there = {(one.part, one.parts) for one in stored if one.moment == moment and one.shard == shard}
    return (0, 1) in there or {(0, 2), (1, 2)} <= there


def whole(moment: tuple[int, int], ranks: list[RankHolding], stored: tuple[SnapshotRef, ...]) -> bool:
    """Say by brute force whether memory holds all of a step."""
    step, lineage = moment
    living = [one for one in ranks if lives(one, step, ranks)] if lineage == 1 else []
    keepers = ranks if lineage == 1 and sane(ranks) and any(one.live is not None for one in ranks) else []
    return all(
        (any(other.shard == one.shard for other in living) or in_memory(one.shard, moment, stored))
        and (
            one in living
            or any(other.rank != one.rank and step in other.rank_states.get(one.rank, ()) for other in keepers)
            or any(kept.rank == one.rank and kept.moment == moment for kept in stored)
        )
        for one in ranks
    )


CHECKPOINTS = st.frozensets(st.integers(0, 2), max_size=1)


@given(generations(), CHECKPOINTS, STORED)
def test_the_newest_complete_step_is_chosen(ranks: list[RankHolding], checkpoints: frozenset[int], stored: tuple[SnapshotRef, ...]) -> None:
    """As brute force finds it; and memory goes before disk."""
    found = plan(ranks, checkpoints, stored)
    held = {one.moment for one in stored} | {(step, 1) for step in range(6) if any(lives(one, step, ranks) for one in ranks)}
    memory = [moment for moment in held if whole(moment, ranks, stored)]
    possible = {step for step, _ in memory} | checkpoints
    if not possible:
        assert isinstance(found, NoPlan)
        assert mentions(found.why, "no complete checkpoint")
        return
    assert isinstance(found, RestorePlan)
    assert found.step == max(possible)
    assert found.checkpoint == (found.step not in {step for step, _ in memory})
    if not found.checkpoint:
        assert (found.step, found.lineage) == max(memory)
    assert found.reason


@given(generations(), CHECKPOINTS, STORED)
def test_a_plan_is_possible_and_brings_every_rank_to_its_step(
    ranks: list[RankHolding], checkpoints: frozenset[int], stored: tuple[SnapshotRef, ...]
) -> None:
    """No rank sends what it does not hold, and at the end no rank lacks anything."""
    found = plan(ranks, checkpoints, stored)
    if isinstance(found, NoPlan):
        return
    step, by_rank = found.step, {one.rank: one for one in ranks}
    assert found.roll_back == {one.rank for one in ranks if max(one.live or 0, one.prepared or 0) > step}
    if found.checkpoint:
        assert found == RestorePlan(step=step, reason=found.reason, roll_back=found.roll_back, checkpoint=True)
        return
    assert all(by_rank[rank].prepared == step and lives(by_rank[rank], step, ranks) for rank in found.roll_forward)
    at_hand = {one.rank for one in ranks if found.lineage == 1 and lives(one, step, ranks)}
    received, fetched = {one.target for one in found.transfers}, {one.target for one in found.fetches if one.parts}
    assert not at_hand & (received | fetched)
    assert not received & fetched
    assert received | fetched | at_hand == set(by_rank)
    for one in found.transfers:
        assert one.shard == by_rank[one.target].shard == by_rank[one.source].shard
        assert one.source in at_hand
    for fetch in found.fetches:
        assert all(kept in stored and kept.moment == (step, found.lineage) for kept in [*fetch.parts, *filter(None, [fetch.rank_state])])
        assert all(part.shard == by_rank[fetch.target].shard for part in fetch.parts)
        assert [part.part for part in fetch.parts] == list(range(len(fetch.parts)))
        assert not fetch.parts or {part.parts for part in fetch.parts} == {len(fetch.parts)}
        assert fetch.rank_state is None or fetch.rank_state.rank == fetch.target
    for source, target in found.rank_states:
        assert source != target
        assert step in by_rank[source].rank_states[target]
    lit = [target for _, target in found.rank_states] + [fetch.target for fetch in found.fetches if fetch.rank_state]
    assert sorted(lit) == sorted(received | fetched)
    for target in received:
        mine = [one for one in found.transfers if one.target == target]
        assert [one.share for one in mine] == list(range(mine[0].shares))
        assert len({one.source for one in mine}) == len(mine) == mine[0].shares


@given(generations(), CHECKPOINTS, STORED)
def test_each_shard_comes_from_the_fastest_source_that_has_it(
    ranks: list[RankHolding], checkpoints: frozenset[int], stored: tuple[SnapshotRef, ...]
) -> None:
    """Ranks that live before the memory of nodes, and of that the own node's before another's."""
    found = plan(ranks, checkpoints, stored)
    if isinstance(found, NoPlan):
        return
    for fetch in found.fetches:
        mine = next(one for one in ranks if one.rank == fetch.target)
        if fetch.parts:
            assert not any(one.shard == mine.shard and lives(one, found.step, ranks) for one in ranks) or found.lineage != 1
        for part in fetch.parts:
            same = [replace(part, node=mine.node, rank=one.rank, name=one.name) for one in stored]
            assert part.node == mine.node or not any(one in stored for one in same)


@given(generations(), CHECKPOINTS, STORED, st.data())
def test_every_rank_computes_the_same_plan(
    ranks: list[RankHolding], checkpoints: frozenset[int], stored: tuple[SnapshotRef, ...], data: st.DataObject
) -> None:
    """In whatever order the holdings arrive."""
    shuffled = data.draw(st.permutations(ranks)), sorted(checkpoints), data.draw(st.permutations(stored))
    assert plan(*shuffled) == plan(ranks, checkpoints, stored)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_no_source_sends_more_than_a_share_more_than_another(survivors: int, newcomers: int, most: int) -> None:
    """Whatever the numbers of both."""
    protected_ranks = {survivors + number: {6} for number in range(newcomers)}
    ranks = [*(keeps(rank, 6, rank_states=protected_ranks) for rank in range(survivors)), *(new(rank) for rank in protected_ranks)]
    load: Counter[int] = Counter(one.source for one in planned(ranks, most=most).transfers)
    shares = min(survivors, most)
    assert sum(load.values()) * Fraction(1, shares) == newcomers
    assert max(load.values()) - min(load[rank] for rank in range(survivors)) <= 1
