"""`holdfast admin completion`: print the script by which a shell completes `holdfast` commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from holdfast.cli.parser.base import app

PROGRAM = "holdfast"
VARIABLE = "_HOLDFAST_COMPLETE"
"""Environment variable by which the script requests completions; click derives the same name from the program's."""


def completion(shell: str) -> int:
    """Print the completion script of *shell*."""
    found = get_completion_class(shell)
    assert found is not None, "click knows the shells that the parser accepts"
    click.echo(found(app, {}, PROGRAM, VARIABLE).source())
    return 0
