"""The tar file of a bundle: everything added is redacted, and what is missing is recorded."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.report.text.wording import listing
from holdfast.support.redactor import Redactor

TAIL: Final = 1024 * 1024
"""Bytes of the end of each log or journal."""
SHOWN: Final = 8
"""Names shown of parts that are missing for the same reason."""


class Bundle:
    """A tar file that is being written."""

    def __init__(self, tar: tarfile.TarFile, top: str, redactor: Redactor) -> None:
        self._tar, self._top, self._redactor = tar, top, redactor
        self._missing: dict[str, list[str]] = {}
        """Reason to the missing parts."""

    @property
    def problems(self) -> list[str]:
        """Return the missing parts, grouped by reason."""
        return [f"{listing(names, SHOWN)}: {why}" for why, names in self._missing.items()]

    def part(self, name: str, make: Callable[[], Any]) -> None:
        """Add what *make* returns as JSON, or record why it failed."""
        try:
            self.add(f"{name}.json", json.dumps(self._redactor.value(make()), indent=1, default=str) + "\n")
        except Exception as error:  # noqa: BLE001 (a bundle is needed most when much is broken)
            self.record_failure(name, error)

    def add(self, name: str, text: str, *, at: float | None = None) -> None:
        """Add a redacted text, unless its *name* would be extracted outside the bundle."""
        if not _lies_inside(name):
            self.record_missing(ascii(name[:100]), "its name leads outside the bundle")
            return
        data = self._redactor.text(text).encode("utf-8", "backslashreplace")
        entry = tarfile.TarInfo(f"{self._top}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o600, int(at if at is not None else time.time())
        self._tar.addfile(entry, io.BytesIO(data))

    def record_failure(self, name: str, error: Exception) -> None:
        """Record that a part is missing because of an error."""
        why = getattr(error, "why", "") or (error.strerror if isinstance(error, OSError) else "") or str(error)
        self.record_missing(name, f"{type(error).__name__}: {why}")

    def record_missing(self, name: str, why: str) -> None:
        """Record that a part, or some of it, is missing."""
        self._missing.setdefault(self._redactor.text(why), []).append(self._redactor.text(name))

    def tail(self, name: str, path: Path) -> None:
        """Add the end of a file."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(path, flags), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    return
                file.seek(max(0, status.st_size - TAIL))
                self.add(name, file.read(TAIL).decode(errors="replace"), at=status.st_mtime)
        except OSError as error:
            self.record_failure(name, error)


def _lies_inside(name: str) -> bool:
    """Return whether a part of that *name* is extracted below the folder of its bundle."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)
