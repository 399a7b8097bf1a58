"""The environments of Holdfast on this node, one for each version that was put there, and which of them speaks a given protocol.

The newest is the one that whoever comes is given. Jobs that began before it came go on in theirs: their flows say which protocol they
speak, and whoever answers of another one hands over to an environment that speaks it.

Standard library only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from holdfast.protocol import PROTOCOL

FOLDER: Final = "envs"
"""Where `holdfast nodes bootstrap` makes them, one beside the other."""
WHERE: Final = "lib/python*/site-packages/holdfast_node-*.dist-info"
SPOKEN: Final = "protocol.txt"
"""File of the wheel that says which protocol what is in it speaks."""
LAST: Final = "RECORD"
"""The file that is written when all others are there."""


def interpreter_for(spoken: int, own: Path) -> Path | None:
    """Return the interpreter of the newest environment beside *own* that speaks the protocol *spoken*, if *own* does not and one does."""
    if spoken == PROTOCOL or own.parent.name != FOLDER:
        return None
    found = [place for place in own.parent.iterdir() if place != own and _speaks(place, spoken)]
    return max(found, key=lambda place: place.stat().st_mtime) / "bin" / "python" if found else None


def _speaks(environment: Path, spoken: int) -> bool:
    """Tell whether *environment* is whole and speaks the protocol *spoken*."""
    for place in environment.glob(WHERE):
        try:
            if (place / LAST).exists() and (environment / "bin" / "python").exists() and int((place / SPOKEN).read_text()) == spoken:
                return True
        except (OSError, ValueError):
            continue
    return False
