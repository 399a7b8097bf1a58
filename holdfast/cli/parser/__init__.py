"""The commands, their arguments and their help: one module for each heading of `holdfast --help`.

What a command does is in `holdfast.cli.commands` and imported when it runs: `--help` imports click alone.
"""

from __future__ import annotations

from holdfast.cli.parser import analyse, checkpoints, nodes, run, setup, watch
from holdfast.cli.parser.base import HEADINGS, Group, OutputClosed, app

__all__ = ["HEADINGS", "Group", "OutputClosed", "analyse", "app", "checkpoints", "nodes", "run", "setup", "watch"]
