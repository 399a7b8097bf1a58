"""The error that a script's ``torch.distributed.elastic.multiprocessing.errors.record`` leaves for its launcher, as torchrun reads it.

Standard library only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

NAME: Final = "TORCHELASTIC_ERROR_FILE"
FOLDER: Final = "errors"
MOST: Final = 1 << 20
"""Bytes of such a file that are read: one that is larger is no error of one script."""
TEXT: Final = 16 * 1024
"""Characters of a traceback that travel on: its end."""
_ERROR: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)


def place(folder: Path, ticket: int) -> Path:
    """Return where the process of that *ticket* is to leave its error, below the agent's own *folder*; what is there is removed."""
    path = folder / FOLDER / f"{ticket}.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def take(path: Path) -> dict[str, Any] | None:
    """Return the error at *path* as a worker reports one itself, and remove the file; None where there is none that can be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST + 1)
        path.unlink(missing_ok=True)
        told = json.loads(data)["message"] if len(data) <= MOST else None
        if isinstance(told, str):
            return _raised(told, "")
        return _raised(str(told["message"]), str(told["extraInfo"]["py_callstack"])) if isinstance(told, dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _raised(words: str, traceback: str) -> dict[str, Any] | None:
    found = _ERROR.fullmatch(words)
    if found is None:
        return None
    return {"type": found["type"], "message": (found["message"] or "")[:TEXT], "traceback": traceback[-TEXT:], "step": None}
