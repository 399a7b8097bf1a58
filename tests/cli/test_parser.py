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
from holdfast.cli.parser.base import CLUSTER, HEADINGS, Duration, Ranks, Since, apart_from_default, node_names
from holdfast.cli.parser.synonyms import OPTIONS, SYNONYMS
from holdfast.exit_codes import OPERATOR_ERROR
from tests.cli.conftest import Command, environment


def leaves(group: click.Group = app, path: str = "holdfast") -> Iterator[tuple[str, click.Command]]:
    """Yield every command that is no group, with the words that call it."""
    for name, one in group.commands.items():
        if isinstance(one, click.Group):
            yield from leaves(one, f"{path} {name}")
        else:
            yield f"{path} {name}", one


LEAVES = dict(leaves())


def test_every_command_stands_under_one_heading() -> None:
    """At most 20, in the order of the help."""
    listed = [name for names in HEADINGS.values() for name in names]
    assert sorted(listed) == sorted(app.commands)
    assert len(listed) == len(set(listed)) <= 20
    text = app.get_help(click.Context(app, info_name="holdfast", **app.context_settings))
    places = [text.index(f"\n{title}:\n") for title in HEADINGS]
    assert places == sorted(places)


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_explains_itself_with_an_example(path: str) -> None:
    """A short help that is not cut in the list of commands, an example, a help for each option, `--json` as a flag."""
    command = LEAVES[path]
    text = command.get_help(click.Context(command, info_name=path, **app.context_settings))  # click keeps what it once made of them
    assert f"Example: {path.removesuffix(' ls')}" in text
    assert not command.get_short_help_str(limit=60).endswith("...")
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    if path != "holdfast admin completion":
        assert [one.is_flag for one in command.params if isinstance(one, click.Option) and "--json" in one.opts] == [True]


@pytest.mark.parametrize("path", LEAVES)
def test_an_option_means_the_same_in_every_command(path: str) -> None:
    """Durations, times, ranks and files are given in one way."""
    for one in LEAVES[path].params:
        if "--timeout" in one.opts or "--for" in one.opts or "--in" in one.opts:
            assert isinstance(one.type, Duration)
        if "--since" in one.opts:
            assert isinstance(one.type, Since)
        if "--rank" in one.opts:
            assert isinstance(one.type, Ranks)
            assert one.multiple
        if "--output" in one.opts:
            assert "-o" in one.opts
        if "--cluster" in one.opts:
            assert one.envvar == CLUSTER
        if "--node" in one.opts or (isinstance(one, click.Argument) and one.name == "nodes"):
            assert one.callback is node_names


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_runs_a_function_that_takes_its_parameters(path: str) -> None:
    """The function is imported by name when the command runs."""
    command = LEAVES[path]
    assert command.callback is not None
    module, _, name = inspect.getclosurevars(command.callback).nonlocals["target"].rpartition(".")
    function = getattr(importlib.import_module(f"holdfast.cli.commands.{module}"), name)
    names = {str(one.name) for one in command.params if one.expose_value}
    more = {"default_cluster" for one in command.params if one.callback is apart_from_default}
    inspect.signature(function).bind(**dict.fromkeys(names | more))


@pytest.mark.parametrize("path", SYNONYMS)
def test_every_synonym_leads_to_a_command_that_exists(path: str) -> None:
    """And is not the name of one."""
    group: click.Command = app
    for word in path.split():
        assert isinstance(group, click.Group)
        group = group.commands[word]
    assert isinstance(group, click.Group)
    assert not set(SYNONYMS[path]) & set(group.commands)
    for meant in SYNONYMS[path].values():
        words = meant.split()
        command: click.Command = app
        while words and isinstance(command, click.Group) and not words[0].startswith("-"):
            command = command.commands[words.pop(0)]
        options = {name for one in command.get_params(click.Context(command, **app.context_settings)) for name in one.opts}
        assert options >= set(words), meant


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["node", "cordon", "node-0", "--because", "x"], "--reason"),
        (["node", "approve", "1", "--refuse"], "--deny"),
        (["stop", "gpt", "--deadline", "30s"], "--timeout"),
        (["logs", "gpt", "--tail", "5"], "--lines"),
        (["logs", "gpt", "--folow"], "--follow"),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) else value,
)
def test_an_unknown_option_suggests_the_one_that_is_meant(words: list[str], meant: str, here: Command) -> None:
    """By its meaning elsewhere, or by its spelling."""
    done = here(*words)
    assert (done.returncode, f"Did you mean '{meant}'?" in done.stderr) == (OPERATOR_ERROR, True), done.stderr


def test_every_synonym_of_an_option_leads_to_one_that_exists() -> None:
    """And is not the name of one."""
    every = {name for one in LEAVES.values() for option in one.params for name in option.opts}
    assert not set(OPTIONS) & every
    assert every >= set(OPTIONS.values())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["valdiate"], "holdfast validate"),
        (["cancel"], "holdfast stop"),
        (["canel"], "holdfast stop"),
        (["squeue"], "holdfast ps"),
        (["history", "gpt"], "holdfast status --events"),
        (["version"], "holdfast --version"),
        (["node", "hold", "gpu1"], "holdfast node cordon"),
        (["node", "drian", "gpu1"], "holdfast node drain"),
        (["checkpoint", "list"], "holdfast checkpoint ls"),
        (["admin", "squeue"], "holdfast ps"),
        (["incidents", "list"], "holdfast incidents ls"),
        (["incidents", "describe", "2"], "holdfast incidents show"),
        (["incidents", "sho", "2", "--job", "gpt"], "holdfast incidents show"),
    ],
)
def test_an_unknown_command_suggests_the_one_that_is_meant(words: list[str], meant: str, here: Command) -> None:
    """By its meaning elsewhere, or by its spelling; exit status 2, as for every user error."""
    done = here(*words)
    assert done.returncode == OPERATOR_ERROR
    assert f"`{meant}`" in done.stderr


@pytest.mark.parametrize("words", [["xyzzy"], ["run"], ["run", "a.yaml", "--detatch"], ["node", "ls", "cluster.yaml"]])
def test_a_wrong_command_line_is_refused(words: list[str], here: Command) -> None:
    """Exit status 2."""
    assert here(*words).returncode == OPERATOR_ERROR


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
        ["ps"],
        ["incidents", "show", "1"],
        ["stop", "x"],
        ["node", "ls"],
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
