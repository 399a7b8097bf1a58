"""The readers as a program: it looks at the node that it runs on once for each question, whose fields are those of `collect.look`.

To start an interpreter and to unpack the readers takes a node some tenths of a second of a core, and the way to it a login; a look itself
takes a fraction of that.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.probe.remote import bundle
from holdfast.probe.remote.bundle import source_of

EVIDENCE: Final = ("detectors.evidence", "detectors.gpu_readings", "detectors.codec", "detectors.readings")
"""What readers need beside each other."""
STAYS: Final = frozenset({"bundle", "local", "__init__"})
"""Modules of this package for who asks, not for who is asked."""
ENTRY: Final = "holdfast.probe.readers.collect"


@cache
def program() -> str:
    """Return the source of the program."""
    return bundle.program(sources(), ENTRY)


def sources() -> dict[str, str]:
    """Return each module that the readers need with its source.

    pynvml too, where it is installed here: it works with older drivers, while an older one of the node's own may lack what is asked.
    """
    readers = [f"holdfast.probe.readers.{file.stem}" for file in sorted(Path(__file__).parent.glob("*.py")) if file.stem not in STAYS]
    found = importlib.util.find_spec("pynvml")
    lent = {"pynvml": Path(found.origin).read_text(encoding="utf-8")} if found is not None and found.origin else {}
    return {**{name: source_of(name) for name in (*EVIDENCE, *readers)}, **lent}
