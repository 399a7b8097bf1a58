"""How a worker's process comes to be: forked from the warm starter, or started cold.

The warm starter is an interpreter that has imported torch and waits. A fork of it is a worker in some 20 ms instead of seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from holdfast.agent.connection import MessageStream
from holdfast.process import die_with_parent, kill, reset_signals
from holdfast.source_tree import ROOT

PROGRAM: Final = ROOT / "holdfast" / "runtime" / "process" / "fork_server_main.py"
"""Run as a file, so that it needs no Holdfast installed beside the job's own interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run for one rank, or for one standby."""

    argv: tuple[str, ...]
    """Whole command when cold; script and its arguments when warm."""
    environment: dict[str, str]
    directory: str
    log: Path
    cold: bool = True
    """It may be started cold where no starter can be had."""


def start_cold(launch: Launch) -> int:
    """Start a worker as an ordinary child that dies with this process; return its pid. Raise ``OSError`` when it cannot be."""
    with launch.log.open("ab") as log:
        return spawn(launch.argv, log, env=launch.environment, cwd=launch.directory, start_new_session=True)


def spawn(argv: tuple[str, ...], log: IO[bytes], **how: Any) -> int:  # noqa: ANN401 (what Popen takes)
    """Start a child that dies with this process; return its pid. Raise ``OSError`` when it cannot be."""
    parent = os.getpid()

    def as_ours() -> None:
        reset_signals()
        die_with_parent(parent)

    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=as_ours, **how)  # noqa: PLW1509 (one thread)
    except subprocess.SubprocessError as error:
        raise OSError(f"the process could not be set up: {error}") from error
    child.returncode = 0  # reaped by the agent's own loop, so that Popen never waits for it
    return child.pid


class ForkServer(MessageStream):
    """The agent's end of a warm starter: what it says is read as messages, a launch is one to it."""

    def __init__(self, *, python: str, environment: dict[str, str], preload: tuple[str, ...], log: Path) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.ready = False
        self.asked = 0.0
        """When it was last asked for something, or last answered (monotonic)."""
        self._buried = False
        try:
            with theirs, log.open("ab") as output:
                argv = (python, str(PROGRAM), str(theirs.fileno()), *preload)
                self.pid = spawn(argv, output, env=environment, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise

    def ask(self, ticket: int, launch: Launch) -> bool:
        """Ask for a process, whose pid comes back as a message with its ticket; False when the starter is gone."""
        self.asked = time.monotonic()
        facts = {"argv": launch.argv, "environment": launch.environment, "directory": launch.directory, "log": str(launch.log)}
        return self.send({"rank": ticket, "agent": os.getpid(), **facts})

    def hang_up(self) -> None:
        """Let nothing more be said: what has been said can still be read, and then the end."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def bury(self) -> None:
        """Learn that its process has ended: its pid may be another's from now on."""
        self._buried = True

    def close(self) -> None:
        """End the starter."""
        self.socket.close()
        if not self._buried:
            kill(self.pid, signal.SIGKILL)
