"""Look at the nodes of a cluster, whatever its kind."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Protocol, Self

from detectors.evidence import Unknown
from detectors.probe_result import NodeProbe, ProbeOutcome, UnansweredProbe
from detectors.readings import NodeReading
from holdfast.cluster.local import LocalNodes
from holdfast.errors import AllocationRequired
from holdfast.probe.readers.local import seen

if TYPE_CHECKING:
    from holdfast.spec import Cluster, LocalCluster

DEADLINE: Final = 10.0
"""Seconds that one attempt to look at one node may take."""


class Sweeper(Protocol):
    """Looks at the nodes of one cluster, again and again."""

    def nodes(self) -> list[str]:
        """Return the nodes' names, in the cluster's order."""
        ...

    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> dict[str, NodeProbe]:
        """Return a look at each node (or each of *nodes*), in the cluster's order; one attempt takes *deadline* seconds at most."""
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_sweeper(cluster: Cluster) -> Sweeper:
    """Return what looks at the nodes of *cluster*; raise `OperatorError` when what it takes is not there."""
    if cluster.kind == "local":
        return LocalSweeper(cluster)
    if cluster.kind == "slurm":
        raise AllocationRequired("a look from outside", cluster.name)
    from holdfast.cluster.ssh import SshSweeper  # noqa: PLC0415 (paramiko takes 0.1 s, and most clusters need none of it)

    return SshSweeper(cluster)


class LocalSweeper:
    """Looks at this machine once for all nodes of a local cluster: each is a folder of it. One that is switched off does not answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._source = LocalNodes.of(cluster)
        self._misses: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing to let go of."""

    def nodes(self) -> list[str]:
        """Return the nodes' names."""
        return self._source.names()

    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> dict[str, NodeProbe]:
        """Return a look at each node (or each of *nodes*)."""
        names = [name for name in self.nodes() if nodes is None or name in nodes]
        on = {name for name in names if self._source.answers(name)}
        begun = time.monotonic()
        found = seen(os.uname().nodename, seconds=deadline) if on else None
        at, seconds = time.time(), time.monotonic() - begun
        return {name: NodeProbe(node=name, at=at, seconds=seconds, found=self._of(name, found if name in on else None)) for name in names}

    def _of(self, node: str, found: NodeReading | Unknown | None) -> ProbeOutcome:
        """Return what this machine's look means for *node*; nothing was found for one that is switched off."""
        self._misses[node] = self._misses.get(node, 0) + 1 if found is None else 0
        if found is None:
            return UnansweredProbe(times=self._misses[node], why="it is switched off")
        return found if isinstance(found, Unknown) else dataclasses.replace(found, node=node)
