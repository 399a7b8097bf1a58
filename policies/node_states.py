"""The life of a node: one table of states and moves. What it does not list is refused; the docs draw their diagram from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from policies.states import UnlistedMove


class NodeState(StrEnum):
    """Whether a node may be given to jobs."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It is used where there is no better one."""
    QUARANTINED = "quarantined"
    """A program took it out; it comes back by a passed burn-in or a person's word."""
    IN_BURN_IN = "in-burn-in"
    HELD = "held"
    """A person took it out; no program brings it back."""
    RETIRED = "retired"
    """It was taken out too often, or a person gave it up; only a person brings it back."""


class NodeEvent(StrEnum):
    """What moves a node on."""

    DOUBTED = "doubted"
    """A fault was seen that asks for a look, and for no more."""
    CLEARED = "cleared"
    """A doubt ran out without another one, or a person answered it."""
    QUARANTINED = "quarantined"
    """A fault of its own took it out of a job, or doubts came too often."""
    TESTED = "tested"
    """A burn-in runs on it."""
    PASSED = "passed"
    """The burn-in that was begun for the open hold was passed."""
    FAILED = "failed"
    """The burn-in was not passed, or a fault came in between."""
    UNTRIED = "untried"
    """The burn-in could not be made, or did not end in time: that speaks against nobody, and lifts nothing."""
    HELD = "held"
    """A person holds it."""
    RELEASED = "released"
    """The last person's hold was lifted by a person, and nothing else is against it."""
    RETURNED = "returned"
    """The last person's hold has ended, and a burn-in has still to be passed."""
    READMITTED = "readmitted"
    """A person took it back without a burn-in."""
    RETIRED = "retired"
    """It was quarantined or failed burn-ins too often within a window, or a person gave it up."""


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
"""States in which a node may be given to jobs; in every other it is isolated."""


def move_node(state: NodeState, event: NodeEvent) -> NodeState:
    """Return where *event* takes a node; refuse what the table does not list."""
    try:
        return NODE_MOVES[state, event]
    except KeyError:
        raise UnlistedMove(state, event) from None
