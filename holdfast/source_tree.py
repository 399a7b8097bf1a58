"""Locate this Holdfast, and build the PYTHONPATH with which another interpreter imports it. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""The folder with the packages: the top of a source tree, or site-packages."""


def python_path_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable PYTHONPATH: that of *environment* with this Holdfast first."""
    paths = (str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep))
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}


def source_tree_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH that a process needs to import this Holdfast; no variable if it is installed."""
    return python_path_env(environment) if (ROOT / "pyproject.toml").exists() else {}
