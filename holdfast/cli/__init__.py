"""The command line: `app` declares its commands, `main` runs them.

`commands/` has one module for each command, which is imported when it runs. What others need too (reports, accounting) is elsewhere.
"""

from __future__ import annotations

from holdfast.cli.entry import main
from holdfast.cli.parser import app

__all__ = ["app", "main"]
