"""The tables of commands and of worker messages are complete: what is sent is in them, each row is sent, and each field is checked."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from holdfast.agent import schema
from holdfast.agent.commands import COMMANDS
from holdfast.agent.worker_messages import KINDS, MESSAGES, MessageKind, MessageSender
from holdfast.control.agents.schema import ANSWERS
from tests.test_arrows import ROOT

GIVE = frozenset({"send_command", "send", "send_command_async", "send_commands", "send_commands_async", "each"})
"""Names of what gives a command in the controller's modules; the command's name is among the arguments."""


def given() -> Iterator[str]:
    """Yield the name of each command that a controller gives."""
    for top in ("holdfast/control", "holdfast/audit", "tasks", "flows"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GIVE:
                    named = [*node.args, *(one.value for one in node.keywords if one.arg == "verb")]
                    yield from (one.value for one in named if isinstance(one, ast.Constant) and isinstance(one.value, str))


def test_every_command_that_is_given_stands_in_the_table_and_every_row_is_given() -> None:
    """By some controller."""
    assert {*given()} == {*COMMANDS}


def test_the_answers_that_controllers_check_are_those_of_commands() -> None:
    """And no field of them is one that the agent does not send."""
    for command, answer in ANSWERS.items():
        assert set(answer.model_fields) <= set(COMMANDS[command].answer), command


@pytest.mark.parametrize(
    "name", [name for name, kind in COMMANDS.items() if any(one.required for one in schema.fields_of(kind.run).values())]
)
def test_a_command_without_its_fields_is_refused_by_the_first_of_them(name: str) -> None:
    """Whatever else it carries."""
    with pytest.raises(schema.BadField, match="it is missing"):
        schema.read_fields(COMMANDS[name].run, {"do": name, "id": 1})


def sent_to_agents() -> Iterator[str]:
    """Yield the name of each message that the runtime sends to an agent."""
    for path in (ROOT / "holdfast/runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                named = [
                    value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant) and key.value == "t"
                ]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "report":
                named = node.args[:1]
            else:
                continue
            yield from (one.value for one in named if isinstance(one, ast.Constant) and isinstance(one.value, str))


def test_every_message_that_the_runtime_sends_is_in_the_table_and_every_row_is_sent() -> None:
    """The agent would drop any other one. How a process was regrouped, and that it has parked, is sent with fields of many kinds."""
    assert {*sent_to_agents()} | {"regrouped", "parked"} == {kind.name for kind in KINDS}


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if any(one.required for one in schema.fields_of(kind.fields or kind.handle).values())]
)
def test_a_message_without_its_fields_is_malformed(kind: MessageKind) -> None:
    """By the first of them."""
    with pytest.raises(schema.BadField, match="it is missing"):
        schema.read_fields(kind.fields or kind.handle, {"t": kind.name})


def test_each_sender_has_one_row_for_a_message() -> None:
    """And every sender sends hello."""
    assert len(MESSAGES) == sum(len(kind.senders) for kind in KINDS)
    assert {sender for sender, name in MESSAGES if name == "hello"} == {*MessageSender}
