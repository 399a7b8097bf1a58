"""The command line. `app` is its grammar, `main` the way in; what a command needs is loaded when it runs."""

from __future__ import annotations

from holdfast.cli.entry import main
from holdfast.cli.grammar import app

__all__ = ["app", "main"]
