"""The service states of a node and the transitions between them, in one table from which docs/reference/states.md is drawn."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from holdfast.policies.states import UnlistedTransition


class NodeState(StrEnum):
    """Service state of a node."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It is used only if no better node is free."""
    QUARANTINED = "quarantined"
    """A program isolated it; a passed burn-in or a person returns it to service."""
    IN_BURN_IN = "in-burn-in"
    CORDONED = "cordoned"
    """A person cordoned it; no program returns it to service."""
    DECOMMISSIONED = "decommissioned"
    """It was isolated too often, or a person decommissioned it; only a person returns it to service."""


class NodeEvent(StrEnum):
    """What moves a node to its next state."""

    SUSPECTED = "suspected"
    """A fault was seen that makes the node suspect."""
    CLEARED = "cleared"
    """The suspicion expired, or a person cleared it."""
    QUARANTINED = "quarantined"
    """A fault of its own removed it from a job, or it was suspect too often."""
    TESTED = "tested"
    """A burn-in runs on it."""
    PASSED = "passed"
    """The burn-in for the open cordon passed."""
    FAILED = "failed"
    """The burn-in failed, or a fault came meanwhile."""
    UNTRIED = "untried"
    """The burn-in could not run, or did not end in time: the node stays quarantined, and it does not count as a failure."""
    CORDONED = "cordoned"
    """A person cordoned it."""
    UNCORDONED = "uncordoned"
    """A person lifted the last person's cordon, and there is no other one."""
    BURN_IN_DUE = "burn-in-due"
    """The last person's cordon expired or was lifted, and a burn-in is still due."""
    RETURNED_TO_SERVICE = "returned-to-service"
    """A person returned it to service without a burn-in."""
    DECOMMISSIONED = "decommissioned"
    """It was quarantined or failed burn-ins too often within a window, or a person decommissioned it."""


_S, _E = NodeState, NodeEvent

NODE_MOVES: Final[dict[tuple[NodeState, NodeEvent], NodeState]] = {
    (_S.HEALTHY, _E.SUSPECTED): _S.SUSPECT,
    (_S.HEALTHY, _E.QUARANTINED): _S.QUARANTINED,
    (_S.HEALTHY, _E.CORDONED): _S.CORDONED,
    (_S.HEALTHY, _E.DECOMMISSIONED): _S.DECOMMISSIONED,
    (_S.SUSPECT, _E.CLEARED): _S.HEALTHY,
    (_S.SUSPECT, _E.QUARANTINED): _S.QUARANTINED,
    (_S.SUSPECT, _E.CORDONED): _S.CORDONED,
    (_S.SUSPECT, _E.DECOMMISSIONED): _S.DECOMMISSIONED,
    (_S.QUARANTINED, _E.TESTED): _S.IN_BURN_IN,
    (_S.QUARANTINED, _E.RETURNED_TO_SERVICE): _S.HEALTHY,
    (_S.QUARANTINED, _E.CORDONED): _S.CORDONED,
    (_S.QUARANTINED, _E.DECOMMISSIONED): _S.DECOMMISSIONED,
    (_S.IN_BURN_IN, _E.PASSED): _S.HEALTHY,
    (_S.IN_BURN_IN, _E.FAILED): _S.QUARANTINED,
    (_S.IN_BURN_IN, _E.UNTRIED): _S.QUARANTINED,
    (_S.IN_BURN_IN, _E.RETURNED_TO_SERVICE): _S.HEALTHY,
    (_S.IN_BURN_IN, _E.CORDONED): _S.CORDONED,
    (_S.IN_BURN_IN, _E.DECOMMISSIONED): _S.DECOMMISSIONED,
    (_S.CORDONED, _E.UNCORDONED): _S.HEALTHY,
    (_S.CORDONED, _E.BURN_IN_DUE): _S.QUARANTINED,
    (_S.CORDONED, _E.TESTED): _S.IN_BURN_IN,
    (_S.CORDONED, _E.DECOMMISSIONED): _S.DECOMMISSIONED,
    (_S.DECOMMISSIONED, _E.RETURNED_TO_SERVICE): _S.HEALTHY,
    (_S.DECOMMISSIONED, _E.CORDONED): _S.CORDONED,
}

IN_SERVICE: Final = frozenset({NodeState.HEALTHY, NodeState.SUSPECT})
"""States in which jobs may use a node; in all others it is isolated."""


def move_node(state: NodeState, event: NodeEvent) -> NodeState:
    """Return the state after *event*; raise `UnlistedTransition` if the table does not list it."""
    try:
        return NODE_MOVES[state, event]
    except KeyError:
        raise UnlistedTransition(state, event) from None
