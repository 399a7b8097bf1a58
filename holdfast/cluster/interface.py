"""What every kind of cluster can do. The control side knows no other way to reach a node."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What can be seen of a node from outside: its agent, and the job that holds it."""

    name: str
    standing: str
    """``up``: its agent serves; ``idle``: it answers and runs no agent; ``off``: it does not answer."""
    job: str | None = None
    agent: str = "down"
    pid: int | None = None


class NodeSource(Protocol):
    """A cluster's nodes."""

    @property
    def name(self) -> str:
        """Return the cluster's name."""
        ...

    def names(self) -> list[str]:
        """Return the names of all nodes, in a fixed order."""
        ...

    def start_agent(self, node: str) -> None:
        """Start an agent on *node* and wait until it listens; raise `NodeLost` when that cannot be."""
        ...

    def connect(self, node: str) -> socket.socket:
        """Return a connection to the agent of *node*; raise ``OSError`` when nobody listens."""
        ...

    def answers(self, node: str) -> bool:
        """Tell whether *node* itself answers, independently of its agent."""
        ...

    def fence(self, node: str, job: str | None = None) -> list[int]:
        """Make sure that nothing runs on *node* any more; return the pids that had to be killed.

        With *job* leave a node alone that another job has taken meanwhile: nothing of *job* can be left there.
        """
        ...

    def wipe_memory(self, node: str, job: str) -> None:
        """Give back the memory that *job* (its id) has taken on *node* for its state; nothing of the job may run there any more."""
        ...

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*: nodes of one domain may fail together."""
        ...

    def address(self, node: str) -> str:
        """Return the address under which workers reach *node*."""
        ...

    def survey(self) -> list[NodeView]:
        """Look at every node."""
        ...

    def folder(self, node: str) -> Path:
        """Return the folder on *node* that holds its agent's files."""
        ...
