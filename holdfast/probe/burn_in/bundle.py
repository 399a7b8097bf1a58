"""The checks as a program that a node's python3 runs, as the readers are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from holdfast.probe.remote import bundle
from holdfast.probe.remote.bundle import source_of

NEEDED: Final = ("detectors.evidence", "detectors.codec", "detectors.burn_in_results", "holdfast.authenticated_listener")
CHECKS: Final = "holdfast.probe.burn_in.checks"


@cache
def program(nice: int) -> str:
    """Return the source of the program that carries out orders (`checks.program`), at a priority lower by *nice* than usual."""
    checks = [f"{CHECKS}.{file.stem}" for file in sorted((Path(__file__).parent / "checks").glob("*.py")) if file.stem != "__init__"]
    return bundle.program({name: source_of(name) for name in (*NEEDED, *checks)}, f"{CHECKS}.program", [str(nice)])
