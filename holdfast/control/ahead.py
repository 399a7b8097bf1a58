"""What it takes to reach a cluster's nodes, had by a standby before it needs it: while there is time to mend what is missing."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from holdfast.cluster import NodeSource, open_cluster
from holdfast.errors import OperatorError, SecretAway
from holdfast.log import note
from holdfast.spec import Cluster

log = logging.getLogger("holdfast.control")

AGAIN: Final = 2.0
"""Seconds between two attempts to get a secret from where it is kept."""


@dataclass(slots=True)
class Ahead:
    """The way to the nodes of one cluster: keys, known hosts, secrets."""

    trouble: str = ""
    """Why nothing can be steered now."""
    _cluster: Cluster | None = None
    _source: NodeSource | None = None
    _next: float = 0.0

    def is_ready(self, cluster: Cluster) -> bool:
        """Tell whether all is here that it takes to steer a job on *cluster*."""
        return self._cluster is cluster or self._cluster == cluster

    def prepare(self, cluster: Cluster) -> None:
        """Have what it takes for *cluster*, or try again later where that is with somebody who is away; raise `OperatorError`."""
        if self.is_ready(cluster) or time.monotonic() < self._next:
            return
        self.close()
        try:
            self._source = open_cluster(cluster)
        except SecretAway as error:
            if not self.trouble:
                note(log, "standby.cannot-steer", level=logging.WARNING, cluster=cluster.name, why=error)
            self.trouble, self._next = str(error), time.monotonic() + AGAIN
            return
        if self.trouble:
            note(log, "standby.can-steer", level=logging.WARNING, cluster=cluster.name)
        self._cluster, self.trouble = cluster, ""

    def take(self, cluster: Cluster) -> NodeSource:
        """Return the way to the nodes of *cluster* as it is now: keys may have changed since. What was had before is for the need."""
        try:
            source = open_cluster(cluster)
        except OperatorError as error:
            held = self._source if self.is_ready(cluster) else None
            if held is None:
                raise
            note(log, "standby.steers-by-what-it-had", level=logging.WARNING, cluster=cluster.name, why=error)
            self._source, source = None, held
        self.close()
        return source

    def close(self) -> None:
        """Let go of what was not taken."""
        if self._source is not None:
            with closing(self._source):
                self._source = None
        self._cluster = None
