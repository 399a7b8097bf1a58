"""The interface of every kind of cluster. The control side has no other way to reach a node."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.agent.node.epochs import FencingToken
from holdfast.detectors.evidence import SchedulerNodeState
from holdfast.errors import HoldfastError
from holdfast.protocol import Message

Confirm = Callable[[], FencingToken]
"""Returns the token of the controller that sends a command, or raises a `WorldError`.

It is called when the connection is open and the command is about to be sent. Its deadline is in seconds since the boot of this machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as seen from outside: its agent, and the job that holds it."""

    name: str
    status: str
    """``up``: its agent serves; ``idle``: it is reachable and runs no agent; ``off``: it is unreachable; ``away``: not allocated to us."""
    job: str | None = None
    agent: str = "down"
    pid: int | None = None
    why: str = ""
    """Why it is unreachable, where that is known."""
    allocation: str | None = None
    """The id of the Slurm job that it is allocated by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """How many GPUs and CPUs the processes of a node may use."""

    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """What a job needs from a cluster that allocates its nodes."""

    nodes: int = 0
    """Number of nodes, spare nodes included."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Nodes that must not be used, and why."""
    returned: Mapping[str, float] = field(default_factory=dict)
    """Nodes that are back in service, and since when (seconds since 1970): a drain from before that may be undone."""
    unreachable: Mapping[str, float] = field(default_factory=dict)
    """Nodes that are unreachable, and since when: they need a replacement, unless they were allocated again since."""
    in_use: frozenset[str] = frozenset()
    """Nodes that hold ranks of the job: they must not be released."""
    final_checkpoint_seconds: float = 0.0
    """How long a final checkpoint takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReason:
    """Why a job must leave a node, and by when."""

    reason: str
    since: float
    """When this became known (seconds since 1970)."""
    by: float | None = None
    """When the node will be lost; empty: no time is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The logs in one folder, of ranks and hot spares."""

    place: str = ""
    """Identifies the folder on whatever machine it is seen; empty: unknown."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """File name to size in bytes."""

    def of(self, node: str, held: Mapping[str, Collection[int]]) -> list[str]:
        """Return the files that *node* may have written; *held* maps each node to the ranks that it has run (nodes may share a folder)."""
        own = held.get(node, ())
        others = {f"rank-{rank}.log" for ranks in held.values() for rank in ranks if rank not in own}
        return [name for name in self.sizes if name not in others]


class Allocator(Protocol):
    """Allocates nodes to a job for a limited time, as Slurm does. No method waits: the answers are from the last poll."""

    def begin(self, job: str, name: str, directory: Path) -> None:
        """Start to keep as many nodes as requested for *job* (its id), called *name*, which works in *directory*.

        Raise `OperatorError` when that can never succeed.
        """
        ...

    def request(self, request: AllocationRequest) -> None:
        """Set what the job needs from now on."""
        ...

    def usable(self, now: float) -> list[str]:
        """Return the nodes that are allocated to the job and that it may go on using."""
        ...

    def is_allocated(self, node: str) -> bool:
        """Return whether *node* is allocated to the job now."""
        ...

    def allocated_since(self, node: str) -> float | None:
        """Return when *node* was allocated to the job (seconds since 1970), where that is known."""
        ...

    def drain_reason(self, node: str, now: float) -> DrainReason | None:
        """Return why the job must leave *node*, once that is near."""
        ...

    def ends_at(self) -> float | None:
        """Return when this process will be ended, where it runs inside an allocation."""
        ...

    def scheduler_states(self) -> list[SchedulerNodeState]:
        """Return what the scheduler reports about the nodes that the job has."""
        ...

    def describe(self) -> str:
        """Return what is allocated, and why there is not more, as text."""
        ...

    def new_messages(self) -> list[str]:
        """Return the messages since the last call."""
        ...

    @property
    def refused(self) -> HoldfastError | None:
        """Return why nothing is allocated and nothing will be, if that is so."""
        ...

    def close(self, *, end: bool) -> None:
        """Stop polling; with *end*, release all allocations."""
        ...


class NodeBackend(Protocol):
    """The nodes of a cluster. A backend whose nodes must be allocated first has an `Allocator` in its attribute ``allocator``."""

    @property
    def name(self) -> str:
        """Return the cluster's name."""
        ...

    @property
    def remote(self) -> bool:
        """Return whether nodes are other machines: a connection to one may end although nothing on the node did."""
        ...

    def names(self) -> list[str]:
        """Return the names of all nodes, in a fixed order."""
        ...

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Start an agent on *node* and wait until it listens; raise `NodeLost` when that fails.

        This and the other methods with *confirm* bypass the agent. They raise `Superseded` when a newer controller than that of *confirm*
        has sent commands to the node, and another `NodeError` when *confirm* gets no answer in time. Without *confirm* no controller claims
        the job: for tests and chaos runs.
        """
        ...

    def connect(self, node: str) -> socket.socket:
        """Return a connection to the agent of *node*.

        Raise ``TimeoutError`` when *node* is unreachable, another ``OSError`` when it is reachable and no agent listens, and
        `ProtocolMismatch` when its Holdfast speaks another protocol.
        """
        ...

    def processors(self, node: str, visible: str | None) -> Processors:
        """Return how many GPUs and CPUs the workers of *node* may use; *visible* is a ``CUDA_VISIBLE_DEVICES`` that the job sets itself.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def node_settings(self, node: str, job: str) -> dict[str, Any]:
        """Return what of the plan of *job* (its name) differs on *node*: fields of ``prepare``, and an ``environment`` to add."""
        ...

    def is_reachable(self, node: str) -> bool:
        """Return whether *node* itself is reachable, independently of its agent; raise `NodeStateUnknown` when that could not be tried."""
        ...

    def any_other_reachable(self, but: Collection[str]) -> bool:
        """Return whether any node of the cluster except these is reachable now: then our own network works."""
        ...

    def fence(self, node: str, job: str | None = None, confirm: Confirm | None = None) -> list[int]:
        """Make sure that nothing runs on *node* any more; return the pids that had to be killed.

        With *job*, leave alone a node that another job has taken meanwhile. Raise a `NodeError` when the node is unreachable: then only
        the generation number fences what runs there, until the lease of its agent ends.
        """
        ...

    def recent_events(self, node: str, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* (its id) in the event logs of agents on *node*.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def wipe_memory(self, node: str, job: str, confirm: Confirm | None = None) -> None:
        """Free the memory on *node* that holds the state of *job* (its id); nothing of the job may run there any more."""
        ...

    def domain(self, node: str) -> str:
        """Return the failure domain of *node*: nodes of one domain may fail together."""
        ...

    def address(self, node: str) -> str:
        """Return the address at which workers reach *node*."""
        ...

    def logs(self, node: str, job: str) -> Logs:
        """List the logs of the ranks of *job* (its name) in the log folder of *node*, which nodes may share.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of `agent.log`: from byte *at*, or the last ones.

        Raise a `NodeError` or ``OSError``.
        """
        ...

    def interface(self, node: str) -> str | None:
        """Return the network interface of *node* for training traffic, where that is known."""
        ...

    def bandwidth(self, source: str, to: str, seconds: float) -> float:
        """Send from one node to another for *seconds*; return bytes per second, and raise a `NodeError` when nothing gets through."""
        ...

    def check_connection(self, source: str, to: str, seconds: float) -> str:
        """Return why one node cannot connect to another within *seconds*; empty when it can.

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
        """Close all connections. Agents and their workers go on."""
        ...


def allocator_of(source: NodeBackend) -> Allocator | None:
    """Return the allocator of *source*; nothing for a cluster whose nodes are always there."""
    allocator: Allocator | None = getattr(source, "allocator", None)
    return allocator
