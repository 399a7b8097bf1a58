"""Have Holdfast's packages `flows` and `tasks` found beside those of a user's project, which often has packages of the same names."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from holdfast.source_tree import ROOT

NAMES: Final = ("flows", "tasks", "policies", "detectors")
"""Where these packages lie beside `holdfast`: site-packages, or a source tree."""


def share_names() -> None:
    """Let a package of one of these names hold Holdfast's modules and the user's, whichever of both was found first.

    Of two modules with the same full name ours is imported. Raise ``ImportError`` when the user's already was.
    """
    for name in NAMES:
        package = import_module(name)
        beside = [found for one in sys.path if (found := _folder(one, name)) is not None]
        package.__path__ = list(dict.fromkeys((str(ROOT / name), *package.__path__, *beside)))
    _refuse_doubles()


def _folder(entry: str, name: str) -> str | None:
    """Return the folder *name* below an entry of ``sys.path``, if there is one."""
    folder = Path(entry or ".").resolve() / name
    return str(folder) if folder.is_dir() else None


def _refuse_doubles() -> None:
    """Raise ``ImportError`` when a name that we are about to import is taken by another file."""
    for name in NAMES:
        for file in (ROOT / name).glob("*.py"):
            module = sys.modules.get(f"{name}.{file.stem}")
            found = getattr(module, "__file__", None)
            if found is not None and Path(found).resolve() != file.resolve():
                raise ImportError(
                    f"{found} was imported as `{name}.{file.stem}`, which is also the name of a module of Holdfast; rename the file, "
                    "or import `holdfast.workflows` in a process that does not import it"
                )
