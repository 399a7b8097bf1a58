"""A file that is read anew when it changes while a job runs: by a thread, as no recovery may wait for a file server that is away."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

from holdfast.errors import BadFile

EVERY: Final = 1.0
"""Seconds between two looks at the file."""
MOMENT: Final = 0.05
"""Seconds that a decision waits for a look at most: a local file takes a millisecond."""

T = TypeVar("T")


class FileChange:
    """Words that one thread leaves and another takes."""

    def __init__(self) -> None:
        self._words: deque[str] = deque()

    def append(self, words: str) -> None:
        """Leave *words* for who takes them next."""
        self._words.append(words)

    def take(self) -> list[str]:
        """Return what was left since the last time."""
        told = []
        with suppress(IndexError):
            while True:
                told.append(self._words.popleft())
        return told


class FileWatcher(Generic[T]):
    """Hands on what a file says each time it changes, and once each what is wrong with it."""

    def __init__(
        self, file: Path, read: Callable[[Path], T], accept: Callable[[T, bool], None], refuse: Callable[[str], None], *, name: str
    ) -> None:
        """*accept* also learns whether the file could not be used before; *refuse* is told what is wrong, in one line."""
        self.file, self._read, self._accept, self._refuse = file, read, accept, refuse
        self.refused = ""
        """What was told of a file that cannot be used."""
        self._seen: tuple[int, ...] = ()
        self._over, self._kick, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def begin(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._kick.set()

    def check_now(self) -> None:
        """Have the file looked at before a decision; one that cannot be read within a moment changes nothing."""
        if self._thread.is_alive():
            self._looked.clear()
            self._kick.set()
            self._looked.wait(MOMENT)

    def _follow(self) -> None:
        doubtful = False
        while not self._over.is_set():
            self._kick.wait(EVERY)
            self._kick.clear()
            doubtful = self._look(doubtful=doubtful)
            self._looked.set()

    def _look(self, *, doubtful: bool) -> bool:
        """Take what the file says now; tell whether it cannot be used, for the first time: perhaps somebody is still writing it."""
        mark = _mark(self.file)
        if mark == self._seen and not doubtful:
            return False
        try:
            value = self._read(self.file)
        except BadFile as error:
            first = not doubtful or mark != self._seen
            self._seen = mark
            if not first and str(error) != self.refused:
                self.refused = str(error)
                self._refuse(in_a_line(self.refused))
            return first
        self._seen = mark
        before, self.refused = bool(self.refused), ""
        self._accept(value, before)
        return False


def in_a_line(problems: str) -> str:
    """Return what a `BadFile` says in one line."""
    first, *more = problems.splitlines()
    return f"{first}: " + "; ".join(line.strip() for line in more)


def _mark(file: Path) -> tuple[int, ...]:
    """Return what changes with the content of *file*; nothing where there is none."""
    try:
        found = os.stat(file)  # noqa: PTH116 (no difference, and no second object)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
