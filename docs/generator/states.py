"""The page of states: the life of a job and of a node, drawn from the tables of transitions."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Final, TypeVar

from docs.generator.markdown import page, table
from holdfast.policies.nodes.node_states import NODE_MOVES, NodeEvent
from holdfast.policies.states import TERMINAL, TRANSITIONS, Event, State

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

ASKED: Final = (State.CANCELLED, State.SUSPENDED)
"""States that a person or the end of the walltime causes, from almost every other state."""


def said_under(kind: type[StrEnum]) -> dict[str, str]:
    """Return the sentence that stands under each member of *kind* in its source."""
    lines = next(node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    said = {}
    for member, below in pairwise(lines):
        match member, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                said[name] = text
    return said


def diagram(table_of: Mapping[tuple[S, E], S]) -> Iterator[str]:
    """Draw a table of moves: one arrow for all the events that lead from one state to another."""
    words = {state: state.replace("-", "_") for (state, _) in table_of}  # a dash would end a name in the diagram
    words |= {state: state.replace("-", "_") for state in table_of.values()}
    yield f"    [*] --> {words[next(iter(table_of))[0]]}"
    for before, after in dict.fromkeys((state, after) for (state, _), after in table_of.items()):
        events = [event for (state, event), to in table_of.items() if (state, to) == (before, after)]
        yield f"    {words[before]} --> {words[after]}: {', '.join(events)}"
    yield from (f"    {words[state]} --> [*]" for state in words if state not in {before for before, _ in table_of})


def states_page() -> str:
    """Show the life of a job, then that of a node: diagram, table of moves, meaning of the events."""
    table_of = {(state, event): after for state, outcomes in TRANSITIONS.items() for event, after in outcomes.items()}
    shown = {(state, event): after for (state, event), after in table_of.items() if after not in ASKED}
    ends = ", ".join(f"`{state}`" for state in State if state in TERMINAL)
    return page(
        "# States\n",
        "A transition that is not in these tables is refused. The history keeps every transition with its reason.\n",
        "## States of a job\n",
        f"The newest transition gives the state of a job. These states are final: {ends}.",
        f"The diagram leaves out the transitions to {' and '.join(f'`{state}`' for state in ASKED)}, which most states have.\n",
        "```mermaid\nstateDiagram-v2",
        *diagram(shown),
        "```\n",
        table(
            ("State", "Event", "Next state"), *((f"`{state}`", f"`{event}`", f"`{after}`") for (state, event), after in table_of.items())
        ),
        "### Events of a job\n",
        _meanings(Event),
        "## States of a node\n",
        "Jobs are placed on `healthy` nodes, and on `suspect` nodes where there are no others. Nodes in other states are out of service.\n",
        "```mermaid\nstateDiagram-v2",
        *diagram(NODE_MOVES),
        "```\n",
        table(
            ("State", "Event", "Next state"), *((f"`{state}`", f"`{event}`", f"`{after}`") for (state, event), after in NODE_MOVES.items())
        ),
        "### Events of a node\n",
        _meanings(NodeEvent),
    )


def _meanings(events: type[StrEnum]) -> str:
    said = said_under(events)
    return table(("Event", "Meaning"), *((f"`{event}`", said[event.name]) for event in events))
