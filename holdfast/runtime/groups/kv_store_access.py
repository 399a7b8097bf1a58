"""How a process reaches the store of a generation: hosts it, connects to it, or keeps the connection that it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from holdfast.runtime.groups.backends import BUILD_SECONDS, GenerationEnded, pause_after
from holdfast.runtime.groups.kv_store import KvServer, KvStore

if TYPE_CHECKING:
    from holdfast.runtime.groups.membership import GroupGeneration

_TIMEOUT: Final = timedelta(seconds=BUILD_SECONDS)

Place = tuple[str, int, int, int]
"""Where a store is, the rank that hosts it, and the generation in which that process took the rank."""


@dataclass(frozen=True, slots=True)
class ReachedStore:
    """The store of one generation, as this process reaches it."""

    root: KvStore
    place: Place
    number: int
    serving: bool
    """This process hosts it."""

    @property
    def host(self) -> str:
        """Return this process's own address, as others reach it."""
        return self.place[0] if self.serving else self.root.host

    def prefixed(self, name: str, patience: timedelta | None = None) -> dist.Store:
        """Return a part of the store for one purpose in this generation; with *patience* for who waits so long for a value there."""
        return dist.PrefixStore(f"generation-{self.number}/{name}", self.root if patience is None else self.root.with_timeout(patience))

    def find(self, rank: int, incarnation: int) -> tuple[str, int] | None:
        """Return where the desk of *rank* is, once that process has told."""
        name = f"desk/{rank}/{incarnation}"
        if not self.root.check([name]):
            return None
        host, port = self.root.get(name).decode().split()
        return host, int(port)


class KvStoreAccess:
    """This process's connections to stores."""

    def __init__(self, acceptor: int, token: str) -> None:
        """*acceptor*: the port at which this process's desk listens; *token*: the job's, by which ranks know each other."""
        self._desk, self._token = acceptor, token
        self._kept: ReachedStore | None = None
        self._servers: dict[int, KvServer] = {}

    def reach(
        self, generation: GroupGeneration, is_cancelled: Callable[[], bool], *, leaving: bool = False, patience: timedelta | None = None
    ) -> ReachedStore:
        """Reach the store of *generation*, or host it; leave there where this rank's desk is.

        A connection to the same store is kept, so that those who only hear of a change have little to do.

        Args:
            generation: what to come into.
            gave_up: tells whether *generation* has been given up meanwhile: then `GenerationEnded` is raised.
            leaving: another process takes this rank, so that the desk is not this one.
            patience: how long who hosts it may take to come; default: as long as in a recovery.
        """
        host, port = generation.store
        place = (host, port, generation.serve, generation.incarnations[generation.serve])
        serving, kept = generation.serve == generation.rank, self._kept
        if kept is not None and kept.place == place and not kept.root.gone:
            return ReachedStore(kept.root, place, generation.number, serving)
        if serving and port not in self._servers:
            self._servers[port] = KvServer(port, self._token)
        root = self._connect("127.0.0.1" if serving else host, port, is_cancelled, _TIMEOUT if patience is None else patience)
        generation_store = ReachedStore(root, place, generation.number, serving)
        if not leaving:
            generation_store.root.set(
                f"desk/{generation.rank}/{generation.incarnations[generation.rank]}", f"{generation_store.host} {self._desk}"
            )
        return generation_store

    def look(self, generation: GroupGeneration, is_cancelled: Callable[[], bool]) -> KvStore:
        """Connect to the store of *generation* for a look, before this process has come into it; who looks closes the connection."""
        return self._connect(*generation.store, is_cancelled, _TIMEOUT)

    def _connect(self, host: str, port: int, is_cancelled: Callable[[], bool], patience: timedelta) -> KvStore:
        """Connect as soon as the store listens."""
        began = time.monotonic()
        while True:
            try:
                return KvStore(host, port, self._token, _TIMEOUT)
            except OSError as error:
                if is_cancelled():
                    raise GenerationEnded from None
                if time.monotonic() > began + patience.total_seconds():
                    raise dist.DistNetworkError(f"the store at {host}:{port} cannot be reached: {error}") from error
            time.sleep(pause_after(time.monotonic() - began))

    def keep(self, generation_store: ReachedStore) -> None:
        """Take *generation_store* as the present one; give up what it is not."""
        before, self._kept = self._kept, generation_store
        if before is not None and before.root is not generation_store.root:
            before.root.close("another store has taken its place")
        for port in [port for port in self._servers if port != generation_store.place[1]]:
            self._servers.pop(port).close()

    def doubt(self) -> None:
        """Connect anew next time: something went wrong that may have been the connection."""
        self._kept = None
