"""The table of events is complete: agents send exactly its rows, and its required fields are required."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.agent.memstore.manager import SERVER_EVENTS
from holdfast.agent.worker_messages import KINDS, WorkerMessages
from holdfast.control.supervisor.event_table import EVENTS, parse
from tests.fuzz.test_agents_words import FACTS
from tests.test_arrows import ROOT

SEND = frozenset({"emit", "_emit", "_report", "_emit_unlogged", "emit_unlogged"})
"""Names of what sends an event in the agent's modules; the event's name is the first argument."""


def sent() -> Iterator[str]:
    """Yield the name of each event that the agent's modules send."""
    for path in (ROOT / "holdfast" / "agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEND and node.args:
                first = node.args[0]
                names = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))
    handlers = WorkerMessages
    passed_on = {handlers.forward, handlers.on_groups, handlers.on_roles, handlers.on_switched, handlers.on_departed}
    for kind in KINDS:
        if kind.handle in passed_on:
            yield from (f"{sender}.{kind.name}" for sender in kind.senders)
    yield from SERVER_EVENTS


def test_the_table_has_exactly_the_events_that_are_sent() -> None:
    """By an agent; by the controller's end of the connection where the agent is lost."""
    assert "agent.disconnected" in (ROOT / "holdfast" / "control" / "agents" / "client.py").read_text()
    assert {*sent(), "agent.disconnected"} == set(EVENTS)


def an_event(name: str) -> dict[str, Any]:
    """Return an event of the kind *name* as an agent sends it."""
    raised = {"type": "E", "message": "m"} if name == "worker.raised" else None
    return {**FACTS, "event": name, "raised": raised, "seconds": {"meet": 0.1} if name == "worker.regrouped" else 0.5}


@pytest.mark.parametrize("name", EVENTS)
def test_a_required_field_can_be_neither_missing_nor_null(name: str) -> None:
    """Unless null has a meaning."""
    fields = EVENTS[name].fields.model_fields
    assert parse(an_event(name)).event == name
    for field, facts in fields.items():
        if facts.is_required():
            with pytest.raises(ValueError, match=field):
                EVENTS[name].fields.of({other: value for other, value in an_event(name).items() if other != field})
        if "None" not in str(facts.annotation):
            with pytest.raises(ValueError, match=field):
                EVENTS[name].fields.of({**an_event(name), field: None})


def test_an_unknown_event_of_a_newer_agent_is_accepted() -> None:
    """Its common fields are checked all the same."""
    assert parse({"event": "worker.dances", "rank": "any"}).event == "worker.dances"
    with pytest.raises(ValueError, match="generation"):
        parse({"event": "worker.dances", "generation": "any"})
