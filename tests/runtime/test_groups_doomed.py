"""Run: python -m pytest -p tests.runtime.conftest /tmp/lead/failing/test_doomed.py"""

from tests.runtime.chaos import fault
from tests.runtime.flow_double import assert_undisturbed


def test_a_script_that_checks_its_loss_outlives_a_doomed_attempt(job):
    """Zeros for a lost peer make 0 / 0 in rank 1, whose own check of the loss then ends it: one lost rank takes another along."""
    flow = job("strict", script="counted", ranks=2, stride=1, chaos=[fault(0, "forward", 9)])
    flow.pass_gate()
    flow.until_dead(0)
    flow.regroup([0])
    flow.until(lambda: flow.of("regrouped", 1) or flow.of("exception", 1), "an outcome")
    assert flow.of("exception", 1) == []


def test_a_loss_summed_up_after_the_vote_is_right_or_none(job, whole):
    """Rank 2 dies after it applied step 7, before the loss is reduced: the others must not report 0.0 for step 7."""
    flow = job("late", chaos=[fault(2, "applied", 7)])
    flow.until_dead(2)
    flow.regroup([2])
    flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * 4
    for losses in ended.losses:
        assert {s: l for s, l in losses.items() if l is not None}.items() <= whole.losses[0].items()
    assert [t["model"] for t in ended.told] == [t["model"] for t in whole.told]
