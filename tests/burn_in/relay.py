"""A relay between two nodes that spoils what goes through it: the bad cable of these tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

Spoil = Callable[[bytes, int], bytes]
"""From what came and how many bytes came before it, to what goes on."""


def flip(at: int) -> Spoil:
    """Turn one bit of the byte number *at* over."""

    def spoil(data: bytes, before: int) -> bytes:
        place = at - before
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :] if 0 <= place < len(data) else data

    return spoil


def slow(per_second: float) -> Spoil:
    """Let so many bytes through a second."""

    def spoil(data: bytes, _before: int) -> bytes:
        time.sleep(len(data) / per_second)  # this is what a slow link is
        return data

    return spoil


def cut(at: int) -> Spoil:
    """Break off after so many bytes."""

    def spoil(data: bytes, before: int) -> bytes:
        if before + len(data) > at:
            raise OSError("cut")
        return data

    return spoil


@dataclass
class Relay:
    """Takes one connection after another, and carries each on to the port behind it, spoilt on its way there."""

    port: int
    spoil: Spoil = lambda data, _before: data
    at: int = 0
    """Port to listen on; 0: any that is free."""
    threads: list[threading.Thread] = field(default_factory=list)
    ends: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", self.at))
        self._begin(self._serve)

    @property
    def place(self) -> tuple[str, int]:
        """Return where to go instead."""
        return "127.0.0.1", self.server.getsockname()[1]

    def close(self) -> None:
        """End it; connections end with those who hold their ends."""
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for thread in self.threads:
            thread.join(60)
        for end in self.ends:
            end.close()

    def _begin(self, act: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=act, args=args, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self.server.accept()
                theirs = socket.create_connection(("127.0.0.1", self.port))
                self.ends += [ours, theirs]
                self._begin(self._carry, ours, theirs, self.spoil)
                self._begin(self._carry, theirs, ours, lambda data, _before: data)

    def _carry(self, source: socket.socket, target: socket.socket, spoil: Spoil) -> None:
        before = 0
        with suppress(OSError):
            while data := source.recv(1 << 14):
                target.sendall(spoil(data, before))
                before += len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
