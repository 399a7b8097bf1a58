"""The table of commands is whole: what controllers give stands in it, what stands in it is given, and each field is checked by its name."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator

import pytest

from holdfast.agent import schema
from holdfast.agent.commands import COMMANDS
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


@pytest.mark.parametrize("name", [name for name, kind in COMMANDS.items() if typing.get_type_hints(kind.fields)])
def test_a_command_without_its_fields_is_refused_by_the_first_of_them(name: str) -> None:
    """Whatever else it carries."""
    with pytest.raises(schema.BadField, match="it is missing"):
        COMMANDS[name].fields.of({"do": name, "id": 1})
