"""The readers as one text that any `python3 -I -` runs: for nodes that have no Holdfast, over SSH or on the spot."""

from __future__ import annotations

import base64
import importlib.util
import json
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.source_tree import ROOT

OPTIONS: Final = ("-I", "-")
"""How an interpreter is called that gets the program as its input: neither its folder nor its environment has a say in what is imported."""
BOOT: Final = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
"""The command of an interpreter that takes a program, whose length comes first, from its input, and leaves it what follows."""
EVIDENCE: Final = ("detectors.evidence", "detectors.gpu_readings", "detectors.codec", "detectors.readings")
"""What readers need beside each other."""
STAYS: Final = frozenset({"bundle", "local", "remote_import"})
"""Modules of this package for who asks, not for who is asked."""


def program(arguments: Iterable[str] = (), *, entry: str = "collect") -> str:
    """Return the source of a program that prints a look at the node it runs on, with *arguments* as `collect.main` takes them.

    With *entry* `collector_daemon` it prints one whenever it is asked for one.
    """
    return carrying(_packed(), f"holdfast.probe.readers.{entry}", arguments)


def carrying(packed: str, entry: str, arguments: Iterable[str] = ()) -> str:
    """Return the source of a program that runs `main` of the module *entry* with the *packed* sources around it."""
    importer = (Path(__file__).parent / "remote_import.py").read_text(encoding="utf-8")
    return f"{importer}\n\nstart({packed!r}, {entry!r}, {list(arguments)!r})\n"


@cache
def _packed() -> str:
    return packed_text(sources())


def packed_text(modules: Mapping[str, str]) -> str:
    """Return sources as text that `remote_import.start` unpacks, the same in every process."""
    return base64.b64encode(zlib.compress(json.dumps(dict(modules), sort_keys=True).encode(), 9)).decode()


def sources() -> dict[str, str]:
    """Return each module that the readers need with its source.

    pynvml too, where it is installed here: it works with older drivers, while an older one of the node's own may lack what is asked.
    """
    readers = [
        f"holdfast.probe.readers.{file.stem}"
        for file in sorted(Path(__file__).parent.glob("*.py"))
        if file.stem not in STAYS | {"__init__"}
    ]
    ours = {name: (ROOT / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8") for name in (*EVIDENCE, *readers)}
    packages = dict.fromkeys(("detectors", "holdfast", "holdfast.probe", "holdfast.probe.readers"), "")
    found = importlib.util.find_spec("pynvml")
    lent = {"pynvml": Path(found.origin).read_text(encoding="utf-8")} if found is not None and found.origin else {}
    return {**packages, **ours, **lent}
