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
from tests.mentions import mentions

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
        (SLOW, MOVE, ("80 ms", "12,000 remaining steps", "16 min", "300 ms", "3 migrations")),
        (replace(SLOW, remaining=100), STAY, ("8 s", "300 ms")),
        (replace(SLOW, remaining=100), STAY, ("60 s",)),
        (replace(SLOW, remaining=0), STAY, ("0 remaining steps",)),
        (replace(SLOW, remaining=None), MOVE, ("9,000 steps", "60 min", "unknown", "12 min")),
        (replace(SLOW, pauses=()), MOVE, ("1 s", "estimate", "2%", "60 s")),
        (replace(SLOW, pauses=(400.0,)), STAY, ("20.1 min",)),
        (replace(SLOW, spares=()), WATCH, ("no other node",)),
        (replace(SLOW, blocked_reason="its groups are torch's"), WATCH, ("its groups are torch's",)),
        (
            replace(SLOW, wanted=StragglerAction.REPORT),
            WATCH,
            ("`checks.straggler: report`", "80 ms"),
        ),
        (replace(SLOW, wanted=StragglerAction.MIGRATE, remaining=1), MOVE, ("`checks.straggler: migrate`",)),
        (replace(SLOW, moved=(BEFORE,)), WATCH, ("not its node",)),
        (replace(SLOW, moved=(BEFORE,), wanted=StragglerAction.MIGRATE), WATCH, ("not its node",)),
        (replace(SLOW, moved=(replace(BEFORE, rank=4, node="n1"),)), WATCH, ("n1", "migrated", "next one")),
        (replace(SLOW, moved=(replace(BEFORE, at=NOW - RULE.window),)), MOVE, ("migrated",)),
        (replace(SLOW, moved=tuple(PastMigration(at=NOW, rank=9 + n, node=f"m{n}") for n in range(4))), WATCH, ("maximum",)),
    ],
)  # fmt: skip
def test_the_costs_decide_and_are_in_the_reason(slow: StragglerCase, act: StragglerOutcome, words: tuple[str, ...]) -> None:
    """What it costs to stay, what to move, and what else counts."""
    found = RULE(slow)
    assert found.act is act, found.reason
    assert mentions(found.reason, "rank 3", "n1", *words)


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
