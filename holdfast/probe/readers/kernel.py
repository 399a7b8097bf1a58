"""Read the kernel's log record by record, from `/dev/kmsg`.

Format: https://docs.kernel.org/admin-guide/abi-testing-files.html#abi-file-testing-dev-kmsg
"""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Final

from holdfast.detectors.nodes.readings import KernelLine, KernelReading

KMSG: Final = Path("dev/kmsg")
ELSEWHERE: Final = "HOLDFAST_KERNEL_LOG"
"""Variable with another path of the kernel's log: a mount of the host's, or a file that a syslog daemon writes."""
RECORD: Final = 16384
"""Bytes that hold any record (the kernel's limit is 8 KiB)."""
LEVELS: Final = 7
"""Bits of a record's first number that are its level; those above are the facility."""
WARNING: Final = 4
NEWEST: Final = 200
"""Lines of one reading: enough to show a fault, and few enough to send."""


class KernelLog:
    """The kernel's log, followed. `select` waits for its file number; reading never waits.

    With *plain*, lines without a record's head count too, as a syslog daemon writes them: as warnings without number or time.
    """

    def __init__(self, path: Path = Path("/") / KMSG, *, from_end: bool = True, plain: bool = False) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest, self._plain = b"", plain
        self.lost = 0
        """Records that were overwritten before they were read, at least."""
        if from_end:
            try:
                os.lseek(self._file, 0, os.SEEK_END)
            except OSError as error:
                if error.errno != errno.ESPIPE:  # a FIFO has no old records
                    raise

    def fileno(self) -> int:
        """Return the file number to wait for."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self) -> list[KernelLine]:
        """Return the records since the last call."""
        lines: list[KernelLine] = []
        while True:
            try:
                data = os.read(self._file, RECORD)
            except BlockingIOError:
                return lines
            except BrokenPipeError:  # the next record was overwritten; the next read returns the oldest that exists
                self.lost += 1
                continue
            if not data:
                return lines
            *complete, self._rest = (self._rest + data).split(b"\n")
            lines += [line for raw in complete if (line := parsed(raw) or self._without_head(raw)) is not None]

    def _without_head(self, raw: bytes) -> KernelLine | None:
        if not self._plain or not raw.strip() or raw.startswith(b" "):
            return None
        return KernelLine(sequence=-1, microseconds=0, level=WARNING, text=raw.decode(errors="replace").strip())


def parsed(raw: bytes) -> KernelLine | None:
    r"""Return the record in a line such as `6,1234,5678,-;text`; None for a continuation line and for other text."""
    head, semicolon, text = raw.decode(errors="replace").partition(";")
    numbers = head.split(",")
    if not semicolon or head.startswith(" ") or len(numbers) < 3 or not all(number.isdigit() for number in numbers[:3]):  # noqa: PLR2004
        return None
    facility_and_level, sequence, microseconds = map(int, numbers[:3])
    return KernelLine(sequence=sequence, microseconds=microseconds, level=facility_and_level & LEVELS, text=text)


def read_kernel(root: Path = Path("/")) -> KernelReading:
    """Return the newest warnings and errors in the log; raise ``OSError`` where it cannot be read."""
    elsewhere = os.environ.get(ELSEWHERE) if root == Path("/") else None
    with closing(KernelLog(Path(elsewhere) if elsewhere else root / KMSG, from_end=False, plain=elsewhere is not None)) as log:
        newest = deque((line for line in log.read() if line.level <= WARNING), maxlen=NEWEST)
        return KernelReading(lines=tuple(newest), lost=log.lost)
