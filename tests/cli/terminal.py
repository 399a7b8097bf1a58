"""A pseudo-terminal with a program on it: what a user sees and types."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """Runs a command on a pseudo-terminal of a given size and keeps all it writes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, lines: int = 24) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            try:
                os.execvpe(command[0], [*command], {**environment, "TERM": "xterm-256color"})  # noqa: S606 (a pseudo-terminal needs a fork)
            finally:
                os._exit(127)
        self.resize(columns, lines)
        self._written = bytearray()
        self._status: int | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.status() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.hang_up()

    @property
    def raw(self) -> str:
        """Return all that was written."""
        return self._written.decode(errors="replace")

    @property
    def text(self) -> str:
        """Return all output, without control sequences of the terminal."""
        return ESCAPES.sub("", self.raw)

    def newest_frame(self) -> list[str]:
        """Return the lines of the newest complete picture."""
        frames = re.findall(r"╭─.*?╰─+╯", self.text, re.DOTALL)
        return [line.rstrip("\r") for line in frames[-1].split("\n")] if frames else []

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def echoes(self) -> bool:
        """Return whether typed keys show."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def type(self, keys: str) -> None:
        """Type *keys*."""
        os.write(self._master, keys.encode())

    def hang_up(self) -> None:
        """Take the terminal away."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def status(self) -> int | None:
        """Return the exit status (negative: the signal), or nothing while the program runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self._written += data
