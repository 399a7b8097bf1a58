"""The versions of torch that Holdfast is tested with: `make matrix` runs them, and docs/reference/torch-versions.md has the results."""

from __future__ import annotations

import re
from typing import Final

FIRST: Final = (2, 11)
LAST: Final = (2, 15)
TESTED: Final = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def untested(version: str) -> str:
    """Return in one sentence that torch *version* is not among the tested ones; empty where it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and FIRST <= (int(found[1]), int(found[2])) <= LAST:
        return ""
    return f"torch {version} is untested: Holdfast is tested with torch {TESTED}"
