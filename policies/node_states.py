"""The service states of a node and the transitions between them, in one table from which docs/reference/states.md is drawn."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from policies.states import UnlistedTransition


class NodeState(StrEnum):
    """Service state of a node."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It is used only if no better node is free."""
    QUARANTINED = "quarantined"
    """A program isolated it; a passed burn-in or a person returns it to service."""
    IN_BURN_IN = "in-burn-in"
    HELD = "held"
    """A person cordoned it; no program returns it to service."""
    RETIRED = "retired"
    """It was isolated too often, or a person decommissioned it; only a person returns it to service."""


class NodeEvent(StrEnum):
    """What moves a node to its next state."""

    DOUBTED = "doubted"
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
    HELD = "held"
    """A person cordoned it."""
    RELEASED = "released"
    """A person lifted the last person's cordon, and there is no other one."""
    RETURNED = "returned"
    """The last person's cordon expired, and a burn-in is still due."""
    READMITTED = "readmitted"
    """A person returned it to service without a burn-in."""
    RETIRED = "retired"
    """It was quarantined or failed burn-ins too often within a window, or a person decommissioned it."""


_S, _E = NodeState, NodeEvent

NODE_MOVES: Final[dict[tuple[NodeState, NodeEvent], NodeState]] = {
    (_S.HEALTHY, _E.DOUBTED): _S.SUSPECT,
    (_S.HEALTHY, _E.QUARANTINED): _S.QUARANTINED,
    (_S.HEALTHY, _E.HELD): _S.HELD,
    (_S.HEALTHY, _E.RETIRED): _S.RETIRED,
    (_S.SUSPECT, _E.CLEARED): _S.HEALTHY,
    (_S.SUSPECT, _E.QUARANTINED): _S.QUARANTINED,
    (_S.SUSPECT, _E.HELD): _S.HELD,
    (_S.SUSPECT, _E.RETIRED): _S.RETIRED,
    (_S.QUARANTINED, _E.TESTED): _S.IN_BURN_IN,
    (_S.QUARANTINED, _E.READMITTED): _S.HEALTHY,
    (_S.QUARANTINED, _E.HELD): _S.HELD,
    (_S.QUARANTINED, _E.RETIRED): _S.RETIRED,
    (_S.IN_BURN_IN, _E.PASSED): _S.HEALTHY,
    (_S.IN_BURN_IN, _E.FAILED): _S.QUARANTINED,
    (_S.IN_BURN_IN, _E.UNTRIED): _S.QUARANTINED,
    (_S.IN_BURN_IN, _E.READMITTED): _S.HEALTHY,
    (_S.IN_BURN_IN, _E.HELD): _S.HELD,
    (_S.IN_BURN_IN, _E.RETIRED): _S.RETIRED,
    (_S.HELD, _E.RELEASED): _S.HEALTHY,
    (_S.HELD, _E.RETURNED): _S.QUARANTINED,
    (_S.HELD, _E.TESTED): _S.IN_BURN_IN,
    (_S.HELD, _E.RETIRED): _S.RETIRED,
    (_S.RETIRED, _E.READMITTED): _S.HEALTHY,
    (_S.RETIRED, _E.HELD): _S.HELD,
}

IN_SERVICE: Final = frozenset({NodeState.HEALTHY, NodeState.SUSPECT})
"""States in which jobs may use a node; in all others it is isolated."""


def move_node(state: NodeState, event: NodeEvent) -> NodeState:
    """Return the state after *event*; raise `UnlistedTransition` if the table does not list it."""
    try:
        return NODE_MOVES[state, event]
    except KeyError:
        raise UnlistedTransition(state, event) from None
