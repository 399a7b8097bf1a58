"""The commands, their help, and what they import."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from holdfast.cli import app
from tests.cli.conftest import Command, environment

COMMANDS = [
    *("validate", "run", "status", "history", "show", "report", "advise", "checkpoints", "logs", "profile"),
    *("cost", "replay", "metrics", "stop", "detach", "migrate", "drain", "nodes", "burn-in", "approve", "notify"),
    *("health", "classify", "faults", "policy", "support-bundle", "demo"),
]


def test_the_commands_are_those_of_the_documentation() -> None:
    """In the order of their use."""
    assert list(app.commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    """A short help that is not cut in the list of commands, an example, a help for each option."""
    command = app.commands[name]
    text = command.get_help(
        click.Context(command, info_name=f"holdfast {name}", **app.context_settings)
    )  # click keeps what it once made of them
    assert f"Example: holdfast {name}" in text
    assert not command.get_short_help_str(limit=60).endswith("...")
    assert all(option.help for option in command.params if isinstance(option, click.Option))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "demo"])
def test_every_command_has_json_output(name: str) -> None:
    """`--json` is a flag; that of the demo names a file. A group leaves it to its commands."""
    command = app.commands[name]
    below = isinstance(command, click.Group) and not command.invoke_without_command
    for one in command.commands.values() if below and isinstance(command, click.Group) else [command]:
        assert any("--json" in option.opts for option in one.params), one.name


def declared(group: click.Group) -> Iterator[click.Command]:
    """Yield every command that runs a function of `holdfast.cli.commands`."""
    for one in group.commands.values():
        if one.callback is not None and "target" in inspect.getclosurevars(one.callback).nonlocals:
            yield one
        if isinstance(one, click.Group):
            yield from declared(one)


@pytest.mark.parametrize("command", list(declared(app)), ids=lambda command: command.name)
def test_every_command_runs_a_function_that_takes_its_parameters(command: click.Command) -> None:
    """The function is imported by name when the command runs."""
    assert command.callback is not None
    module, _, name = inspect.getclosurevars(command.callback).nonlocals["target"].partition(".")
    function = getattr(importlib.import_module(f"holdfast.cli.commands.{module}"), name)
    inspect.signature(function).bind(**{one.name: None for one in command.params if one.expose_value})


def test_help_and_version_need_no_more_than_click(holdfast: Command) -> None:
    """What is not loaded costs nothing."""
    code = "import sys; from holdfast.cli import main; main(['--help']); main(['--version']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert "validate" in done.stdout
    assert "holdfast 0." in done.stdout
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "prefect", "sqlalchemy", "sqlmodel", "pydantic", "rich", "yaml", "numpy", "matplotlib"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["ps", "-a"],
        ["validate", "no.yaml"],
        ["incidents", "show", "1"],
        ["stop", "x"],
        ["nodes"],
        ["report", "x"],
        ["checkpoint", "advise", "x"],
        ["report", "x", "--profile"],
        ["cost"],
        ["admin", "metrics"],
        ["policy", "replay", "patient"],
        ["node", "check", "--local"],
    ],
)
def test_no_reader_loads_torch_or_prefect(arguments: list[str], holdfast: Command) -> None:
    """Each takes seconds; an answer has a fraction of one."""
    code = (
        f"import sys, json; from holdfast.cli import main; main({arguments!r}); sys.stdout.write(chr(10) + json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert not loaded & {"torch", "prefect", "matplotlib"}


def test_a_mistyped_command_gets_a_suggestion(holdfast: Command) -> None:
    """Exit status 2, as for every user error."""
    done = holdfast("valdiate")
    assert done.returncode == 2
    assert "Did you mean 'validate'?" in done.stderr
    assert holdfast("xyzzy").returncode == 2
    assert holdfast("run").returncode == 2
    assert holdfast("run", "a.yaml", "--detatch").returncode == 2
