"""A transport to real node proxies, which are children of the tests: it can be cut, stopped and closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cluster.remote import RemoteCluster
from holdfast.errors import NodeLost

ROOT = Path(__file__).parents[2]


class Boxes(RemoteCluster):
    """The settings of a cluster of nodes that are children of the tests."""

    def __init__(self, directory: str, *, interface: str | None = None, names: Sequence[str] = ("box-0", "box-1")) -> None:
        super().__init__("boxes", directory, interface, names=list(names))


class ChildPipe:
    """The standard input and output of a proxy that is our child."""

    def __init__(self, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self._in, self._out = self.child.stdin, self.child.stdout

    def recv(self, size: int) -> bytes:
        """Return output of the proxy."""
        return os.read(self._out.fileno(), size)

    def sendall(self, data: bytes) -> None:
        """Send *data* to the proxy."""
        self._in.write(data)
        self._in.flush()

    def close(self) -> None:
        """End the proxy, as sshd does when the connection ends."""
        self.child.kill()

    def ended(self) -> str:
        """Return nothing: the proxy gives the reason."""
        return ""

    def reap(self) -> None:
        """Wait for its end."""
        self.child.kill()
        self.child.wait()
        for end in (self._in, self._out):
            with suppress(OSError):
                end.close()


@dataclass
class ChildTransport:
    """Starts proxies on this machine."""

    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "holdfast.agent.node.proxy"])
    pipes: list[ChildPipe] = field(default_factory=list)
    down: bool = False
    """Nobody answers."""

    def open(self, node: str, until: float, then: float) -> ChildPipe:
        """Start a proxy."""
        if self.down:
            raise NodeLost(node, "no route to host")
        self.pipes.append(ChildPipe(self.command))
        return self.pipes[-1]

    def address(self, node: str) -> str:
        """Return the loopback address."""
        return "127.0.0.1"

    def close(self) -> None:
        """There is nothing to close."""

    def cut(self) -> None:
        """End all connections, as a switch that is switched off."""
        self.down = True
        for pipe in self.pipes:
            pipe.close()

    def stall(self) -> None:
        """Let nothing pass any more, without closing a connection."""
        self.down = True
        for pipe in self.pipes:
            if pipe.child.poll() is None:
                pipe.child.send_signal(signal.SIGSTOP)

    def reap(self) -> None:
        """Wait for the end of all proxies."""
        for pipe in self.pipes:
            pipe.reap()
