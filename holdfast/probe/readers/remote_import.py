"""The first lines of the program that a node without Holdfast runs: the modules that it carries become importable.

Its source is sent as text, so it may use nothing that Python 3.7 does not have, and no module of ours.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.util
import json
import sys
import types
import zlib

OLDEST = (3, 10)
"""What the readers' dataclasses need."""


class Carried(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Modules whose sources travelled with the program; every name that others lie below is a package."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Find a carried module."""
        return importlib.util.spec_from_loader(name, self) if name in self._sources else None

    def is_package(self, fullname: str) -> bool:
        """Say whether modules lie below *fullname*."""
        return any(other.startswith(fullname + ".") for other in self._sources)

    def get_source(self, fullname: str) -> str:
        """Return the source of a module."""
        return self._sources[fullname]

    def exec_module(self, module: types.ModuleType) -> None:
        """Run a module's source."""
        exec(compile(self._sources[module.__name__], "<" + module.__name__ + ">", "exec"), module.__dict__)  # noqa: S102 (our own)


def start(packed: str, entry: str, arguments: list[str]) -> None:
    """Unpack what is carried and run the module *entry*, or say why not."""
    if sys.version_info[:2] < OLDEST:
        print(json.dumps({"blind": "its python3 is %d.%d; the readers need 3.10 or newer" % sys.version_info[:2]}))  # noqa: T201, UP031
        return
    sources = json.loads(zlib.decompress(base64.b64decode(packed)))
    sys.meta_path.insert(0, Carried(sources))
    importlib.import_module(entry).main(arguments)
