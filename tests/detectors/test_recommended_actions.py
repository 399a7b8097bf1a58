"""Recommended actions changed by a policy affect the root and the wait for evidence; the catalogue itself is unchanged."""

from __future__ import annotations

from holdfast.detectors.catalogue import CATALOGUE, CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.diagnosis import diagnose, evidence_wait_seconds

STRAGGLER = Fault(kind="straggler-gpu", at=0.0, node="n0", rank=0)
KILL = Fault(kind="worker-sigkill", at=40.0, node="n1", rank=1)
ECHO = Fault(kind="worker-peer-lost", at=1.0, node="n0", rank=0)


def test_unchanged_actions_are_those_of_the_catalogue() -> None:
    """For every kind."""
    assert all(CATALOGUE_ACTIONS.of(Fault(kind=kind, at=0.0)) is entry.recommended_action for kind, entry in CATALOGUE.items())


def test_a_kind_with_a_raised_action_can_be_the_root() -> None:
    """A kind that is only recorded is no root of faults that it does not explain."""
    calm = RecommendedActions(changed={"worker-sigkill": RecommendedAction.RECORD, "straggler-gpu": RecommendedAction.RESTART})
    assert diagnose([STRAGGLER, KILL]).root is KILL
    assert diagnose([STRAGGLER, KILL], recommended_actions=calm).root is STRAGGLER
    assert CATALOGUE["straggler-gpu"].recommended_action is RecommendedAction.MONITOR


def test_a_recorded_fault_waits_for_no_cause() -> None:
    """A secondary fault that is only recorded needs no cause."""
    assert evidence_wait_seconds([ECHO], 2) > 0.0
    assert (
        evidence_wait_seconds([ECHO], 2, recommended_actions=RecommendedActions(changed={"worker-peer-lost": RecommendedAction.RECORD}))
        == 0.0
    )
