"""How a worker's process comes to be: forked from the warm starter, or started cold.

The warm starter is an interpreter that has imported torch and waits. A fork of it is a worker in some 20 ms instead of seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from holdfast.process import die_with_parent
from holdfast.wire import LineBuffer, Message, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run for one rank."""

    rank: int
    argv: tuple[str, ...]
    """Whole command when cold; script and its arguments when warm."""
    environment: dict[str, str]
    directory: str
    log: str


def start_cold(launch: Launch) -> int:
    """Start a worker as an ordinary child that dies with this process; return its pid. Raise ``OSError`` when it cannot be."""
    parent = os.getpid()
    with open(launch.log, "ab") as log:
        child = subprocess.Popen(
            launch.argv,
            env=launch.environment,
            cwd=launch.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (the agent has one thread)
        )
    child.returncode = 0  # reaped by the agent's own loop, so that Popen never waits for it
    return child.pid


class WarmStarter:
    """The agent's end of a warm starter."""

    def __init__(self, *, python: str, environment: dict[str, str], preload: list[str], log: IO[bytes]) -> None:
        ours, theirs = socket.socketpair()
        self.python, self.preload = python, preload
        parent = os.getpid()
        child = subprocess.Popen(
            [python, "-m", "holdfast.runtime.warm", str(theirs.fileno()), *preload],
            env=_importable(environment),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (the agent has one thread)
        )
        child.returncode = 0
        theirs.close()
        ours.setblocking(False)
        self.pid, self.socket = child.pid, ours
        self._lines = LineBuffer()
        self.ready = False

    def send(self, launch: Launch) -> None:
        """Ask for a worker; its pid comes back as a message."""
        self.socket.setblocking(True)
        try:
            self.socket.sendall(
                encode(
                    {
                        "rank": launch.rank,
                        "argv": launch.argv,
                        "environment": launch.environment,
                        "directory": launch.directory,
                        "log": launch.log,
                        "agent": os.getpid(),
                    }
                )
            )
        finally:
            self.socket.setblocking(False)

    def read(self) -> list[Message] | None:
        """Return the messages that have arrived, or None when the starter is gone."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._lines.feed(data)) if data else None

    def close(self) -> None:
        """End the starter."""
        self.socket.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _importable(environment: dict[str, str]) -> dict[str, str]:
    """Return *environment* with this very Holdfast importable, wherever it lies."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def default_python() -> str:
    """Return the interpreter that runs this agent."""
    return sys.executable
