"""The first lines of every program that runs on a node without Holdfast: make the carried modules importable, and let one answer.

Its source is sent as text, so it may use only what Python 3.7 has, and no module of ours.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.util
import json
import signal
import sys
import types
import zlib
from typing import Any, Callable  # noqa: UP035 (what Python 3.7 has)

IDLE_SECONDS = 900
"""Time without a question after which the program ends: the connection of a machine that lost power is never closed."""


class CarriedModules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the modules that are part of the program; a name that is the prefix of another is a package."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Find a carried module."""
        return importlib.util.spec_from_loader(name, self) if name in self._sources else None

    def is_package(self, fullname: str) -> bool:
        """Return whether a module's name begins with *fullname* and a dot."""
        return any(other.startswith(fullname + ".") for other in self._sources)

    def get_source(self, fullname: str) -> str:
        """Return the source of a module."""
        return self._sources[fullname]

    def exec_module(self, module: types.ModuleType) -> None:
        """Run a module's source."""
        exec(compile(self._sources[module.__name__], "<" + module.__name__ + ">", "exec"), module.__dict__)  # noqa: S102 (our own)


def start(packed: str, entry: str, arguments: list[str] | None) -> None:
    """Unpack the modules; call `main` of the module *entry* with *arguments*, or without any answer each question by its `answer`."""
    sources = json.loads(zlib.decompress(base64.b64decode(packed)))
    sys.meta_path.insert(0, CarriedModules(sources))
    module = importlib.import_module(entry)
    if arguments is None:
        serve(module.answer)
    else:
        module.main(arguments)


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Answer questions until the input ends: each is a line of JSON, and the line of its answer begins with the question's `mark`.

    Whatever hangs, the alarm ends this process. An *answer* with its own deadline may set it anew.
    """
    while True:
        signal.alarm(IDLE_SECONDS)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        asked = json.loads(line.decode())
        sys.stdout.write(f"{asked['mark']} {json.dumps(answer(asked))}\n")
        sys.stdout.flush()
