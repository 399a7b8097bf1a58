"""What every kind of cluster can do. The control side knows no other way to reach a node."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What can be seen of a node from outside: its agent, and the job that holds it."""

    name: str
    standing: str
    """``up``: its agent serves; ``idle``: it answers and runs no agent; ``off``: it does not answer."""
    job: str | None = None
    agent: str = "down"
    pid: int | None = None
    why: str = ""
    """Why it does not answer, where that is known."""


class NodeSource(Protocol):
    """A cluster's nodes."""

    @property
    def name(self) -> str:
        """Return the cluster's name."""
        ...

    @property
    def remote(self) -> bool:
        """Tell whether nodes are other machines: a connection to one may end although nothing on the node has."""
        ...

    def names(self) -> list[str]:
        """Return the names of all nodes, in a fixed order."""
        ...

    def start_agent(self, node: str) -> None:
        """Start an agent on *node* and wait until it listens; raise `NodeLost` when that cannot be."""
        ...

    def connect(self, node: str) -> socket.socket:
        """Return a connection to the agent of *node*.

        Raise ``TimeoutError`` when *node* does not answer, another ``OSError`` when it does and nobody listens there.
        """
        ...

    def outfit(self, node: str, job: str) -> dict[str, Any]:
        """Return what of the plan of *job* (its name) is different on *node*: fields of ``prepare``, ``environment`` to be added."""
        ...

    def answers(self, node: str) -> bool:
        """Tell whether *node* itself answers, independently of its agent; raise `NotAskable` when that could not be tried."""
        ...

    def fence(self, node: str, job: str | None = None) -> list[int]:
        """Make sure that nothing runs on *node* any more; return the pids that had to be killed.

        With *job* leave a node alone that another job has taken meanwhile: nothing of *job* can be left there. Raise a `NodeTrouble` when
        nobody could be asked: then what runs there is fenced by its generation alone, until its agent's lease ends.
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

    def logs(self, node: str, job: str) -> dict[str, int]:
        """Return the logs of the ranks of *job* (its name) on *node*: file to size in bytes. Raise a `NodeTrouble` or ``OSError``."""
        ...

    def log(self, node: str, job: str, name: str, at: int, most: int) -> bytes:
        """Return up to *most* bytes of such a log from byte *at* on. Raise a `NodeTrouble` or ``OSError``."""
        ...

    def interface(self, node: str) -> str | None:
        """Return the name of the interface of *node* that training traffic takes, where that is known."""
        ...

    def bandwidth(self, source: str, to: str, seconds: float) -> float:
        """Return how many bytes per second go from one node to another, by sending for so long; raise a `NodeTrouble` when none do."""
        ...

    def survey(self) -> list[NodeView]:
        """Look at every node."""
        ...

    def folder(self, node: str) -> Path:
        """Return the folder on *node* that holds its agent's files."""
        ...

    def close(self) -> None:
        """Let go of all connections. Agents and what they started go on."""
        ...
