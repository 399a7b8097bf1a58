"""Bundle modules into one source text that any python3 can run."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast.source_tree import ROOT

BOOT: Final = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
"""The `-c` argument of an interpreter that reads a program from its input, after a line with its length; the rest is for the program."""
OLDEST: Final = (3, 10)
"""The Python that the dataclasses of readers and checks need."""
REFUSAL: Final = "its python3 is %d.%d; the readers need 3.10 or newer"
GUARD: Final = """import sys
if sys.version_info < {oldest!r}:
    sys.exit({refusal!r} % sys.version_info[:2])
exec(compile({text!r}, "<holdfast>", "exec"))
"""
"""Ends an interpreter that may not even parse what follows."""


def program(
    modules: Mapping[str, str],
    entry: str,
    arguments: Sequence[str] | None = None,
    *,
    oldest: tuple[int, int] = OLDEST,
    refusal: str = REFUSAL,
) -> str:
    """Return the source of a program that carries *modules* (name to source) and runs the one named *entry*, as `remote_main.start` does.

    An interpreter older than *oldest* exits with *refusal*, in which two `%d` take its version.
    """
    first = (Path(__file__).parent / "remote_main.py").read_text(encoding="utf-8")
    parts = [name.split(".") for name in modules]
    packages = {".".join(words[:end]): "" for words in parts for end in range(1, len(words))}  # they are empty on the node
    packed = base64.b64encode(zlib.compress(json.dumps({**packages, **modules}, sort_keys=True).encode(), 9)).decode()
    given = None if arguments is None else list(arguments)
    text = f"{first}\n\nstart({packed!r}, {entry!r}, {given!r})\n"
    return GUARD.format(oldest=oldest, refusal=refusal, text=text)


def source_of(module: str) -> str:
    """Return the source of a module of ours."""
    return (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
