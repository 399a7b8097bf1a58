"""Which node an agent serves, the lock on it, and the marks that everything it starts carries."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.host.process import AGENT_MARK, NODE_MARK, mark_of

LOCK_SECONDS: Final = 2.0
"""How long an agent that is ending may take to release its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """An agent's names."""

    directory: Path
    """The node's own folder: socket, event log, lock."""
    node: str
    cluster: str
    id: str
    """Of this very agent: the next one on the same node has another."""

    @property
    def socket(self) -> Path:
        """Return where controllers and workers connect to this agent."""
        return self.directory / "agent.sock"

    def marks(self) -> dict[str, str]:
        """Return the variables that everything started by this agent carries."""
        return {
            "HOLDFAST_NODE": self.node,
            "HOLDFAST_SOCKET": str(self.socket),
            NODE_MARK: mark_of(self.directory),
            AGENT_MARK: self.id,
        }


class Taken(OSError):
    """Another agent serves this node."""


def take_node(directory: Path) -> int:
    """Lock the node at *directory* for this process and its forks and return the descriptor; raise `Taken` when another agent has it."""
    lock = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                holder = os.pread(lock, 20, 0).decode(errors="replace")
                os.close(lock)
                raise Taken(f"another agent serves this node (pid {holder or 'unknown'})") from None
            time.sleep(0.01)
        else:
            os.truncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            return lock
