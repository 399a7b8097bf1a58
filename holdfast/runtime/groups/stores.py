"""How a process reaches the store of a generation: hosts it, connects to it, or keeps the connection that it has.

A connection answers one question at a time, and some questions wait for another rank: whoever may have to wait beside others has a
connection of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from holdfast.runtime.groups.inner import BUILD_SECONDS, Abandoned, at_work, in_thread

if TYPE_CHECKING:
    from holdfast.runtime.groups.assembly import Generation

PATIENCE: Final = 0.002
"""Seconds between two looks at something that another rank is about to do."""

Place = tuple[str, int, int, int]
"""Where a store is, the rank that hosts it, and the generation in which that process took the rank."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The store of one generation, as this process reaches it."""

    root: dist.Store
    place: Place
    number: int
    host: str
    """This process's own address, as others reach it."""

    def shelf(self, name: str) -> dist.Store:
        """Return a part of the store for one purpose in this generation."""
        return dist.PrefixStore(f"generation-{self.number}/{name}", self.root)

    def find(self, rank: int, incarnation: int) -> tuple[str, int] | None:
        """Return where the desk of *rank* is, once that process has told."""
        name = f"desk/{rank}/{incarnation}"
        if not self.root.check([name]):
            return None
        host, port = self.root.get(name).decode().split()
        return host, int(port)


class Stores:
    """This process's connections to stores."""

    def __init__(self, desk: int) -> None:
        """*desk*: the port at which this process's desk listens."""
        self._desk = desk
        self._kept: Reached | None = None
        self._servers: dict[int, dist.TCPStore] = {}

    def reach(self, generation: Generation, gave_up: Callable[[], bool], *, leaving: bool = False, beside: bool = False) -> Reached:
        """Reach the store of *generation*, or host it; leave there where this rank's desk is.

        A connection to the same store is kept, so that those who only hear of a change have little to do; not while something still
        waits in it.

        Args:
            generation: what to come into.
            gave_up: tells whether *generation* has been given up meanwhile: then `Abandoned` is raised.
            leaving: another process takes this rank, so that the desk is not this one.
            beside: others use the present connection meanwhile.
        """
        host, port = generation.store
        place = (host, port, generation.serve, generation.incarnations[generation.serve])
        kept, alone = self._kept, not beside and not at_work()
        if kept is not None and kept.place == place and alone:
            return Reached(kept.root, place, generation.number, kept.host)
        if generation.serve == generation.rank:
            if port not in self._servers:
                everywhere = "0.0.0.0"  # noqa: S104 (other nodes must reach it)
                self._servers[port] = in_thread(lambda: _store(everywhere, port, serve=True), gave_up)
            store = self._servers[port] if alone else in_thread(lambda: _store("127.0.0.1", port, serve=False), gave_up)
            mine = host
        else:
            mine = _await_port(host, port, gave_up)
            store = in_thread(lambda: _store(host, port, serve=False), gave_up)
        if not leaving:
            key, value = f"desk/{generation.rank}/{generation.incarnations[generation.rank]}", f"{mine} {self._desk}"
            in_thread(lambda: store.set(key, value), gave_up)
        return Reached(store, place, generation.number, mine)

    def keep(self, reached: Reached) -> None:
        """Take *reached* as the present one; give up hosting what it is not."""
        self._kept = reached
        self._servers = {port: server for port, server in self._servers.items() if port == reached.place[1]}

    def doubt(self) -> None:
        """Connect anew next time: something went wrong that may have been the connection."""
        self._kept = None


def _store(host: str, port: int, *, serve: bool) -> dist.TCPStore:
    """Host a store, or connect to one; without waiting for anybody."""
    return dist.TCPStore(host, port, is_master=serve, timeout=timedelta(seconds=BUILD_SECONDS), wait_for_workers=False)


def _await_port(host: str, port: int, gave_up: Callable[[], bool]) -> str:
    """Wait until the store listens; return this host's own address on the way to it.

    torch waits half a second before it tries again: a rank that is some milliseconds early would pay that at every recovery.
    """
    deadline = time.monotonic() + BUILD_SECONDS
    while True:
        try:
            with socket.create_connection((host, port), timeout=1.0) as probe:
                return str(probe.getsockname()[0])
        except OSError:
            if gave_up():
                raise Abandoned from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"gloo: nobody listens at {host}:{port}, where rank 0's store should be: Connection refused") from None
        time.sleep(PATIENCE)
