"""Make Holdfast's packages `flows` and `tasks` importable next to those of a user's project with the same names."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from holdfast.source_tree import ROOT

NAMES: Final = ("flows", "tasks", "policies", "detectors")
"""Packages that lie next to `holdfast`, in site-packages or in a source tree."""


def share_names() -> None:
    """Let each of these packages contain both Holdfast's modules and the user's, whichever was found first.

    Of two modules with the same full name Holdfast's is imported. Raise ``ImportError`` if the user's was imported already.
    """
    for name in NAMES:
        package = import_module(name)
        others = [str(folder) for one in sys.path if (folder := Path(one or ".").resolve() / name).is_dir()]
        package.__path__ = list(dict.fromkeys((str(ROOT / name), *package.__path__, *others)))
    for name in NAMES:
        for file in (ROOT / name).glob("*.py"):
            module = sys.modules.get(f"{name}.{file.stem}")
            found = getattr(module, "__file__", None)
            if found is not None and Path(found).resolve() != file.resolve():
                raise ImportError(
                    f"{found} was imported as `{name}.{file.stem}`, which is also the name of a module of Holdfast; rename the file, "
                    "or import `holdfast.workflows` in a process that does not import it"
                )
