"""What the simulator computes where the answer is known: a published formula, and the figures that need no large cluster."""

from __future__ import annotations

from holdfast.simulator.validation import clockwork, meta_ettr


def test_ettr_agrees_with_the_published_formula_and_is_a_little_above_it() -> None:
    """The formula leaves out that no fault comes during a recovery: it is the lower one, by less than two points."""
    for one in meta_ettr(2):
        assert one.met, one
        assert one.values is not None
        assert one.goal is not None
        assert -0.001 < one.values.median - one.goal < 0.02, one


def test_what_is_not_published_is_not_computed_but_said() -> None:
    """Of Clockwork's comparison: two figures have no value and a reason, the restart is missed without an assumption and met with one."""
    found = {one.name: one for one in clockwork(1)}
    for name in ("clockwork-torchpass", "clockwork-torchft"):
        assert found[name].values is None
        assert found[name].met is False
        assert "published" in found[name].reason
    assert found["clockwork-restart"].met is False
    assert found["clockwork-restart-nccl-timeout"].met is True
    assert "does not mention" in found["clockwork-restart-nccl-timeout"].reason
