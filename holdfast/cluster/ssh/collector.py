"""The collector that stays on a node, as seen from here."""

from __future__ import annotations

from holdfast.cluster.ssh.connection import Connection
from holdfast.cluster.ssh.remote_program import RemoteProgram
from holdfast.probe.readers.bundle import program


class RemoteCollector:
    """A resident collector on a node."""

    def __init__(self, connection: Connection, python: str, until: float) -> None:
        self._program = RemoteProgram(connection, python, program(entry="collector_daemon"), until, fruit="look")

    @property
    def lives(self) -> bool:
        """Tell whether it can be asked, as far as is known."""
        return self._program.lives

    def ask(self, node: str, seconds: float, until: float) -> str:
        """Return its look at *node*, as JSON, by *until* (monotonic); the look itself is to take *seconds* at most."""
        return self._program.ask(until, node=node, seconds=seconds)
