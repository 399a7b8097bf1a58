"""Find what jobs and tests left behind: processes with HOLDFAST_ variables in their environment, and memory stores."""

from __future__ import annotations

import os
import re
from pathlib import Path


def leftovers(base: Path) -> list[str]:
    """Return a line for each other live process with a HOLDFAST_ variable whose value is *base* or a path below it."""
    sign = re.compile(rb"(?:^|\0)HOLDFAST_[A-Z_]+=(?:sqlite:///)?" + re.escape(os.fsencode(base)) + rb"(?:/|\0|$)")
    return [line for entry in Path("/proc").glob("[0-9]*") if int(entry.name) != os.getpid() and (line := _line(entry, sign))]


def _line(entry: Path, sign: re.Pattern[bytes]) -> str:
    """Return pid and command of the process at *entry* if its environment matches *sign*; a zombie has none."""
    try:
        if not sign.search((entry / "environ").read_bytes()):
            return ""
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it exited meanwhile, or belongs to another user
        return ""
    return f"{entry.name} {command}"


def memstores(place: Path) -> list[str]:
    """Return a line for each memory store below *place*, with its files."""
    return [f"{found}: {', '.join(sorted(file.name for file in found.iterdir()))}" for found in sorted(place.glob("*/*")) if found.is_dir()]
