"""The agent's end of the worker protocol: a real socket that records the messages of workers and sends given answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.protocol import LineBuffer, Message, encode, listen
from tests.waiting import wait_until


class AgentDouble:
    """Listens at *path*; every message is kept in the order in which it came, per connection."""

    def __init__(self, path: Path, *, leave: bool = True, reading: bool = True) -> None:
        self.path, self.leave = path, leave
        self.silent = False
        """Whether questions stay unanswered."""
        self.interval: int | None = None
        """Steps between checkpoints that go with the leave to commit."""
        self.with_answers: Message | None = None
        """A command that is sent at once with each answer, before it."""
        self.received: list[Message] = []
        self._connections: list[socket.socket] = []
        self._reading = threading.Event()
        if reading:
            self._reading.set()
        self._server = listen(path)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make a worker find this agent."""
        return {"HOLDFAST_SOCKET": str(self.path), "HOLDFAST_GENERATION": "1"}

    def of(self, kind: str) -> list[Message]:
        """Return all messages of one kind."""
        return [message for message in list(self.received) if message["t"] == kind]

    def wait_for(self, kind: str, count: int = 1, **fields: Any) -> list[Message]:
        """Wait until *count* messages of *kind* with these *fields* have come."""

        def found() -> list[Message]:
            return [message for message in self.of(kind) if fields.items() <= message.items()]

        wait_until(lambda: len(found()) >= count, seconds=60, explain=lambda: f"received: {self.received[-20:]}")
        return found()

    def send(self, command: Message) -> None:
        """Send *command* to every worker."""
        for connection in self._connections:
            connection.sendall(encode(command))

    def read_on(self) -> None:
        """Begin to read, after having been made not to."""
        self._reading.set()

    def vanish(self) -> None:
        """Close the socket and all connections."""
        self.path.unlink(missing_ok=True)
        for line in (self._server, *self._connections):
            with suppress(OSError):  # the worker may have hung up already
                line.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that waits for it
            line.close()

    close = vanish

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        lines = LineBuffer()
        self._reading.wait()
        try:
            while data := connection.recv(65536):
                for message in lines.feed(data):
                    self.received.append(message)
                    if message["t"] == "commit-request" and not self.silent:
                        why = "this generation is the current one" if self.leave else "generation 2 is the current one"
                        answer = encode({"re": message["id"], "ok": self.leave, "why": why, "every": self.interval})
                        connection.sendall((encode(self.with_answers) if self.with_answers else b"") + answer)
        except OSError:
            return
