"""Probe all nodes of a cluster, whatever its kind."""

from __future__ import annotations

import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Self

from holdfast.cluster.local import LocalNodes
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.probe_result import NodeProbe, ProbeOutcome, UnansweredProbe
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.errors import AllocationRequired
from holdfast.probe.readers.local import probe_here

if TYPE_CHECKING:
    from holdfast.spec import Cluster, LocalCluster

DEADLINE: Final = 10.0
"""Seconds that one attempt to probe one node may take."""


class Sweeper(ABC):
    """Probes the nodes of one cluster, again and again."""

    @abstractmethod
    def nodes(self) -> list[str]:
        """Return the nodes' names, in the cluster's order."""

    @abstractmethod
    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> dict[str, NodeProbe]:
        """Probe each node (or each of *nodes*), in the cluster's order; one attempt takes *deadline* seconds at most."""

    def close(self) -> None:  # noqa: B027 (a sweeper without connections has nothing to close)
        """Close all connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sweeper(cluster: Cluster) -> Sweeper:
    """Return the sweeper for the nodes of *cluster*; raise `OperatorError` when something that it needs is missing."""
    if cluster.kind == "local":
        return LocalSweeper(cluster)
    if cluster.kind == "slurm":
        raise AllocationRequired("a health check", cluster.name)
    from holdfast.cluster.ssh import SshSweeper  # noqa: PLC0415 (paramiko takes 0.1 s, and most clusters do not need it)

    return SshSweeper(cluster)


class LocalSweeper(Sweeper):
    """Probes this machine once for all nodes of a local cluster, which are folders of it. One that is switched off does not answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._source = LocalNodes.of(cluster)
        self._misses: dict[str, int] = {}

    def nodes(self) -> list[str]:
        """Return the nodes' names."""
        return self._source.names()

    def sweep(self, deadline: float = DEADLINE, nodes: Collection[str] | None = None) -> dict[str, NodeProbe]:
        """Probe each node (or each of *nodes*)."""
        names = [name for name in self.nodes() if nodes is None or name in nodes]
        on = {name for name in names if self._source.is_reachable(name)}
        begun = time.monotonic()
        here = probe_here(os.uname().nodename, seconds=deadline) if on else None
        at, seconds = time.time(), time.monotonic() - begun
        return {name: NodeProbe(node=name, at=at, seconds=seconds, found=self._of(name, here if name in on else None)) for name in names}

    def _of(self, node: str, here: NodeReading | Unknown | None) -> ProbeOutcome:
        """Return what the probe of this machine means for *node*; None for one that is switched off."""
        self._misses[node] = self._misses.get(node, 0) + 1 if here is None else 0
        if here is None:
            return UnansweredProbe(times=self._misses[node], why="it is switched off")
        return here if isinstance(here, Unknown) else dataclasses.replace(here, node=node)
