"""The table of exit codes: complete, and about commands that exist."""

from __future__ import annotations

import click

from holdfast import exit_codes
from holdfast.cli import app
from holdfast.exit_codes import CODES


def test_every_exit_code_of_the_module_is_in_the_table() -> None:
    """Ascending, and each meaning once."""
    numbers = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {one.code for one in CODES} == numbers
    assert [one.code for one in CODES] == sorted(one.code for one in CODES)
    for command in {name for one in CODES for name in one.commands.split(", ")}:
        codes = [one.code for one in CODES if command in one.commands.split(", ")]
        assert len(codes) == len(set(codes)), command


def test_the_table_names_commands_and_options_that_exist() -> None:
    """`all`, or the words that call one."""
    for words in {name for one in CODES for name in one.commands.split(", ")} - {"all"}:
        command: click.Command = app
        options = [word for word in words.split() if word.startswith("-")]
        for word in words.split():
            if isinstance(command, click.Group):
                command = command.commands[word]
        assert {name for one in command.params for name in one.opts} >= set(options)
