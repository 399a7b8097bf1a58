"""Levels that a policy changes act on what is a root and on how long to wait for more; the catalogue itself stays as it is."""

from __future__ import annotations

from detectors.catalogue import CATALOGUE, CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from detectors.diagnosis import diagnose, evidence_wait_seconds

STRAGGLER = Fault(kind="straggler-gpu", at=0.0, node="n0", rank=0)
KILL = Fault(kind="worker-sigkill", at=40.0, node="n1", rank=1)
ECHO = Fault(kind="worker-peer-lost", at=1.0, node="n0", rank=0)


def test_the_catalogue_speaks_where_nothing_is_changed() -> None:
    """For every kind."""
    assert all(CATALOGUE_ACTIONS.of(Fault(kind=kind, at=0.0)) is entry.recommended_action for kind, entry in CATALOGUE.items())


def test_a_kind_that_is_made_to_act_may_be_the_root() -> None:
    """What asks for nothing is no root of what it does not explain."""
    calm = RecommendedActions(changed={"worker-sigkill": RecommendedAction.RECORD, "straggler-gpu": RecommendedAction.RESTART})
    assert diagnose([STRAGGLER, KILL]).root is KILL
    assert diagnose([STRAGGLER, KILL], recommended_actions=calm).root is STRAGGLER
    assert CATALOGUE["straggler-gpu"].recommended_action is RecommendedAction.MONITOR


def test_nobody_waits_for_the_cause_of_what_asks_for_nothing() -> None:
    """An echo that is only recorded needs no cause."""
    assert evidence_wait_seconds([ECHO], 2) > 0.0
    assert (
        evidence_wait_seconds([ECHO], 2, recommended_actions=RecommendedActions(changed={"worker-peer-lost": RecommendedAction.RECORD}))
        == 0.0
    )
