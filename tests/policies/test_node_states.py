"""The life of a node has one shape, asked for by shape and not by row; the laws of cordons are tried in `test_quarantine_properties`."""

from __future__ import annotations

from itertools import product

import pytest

from holdfast.policies.nodes.node_states import IN_SERVICE, NODE_MOVES, NodeEvent, NodeState, move_node
from holdfast.policies.states import UnlistedTransition
from tests.policies.shape import reached


@pytest.mark.parametrize(("state", "event"), [pair for pair in product(NodeState, NodeEvent) if pair not in NODE_MOVES])
def test_a_move_that_is_not_listed_is_refused(state: NodeState, event: NodeEvent) -> None:
    """It is a mistake of ours."""
    with pytest.raises(UnlistedTransition, match=f"no transition from {state} on '{event}'"):
        move_node(state, event)


def test_every_state_is_reached_and_none_is_left_for_ever() -> None:
    """A decommissioned node can be mended as well."""
    for state in NodeState:
        assert reached(NODE_MOVES, state) == set(NodeState)


def test_an_event_leads_to_one_state_wherever_it_comes() -> None:
    """Its name says how the node is afterwards."""
    for event in NodeEvent:
        assert len({after for (_, one), after in NODE_MOVES.items() if one is event}) == 1


def test_an_isolated_node_returns_only_by_a_burn_in_or_a_person() -> None:
    """No other event leads back into service."""
    back = {event for (before, event), after in NODE_MOVES.items() if before not in IN_SERVICE and after in IN_SERVICE}
    assert back == {NodeEvent.PASSED, NodeEvent.UNCORDONED, NodeEvent.RETURNED_TO_SERVICE}
    assert {before for (before, event) in NODE_MOVES if event is NodeEvent.PASSED} == {NodeState.IN_BURN_IN}


def test_a_person_can_cordon_and_decommission_a_node_in_every_other_state() -> None:
    """In one move."""
    assert {before for (before, event) in NODE_MOVES if event is NodeEvent.CORDONED} == set(NodeState) - {NodeState.CORDONED}
    assert {before for (before, event) in NODE_MOVES if event is NodeEvent.DECOMMISSIONED} == set(NodeState) - {NodeState.DECOMMISSIONED}
