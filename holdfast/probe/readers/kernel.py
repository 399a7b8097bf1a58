"""The kernel's log, record by record, as `/dev/kmsg` gives it.

Its form: https://docs.kernel.org/admin-guide/abi-testing-files.html#abi-file-testing-dev-kmsg
"""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Final

from detectors.readings import KernelLine, KernelReading

KMSG: Final = Path("dev/kmsg")
ELSEWHERE: Final = "HOLDFAST_KERNEL_LOG"
"""Variable with the place of the kernel's log where that is not it: a mount of the host's, or a file that a syslog daemon writes."""
RECORD: Final = 16384
"""Bytes that hold any record (the kernel's own limit is 8 KiB), and some lines of what a test puts in its place."""
LEVELS: Final = 7
"""Bits of a record's first number that are its level; those above are the facility."""
WARNING: Final = 4
NEWEST: Final = 200
"""Lines of one look: enough for the story of a fault, little enough to send."""


class KernelLog:
    """The kernel's log, followed. To be waited for with `select` by its file number; reading it never waits.

    *plain* takes lines without a record's head too, as a syslog daemon writes them to a file: as warnings without number or time.
    """

    def __init__(self, path: Path = Path("/") / KMSG, *, from_end: bool = True, plain: bool = False) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest, self._plain = b"", plain
        self.lost = 0
        """Records that were overwritten before they were read, at least."""
        if from_end:
            self._skip()

    def fileno(self) -> int:
        """Return the file to wait for."""
        return self._file

    def close(self) -> None:
        """Follow no longer."""
        os.close(self._file)

    def read(self) -> list[KernelLine]:
        """Return the records that have come since the last time."""
        lines: list[KernelLine] = []
        while (some := self._some()) is not None:
            lines += some
        return lines

    def _skip(self) -> None:
        try:
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ESPIPE:  # a FIFO has no old records
                raise

    def _some(self) -> list[KernelLine] | None:
        """Return what one reading gives: one record of the kernel's; None when there is no more."""
        try:
            data = os.read(self._file, RECORD)
        except BlockingIOError:
            return None
        except BrokenPipeError:  # the kernel's word for: the next record is no longer there; the next reading gives the oldest that is
            self.lost += 1
            return []
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line for raw in whole if (line := parsed(raw) or self._without_head(raw)) is not None]

    def _without_head(self, raw: bytes) -> KernelLine | None:
        if not self._plain or not raw.strip() or raw.startswith(b" "):
            return None
        return KernelLine(sequence=-1, microseconds=0, level=WARNING, text=raw.decode(errors="replace").strip())


def parsed(raw: bytes) -> KernelLine | None:
    r"""Return the record that a line like `6,1234,5678,-;text` is; None for what belongs to the line above, and what is none."""
    head, semicolon, text = raw.decode(errors="replace").partition(";")
    numbers = head.split(",")
    if not semicolon or head.startswith(" ") or len(numbers) < 3 or not all(number.isdigit() for number in numbers[:3]):  # noqa: PLR2004
        return None
    facility_and_level, sequence, microseconds = map(int, numbers[:3])
    return KernelLine(sequence=sequence, microseconds=microseconds, level=facility_and_level & LEVELS, text=text)


def read_kernel(root: Path = Path("/")) -> KernelReading:
    """Return the newest warnings and errors that the log still has; raise `OSError` where it cannot be read."""
    elsewhere = os.environ.get(ELSEWHERE) if root == Path("/") else None
    with closing(KernelLog(Path(elsewhere) if elsewhere else root / KMSG, from_end=False, plain=elsewhere is not None)) as log:
        newest = deque((line for line in log.read() if line.level <= WARNING), maxlen=NEWEST)
        return KernelReading(lines=tuple(newest), lost=log.lost)
