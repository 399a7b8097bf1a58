"""Every `holdfast` command that a message, a page, a unit or a script names is one that the parser accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from holdfast.cli import app
from holdfast.cli.parser.base import GroupWithDefault
from holdfast.cli.parser.launch import LaunchCommand, is_job_file
from tests.cli.conftest import ROOT

TOPS = ("holdfast", "policies", "detectors", "flows", "tasks", "deployments", "docs", "examples", "scripts", "benchmarks")
SUFFIXES = frozenset({".py", ".md", ".yaml", ".yml", ".json", ".j2", ".sh", ".sbatch", ".service", ".toml"})
PAST = frozenset({"CHANGELOG.md"})
"""Files about earlier versions."""
SPAN = re.compile(r"(?:`|<code>)holdfast ([^`<]+?)(?:`|</code>)")
LINE = re.compile(r"^\s*(?:\$ |ExecStart=\S*/|[A-Z_]+=\S+ )?holdfast ([^`\n]+)$", re.MULTILINE)
WORD = re.compile(r"[a-z][a-z-]*")
"""A command; what else a text has there is a placeholder."""


def files() -> list[Path]:
    """Return the files that name commands."""
    below = [file for top in TOPS for file in (ROOT / top).rglob("*") if file.suffix in SUFFIXES and "__pycache__" not in file.parts]
    return sorted([*below, *(file for file in ROOT.glob("*.md") if file.name not in PAST), ROOT / "Makefile"])


def named(text: str, *, lines: bool) -> Iterator[str]:
    """Yield what follows `holdfast` in code spans, and with *lines* in lines of their own."""
    yield from SPAN.findall(text)
    if lines:
        yield from LINE.findall(text)


def words_of(text: str) -> list[str]:
    """Return the words of a command up to the first one of the shell's."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    end = next((place for place, word in enumerate(words) if word in {"|", ">", "<", "&", "&&", ";"}), len(words))
    return words[:end]


def below(command: click.Command, word: str) -> click.Command | None:
    """Return the command that *word* calls below the group *command*: with a placeholder none is named."""
    if isinstance(command, GroupWithDefault):
        return command.commands.get(word, command.commands["ls"])
    assert isinstance(command, click.Group)
    return command.commands.get(word)


def wrong_in(text: str) -> str | None:
    """Return the word that the parser does not know of the command *text*; None where it knows all."""
    command: click.Command = app
    words = words_of(text)
    while words and not is_script(command, words[0]):
        word = words.pop(0)
        if word.startswith("-") and word != "-":
            option = options_of(command).get(word.partition("=")[0])
            if option is None:
                return word
            if not option.is_flag and not option.count and "=" not in word and words:
                words.pop(0)
        elif isinstance(command, click.Group):
            if WORD.fullmatch(word) is None and not isinstance(command, GroupWithDefault):
                return None
            found = below(command, word)
            if found is None:
                return word
            command = found
    return None


def is_script(command: click.Command, word: str) -> bool:
    """Return whether *word* is a training script, which takes all that follows."""
    return isinstance(command, LaunchCommand) and not word.startswith("-") and not is_job_file(word)


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options of *command*; a group with a default command has those of it."""
    reached = command.commands["ls"] if isinstance(command, GroupWithDefault) else command
    options = [one for one in reached.get_params(click.Context(reached, **app.context_settings)) if isinstance(one, click.Option)]
    return {name: one for one in options for name in one.opts}


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("status JOB --events", None),
        ("statsu JOB", "statsu"),
        ("node hold gpu1", "hold"),
        ("node cordon gpu[1-4] --because x", "--because"),
        ("incidents gpt --json", None),
        ("incidents show 3 --jobs x", "--jobs"),
        ("admin notify add oncall - < address", None),
        ("{verb} JOB", None),
        ("run --nnodes 2 train.py --lr 3", None),
        ("run --nodes 2 train.py --lr 3", "--nodes"),
        ("run job.yaml --nodes 2", "--nodes"),
        ("--version", None),
        ("--verbose", "--verbose"),
    ],
)
def test_a_command_that_does_not_exist_is_found(words: str, wrong: str | None) -> None:
    """The check itself can fail."""
    assert wrong_in(words) == wrong


def test_every_command_that_a_text_names_exists() -> None:
    """With all its options."""
    seen, found = 0, []
    for file in files():
        for words in named(file.read_text(errors="replace"), lines=file.suffix not in {".py", ".j2", ".json"}):
            seen += 1
            if (wrong := wrong_in(words)) is not None:
                found.append(f"{file.relative_to(ROOT)}: `holdfast {words}`: {wrong}")
    assert not found, "\n".join(found)
    assert seen > 300
