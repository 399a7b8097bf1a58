"""Slow ranks: what staying and moving cost, and what is decided by it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.codec import packed, unpacked
from holdfast.policies.recovery.policy import NAMED
from holdfast.policies.slowness import (
    PAUSE,
    RECOVERY,
    TRUST,
    MigrateStraggler,
    PastMigration,
    StragglerAction,
    StragglerCase,
    StragglerOutcome,
)

NOW = 1_000_000.0
RULE = MigrateStraggler()
SLOW = StragglerCase(
    now=NOW, kind="straggler-gpu", rank=3, node="n1", step=0.4, lost=0.08, remaining=12_000, spares=("n7",), pauses=(0.2, 1.2, 0.3)
)
BEFORE = PastMigration(at=NOW - 60, rank=3, node="n0")
WATCH, STAY, MOVE = StragglerOutcome


@pytest.mark.parametrize(
    ("slow", "act", "words"),
    [
        (SLOW, MOVE, "staying costs 80 ms a step x 12,000 remaining steps = 16 min; a migration costs 300 ms (median of 3 migrations)"),
        (replace(SLOW, remaining=100), STAY, "= 8 s; a migration costs 300 ms"),
        (replace(SLOW, remaining=100), STAY, "left there, as a migration must save 60 s"),
        (replace(SLOW, remaining=0), STAY, "x 0 remaining steps"),
        (replace(SLOW, remaining=None), MOVE, "x 9,000 steps (60 min, as the number of remaining steps is unknown) = 12 min"),
        (replace(SLOW, pauses=()), MOVE, "a migration costs 1 s (an estimate, none was measured) and 2% of a recovery of 60 s"),
        (replace(SLOW, pauses=(400.0,)), STAY, "left there, as a migration must save 20.1 min"),
        (replace(SLOW, spares=()), WATCH, "there is no other node for it"),
        (replace(SLOW, blocked_reason="its groups are torch's"), WATCH, "it cannot migrate while training runs: its groups are torch's"),
        (
            replace(SLOW, wanted=StragglerAction.REPORT),
            WATCH,
            "as the job requests (`checks.straggler: report`); staying costs 80 ms a step",
        ),
        (replace(SLOW, wanted=StragglerAction.MIGRATE, remaining=1), MOVE, "as the job requests (`checks.straggler: migrate`)"),
        (replace(SLOW, moved=(BEFORE,)), WATCH, "the cause is its work, not its node"),
        (replace(SLOW, moved=(BEFORE,), wanted=StragglerAction.MIGRATE), WATCH, "the cause is its work, not its node"),
        (replace(SLOW, moved=(replace(BEFORE, rank=4, node="n1"),)), WATCH, "the next one does not follow"),
        (replace(SLOW, moved=(replace(BEFORE, at=NOW - RULE.window),)), MOVE, "migrated"),
        (replace(SLOW, moved=tuple(PastMigration(at=NOW, rank=9 + n, node=f"m{n}") for n in range(4))), WATCH, "which is the maximum"),
    ],
)  # fmt: skip
def test_the_costs_decide_and_are_in_the_reason(slow: StragglerCase, act: StragglerOutcome, words: str) -> None:
    """What it costs to stay, what to move, and what else counts."""
    found = RULE(slow)
    assert found.act is act, found.reason
    assert words in found.reason
    assert found.reason.startswith("rank 3 on n1: ")


COST = st.floats(0.0, 1_000.0)
CASES = st.builds(
    StragglerCase,
    now=st.just(NOW),
    kind=st.just("straggler-host"),
    rank=st.integers(0, 3),
    node=st.sampled_from(["n0", "n1"]),
    step=st.floats(1e-6, 100.0),
    lost=COST,
    remaining=st.none() | st.integers(0, 10**6),
    wanted=st.sampled_from(list(StragglerAction)),
    spares=st.sampled_from([(), ("n7",)]),
    pauses=st.lists(COST, max_size=4).map(tuple),
    failed=st.integers(0, 5),
    moved=st.lists(
        st.builds(PastMigration, at=st.floats(NOW - 2e5, NOW), rank=st.integers(0, 3), node=st.sampled_from(["n0", "n1", "n2"])), max_size=5
    ).map(tuple),
)


@given(CASES, st.sampled_from(sorted(NAMED)))
def test_no_policy_moves_a_rank_for_less_than_it_brings(slow: StragglerCase, policy: str) -> None:
    """Unless the job says so; nor without a place, nor again within the window. What is written down decides the same."""
    rule = NAMED[policy].stragglers
    found = rule(slow)
    assert found.staying is not None
    assert found.moving is not None
    assert found.moving > 0
    if found.act is StragglerOutcome.MOVE:
        assert slow.spares
        assert not any(one.rank == slow.rank and NOW - one.at < rule.window for one in slow.moved)
        assert slow.wanted is StragglerAction.MIGRATE or found.staying >= max(rule.min_saving, rule.min_cost_ratio * found.moving)
    assert rule(unpacked(StragglerCase, json.loads(json.dumps(packed(slow))))) == found


@given(CASES, COST)
def test_worse_slowness_never_speaks_for_staying(slow: StragglerCase, more: float) -> None:
    """And what failed before never speaks for moving."""
    order = [StragglerOutcome.WATCH, StragglerOutcome.STAY, StragglerOutcome.MOVE]
    act = order.index(RULE(slow).act)
    assert order.index(RULE(replace(slow, lost=slow.lost + more)).act) >= act
    assert order.index(RULE(replace(slow, failed=slow.failed + 1)).act) <= act


def test_a_first_move_is_taken_to_cost_a_stated_estimate() -> None:
    """Until one was measured."""
    assert RULE(replace(SLOW, pauses=())).moving == pytest.approx(PAUSE + RECOVERY / (TRUST + 1))
