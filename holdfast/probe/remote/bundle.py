"""Modules of ours as one text that any python3 runs, over SSH or on the spot."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast.source_tree import ROOT

BOOT: Final = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
"""The command of an interpreter that takes a program, whose length comes first, from its input, and leaves it what follows."""
OLDEST: Final = (3, 10)
"""What the dataclasses of readers and checks need."""
REFUSAL: Final = "its python3 is %d.%d; the readers need 3.10 or newer"
GUARD: Final = """import sys
if sys.version_info < {oldest!r}:
    sys.exit({refusal!r} % sys.version_info[:2])
exec(compile({text!r}, "<holdfast>", "exec"))
"""
"""Refuses an interpreter that may not know even the grammar of what follows."""


def program(
    modules: Mapping[str, str],
    entry: str,
    arguments: Sequence[str] | None = None,
    *,
    oldest: tuple[int, int] = OLDEST,
    refusal: str = REFUSAL,
) -> str:
    """Return the source of a program that carries *modules* (name to source) and runs one of them, as `remote_main.start` does.

    An interpreter before *oldest* ends with *refusal*, of which its version is a part.
    """
    first = (Path(__file__).parent / "remote_main.py").read_text(encoding="utf-8")
    given = None if arguments is None else list(arguments)
    text = f"{first}\n\nstart({_packed(modules)!r}, {entry!r}, {given!r})\n"
    return GUARD.format(oldest=oldest, refusal=refusal, text=text)


def source_of(module: str) -> str:
    """Return the source of a module of ours."""
    return (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")


def _packed(modules: Mapping[str, str]) -> str:
    """Return sources as text that `remote_main.start` unpacks, the same in every process; the packages that they lie in are empty."""
    parts = [name.split(".") for name in modules]
    packages = {".".join(words[:end]): "" for words in parts for end in range(1, len(words))}
    return base64.b64encode(zlib.compress(json.dumps({**packages, **modules}, sort_keys=True).encode(), 9)).decode()
