"""Find what jobs and tests left behind: processes, which carry variables of ours that name folders, and memory stores in memory."""

from __future__ import annotations

import os
import re
from pathlib import Path


def leftovers(base: Path) -> list[str]:
    """Return a line for each live process, this one aside, with a HOLDFAST_ variable that names *base* or a place below it."""
    sign = re.compile(rb"(?:^|\0)HOLDFAST_[A-Z_]+=(?:sqlite:///)?" + re.escape(os.fsencode(base)) + rb"(?:/|\0|$)")
    return [line for entry in Path("/proc").glob("[0-9]*") if int(entry.name) != os.getpid() and (line := _line(entry, sign))]


def _line(entry: Path, sign: re.Pattern[bytes]) -> str:
    """Return pid and command of the process at *entry* if its environment has *sign*; a zombie has none."""
    try:
        if not sign.search((entry / "environ").read_bytes()):
            return ""
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it ended while we looked, or is not ours to look at
        return ""
    return f"{entry.name} {command}"


def memstores(place: Path) -> list[str]:
    """Return a line for each memory store below *place*, with what is in it."""
    return [f"{found}: {', '.join(sorted(file.name for file in found.iterdir()))}" for found in sorted(place.glob("*/*")) if found.is_dir()]
