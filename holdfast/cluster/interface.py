"""What every kind of cluster can do. The control side knows no other way to reach a node."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from detectors.evidence import SchedulerNodeState
from holdfast.agent.node.epochs import FencingToken
from holdfast.errors import HoldfastError
from holdfast.protocol import Message

Confirm = Callable[[], FencingToken]
"""Returns in whose name an order is given, asked when the way to the node is there and the order is about to go; raises a `WorldError`.

Its deadline is in seconds since the boot of this machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What can be seen of a node from outside: its agent, and the job that holds it."""

    name: str
    status: str
    """``up``: its agent serves; ``idle``: it answers and runs no agent; ``off``: it does not answer."""
    job: str | None = None
    agent: str = "down"
    pid: int | None = None
    why: str = ""
    """Why it does not answer, where that is known."""
    allocation: str | None = None
    """What it was given to us with, where nodes are lent: the number of a Slurm job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """What a job needs of a cluster that lends its nodes."""

    nodes: int = 0
    """As many nodes, spare ones included."""
    out: Mapping[str, str] = field(default_factory=dict)
    """Nodes that are not to be used, and why."""
    back: Mapping[str, float] = field(default_factory=dict)
    """Nodes that are in service again, and since when (seconds since 1970): what was done against them before then may be undone."""
    lost: Mapping[str, float] = field(default_factory=dict)
    """Nodes that do not answer, and since when: others are needed in their place, unless they were lent anew since."""
    used: frozenset[str] = frozenset()
    """Nodes that hold ranks of it: they are not to be given back."""
    save: float = 0.0
    """Seconds that a last save takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Why a node is to be left, and by when."""

    reason: str
    since: float
    """When this was known (seconds since 1970)."""
    by: float | None = None
    """When it will be gone; empty: nobody has set a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The logs in one folder, of ranks and standbys."""

    place: str = ""
    """What tells the folder from all others, on whatever machine it is seen; empty: nobody knows."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """File to its size in bytes."""

    def of(self, node: str, held: Mapping[str, Collection[int]]) -> list[str]:
        """Return the files that *node* may have written, by the ranks that each node has *held*: those of a folder may be shared."""
        mine = held.get(node, ())
        others = {f"rank-{rank}.log" for ranks in held.values() for rank in ranks if rank not in mine}
        return [name for name in self.sizes if name not in others]


class Allocator(Protocol):
    """What lends nodes to a job for a while, as Slurm does. Asking never waits: what is known is what was last seen."""

    def begin(self, job: str, name: str, directory: Path) -> None:
        """Keep as many nodes as it wishes for *job* (its id), called *name*, which works in *directory*.

        Raise `OperatorError` when that can never be.
        """
        ...

    def request(self, request: AllocationRequest) -> None:
        """Learn what the job needs from now on."""
        ...

    def usable(self, now: float) -> list[str]:
        """Return the nodes that the job has been given and may go on using."""
        ...

    def is_allocated(self, node: str) -> bool:
        """Tell whether the job has been given *node*, and it was not taken back."""
        ...

    def allocated_since(self, node: str) -> float | None:
        """Return since when the job has been lent *node* (seconds since 1970), where that is known."""
        ...

    def drain_reason(self, node: str, now: float) -> Leaving | None:
        """Return why *node* is to be left, once that is near."""
        ...

    def ends_at(self) -> float | None:
        """Return when the time of this very process is over, where it runs on what was lent."""
        ...

    def scheduler_states(self) -> list[SchedulerNodeState]:
        """Return what is said of the nodes that the job has."""
        ...

    def describe(self) -> str:
        """Say what was given, and why not more."""
        ...

    def new_messages(self) -> list[str]:
        """Return what there is to tell since the last time."""
        ...

    @property
    def refused(self) -> HoldfastError | None:
        """Return why nothing is given and would not be later, if that is so."""
        ...

    def close(self, *, end: bool) -> None:
        """Look no more; with *end*, give back what was asked for."""
        ...


class NodeBackend(Protocol):
    """A cluster's nodes. One whose nodes have to be asked for has a `Allocator`, as ``allocator``."""

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

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Start an agent on *node* and wait until it listens; raise `NodeLost` when that cannot be.

        This and the orders below that go past agents are refused with `Superseded` where a newer flow than that of *confirm* has been at
        work, and with another `NodeError` where they come too late to know. Without it nobody claims the job: for tests, and for chaos.
        """
        ...

    def connect(self, node: str) -> socket.socket:
        """Return a connection to the agent of *node*.

        Raise ``TimeoutError`` when *node* does not answer, another ``OSError`` when it does and nobody listens there, `ProtocolMismatch`
        when nobody there speaks ours.
        """
        ...

    def node_settings(self, node: str, job: str) -> dict[str, Any]:
        """Return what of the plan of *job* (its name) is different on *node*: fields of ``prepare``, ``environment`` to be added."""
        ...

    def answers(self, node: str) -> bool:
        """Tell whether *node* itself answers, independently of its agent; raise `NodeStateUnknown` when that could not be tried."""
        ...

    def any_other_reachable(self, but: Collection[str]) -> bool:
        """Tell whether anything of the cluster but these nodes answers now: then the way to it is there."""
        ...

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """Make sure that nothing runs on *node* any more; return the pids that had to be killed.

        With *job* leave a node alone that another job has taken meanwhile: nothing of *job* can be left there. Raise a `NodeError` when
        nobody could be asked: then what runs there is fenced by its generation alone, until its agent's lease ends.
        """
        ...

    def past(self, node: str, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* (its id) that agents on *node* have journaled.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def wipe_memory(self, node: str, job: str, confirm: Confirm | None = None) -> None:
        """Give back the memory that *job* (its id) has taken on *node* for its state; nothing of the job may run there any more."""
        ...

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*: nodes of one domain may fail together."""
        ...

    def address(self, node: str) -> str:
        """Return the address under which workers reach *node*."""
        ...

    def logs(self, node: str, job: str) -> Logs:
        """Return the logs of the ranks of *job* (its name) in the folder where *node* writes its own, which nodes may share.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of `agent.log`, from byte *at* on or the last ones.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def interface(self, node: str) -> str | None:
        """Return the name of the interface of *node* that training traffic takes, where that is known."""
        ...

    def bandwidth(self, source: str, to: str, seconds: float) -> float:
        """Return how many bytes per second go from one node to another, by sending for so long; raise a `NodeError` when none do."""
        ...

    def check_connection(self, source: str, to: str, seconds: float) -> str:
        """Say why a connection from one node to another does not come about within *seconds*; empty when it does.

        Raise a `NodeError` when one of them cannot be asked.
        """
        ...

    def survey(self, seconds: float | None = None) -> list[NodeView]:
        """Look at every node; one that takes longer than *seconds*, where that is given and nodes are other machines, counts as off."""
        ...

    def folder(self, node: str) -> Path:
        """Return the folder on *node* that holds its agent's files."""
        ...

    def close(self) -> None:
        """Let go of all connections. Agents and what they started go on."""
        ...


def allocator_of(source: NodeBackend) -> Allocator | None:
    """Return who lends the nodes of *source*, if they are lent."""
    allocator: Allocator | None = getattr(source, "allocator", None)
    return allocator
