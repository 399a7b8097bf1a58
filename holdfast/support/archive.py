"""The file that a bundle is: what is added to it loses its secrets, and what cannot be had is noted."""

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

from holdfast.report.wording import some
from holdfast.support.redactor import Redactor

TAIL: Final = 1024 * 1024
"""Bytes of the end of each log; of a journal as well."""
SHOWN: Final = 8
"""Names of parts that are missing for one reason."""


class Bundle:
    """A tar file in the making."""

    def __init__(self, tar: tarfile.TarFile, top: str, redactor: Redactor) -> None:
        self._tar, self._top, self._redactor = tar, top, redactor
        self._missing: dict[str, list[str]] = {}
        """Why parts are missing, and which."""

    @property
    def problems(self) -> list[str]:
        """Return what is missing, and why; what is missing for one reason together."""
        return [f"{some(names, SHOWN)}: {why}" for why, names in self._missing.items()]

    def part(self, name: str, make: Callable[[], Any]) -> None:
        """Add what *make* returns as JSON; or the reason why there is none."""
        try:
            self.add(f"{name}.json", json.dumps(self._redactor.value(make()), indent=1, default=str) + "\n")
        except Exception as error:  # noqa: BLE001 (a bundle is wanted most where much is broken)
            self.fail(name, error)

    def add(self, name: str, text: str, *, at: float | None = None) -> None:
        """Add a text, without its secrets. A name that leads elsewhere when the bundle is unpacked is not taken, whoever gave it."""
        if not _lies_inside(name):
            self.lacks(ascii(name[:100]), "its name leads out of the bundle")
            return
        data = self._redactor.text(text).encode("utf-8", "backslashreplace")
        entry = tarfile.TarInfo(f"{self._top}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), 0o600, int(at if at is not None else time.time())
        self._tar.addfile(entry, io.BytesIO(data))

    def fail(self, name: str, error: Exception) -> None:
        """Note that a part is missing."""
        why = getattr(error, "why", "") or (error.strerror if isinstance(error, OSError) else "") or str(error)
        self.lacks(name, f"{type(error).__name__}: {why}")

    def lacks(self, name: str, why: str) -> None:
        """Note that a part is missing, or some of it."""
        self._missing.setdefault(self._redactor.text(why), []).append(self._redactor.text(name))

    def tail(self, name: str, path: Path) -> None:
        """Add the end of a file."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(path, flags), "rb") as file:
                facts_of = os.fstat(file.fileno())
                if not stat.S_ISREG(facts_of.st_mode):
                    return
                file.seek(max(0, facts_of.st_size - TAIL))
                self.add(name, file.read(TAIL).decode(errors="replace"), at=facts_of.st_mtime)
        except OSError as error:
            self.fail(name, error)


def _lies_inside(name: str) -> bool:
    """Tell whether a part of that *name* comes to lie below the folder of its bundle."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)
