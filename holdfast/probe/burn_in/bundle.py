"""The checks as one text that a node's python3 runs, as the readers travel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from holdfast.probe.readers.bundle import carrying, packed_text
from holdfast.source_tree import ROOT

NEEDED: Final = ("detectors.evidence", "detectors.codec", "detectors.burn_in_results", "holdfast.authenticated_listener")
CHECKS: Final = "holdfast.probe.burn_in.checks"


def program(nice: int) -> str:
    """Return the source of the program that carries out orders (`checks.program`), at a priority lower by *nice* than usual."""
    return carrying(_packed(), f"{CHECKS}.program", [str(nice)])


@cache
def _packed() -> str:
    return packed_text(sources())


def sources() -> dict[str, str]:
    """Return each module that the checks need with its source."""
    folder = Path(__file__).parent / "checks"
    checks = [f"{CHECKS}.{file.stem}" for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
    ours = {name: (ROOT / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8") for name in (*NEEDED, *checks)}
    return {**dict.fromkeys(("detectors", "holdfast", "holdfast.probe", "holdfast.probe.burn_in", CHECKS), ""), **ours}
