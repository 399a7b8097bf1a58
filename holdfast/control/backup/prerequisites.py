"""What it takes to reach a cluster's nodes, had by a standby before it needs it: while there is time to mend what is missing."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from holdfast.cluster import NodeBackend, open_cluster
from holdfast.errors import HoldfastError, NodeStateUnknown, OperatorError, SecretUnavailable
from holdfast.log import note
from holdfast.spec import Cluster

log = logging.getLogger("holdfast.control")

AGAIN: Final = 2.0
"""Seconds between two attempts to get a secret from where it is kept."""
TRY_EVERY: Final = 60.0
"""Seconds between two attempts to reach a node: keys are taken from hosts, and hosts are given other versions."""
MENDED: Final = 10.0
"""And while something is the matter: whoever mends it wants to see that."""
TRIED: Final = 3
"""Nodes that are tried, taken at random, until one answers."""


@dataclass(slots=True)
class BackupPrerequisites:
    """The way to the nodes of one cluster: keys, known hosts, secrets."""

    trouble: str = ""
    """Why nothing can be steered now, as far as is known."""
    _cluster: Cluster | None = None
    _source: NodeBackend | None = None
    _next: float = 0.0
    _next_try: float = 0.0
    _thread: threading.Thread | None = None

    def is_ready(self, cluster: Cluster) -> bool:
        """Tell whether all is here that it takes to steer a job on *cluster*."""
        return self._cluster is cluster or self._cluster == cluster

    def prepare(self, cluster: Cluster) -> None:
        """Have what it takes for *cluster*, or try again later where that is with somebody who is away; raise `OperatorError`."""
        if self.is_ready(cluster):
            self._try_out(cluster)
        elif time.monotonic() >= self._next:
            self._get(cluster)

    def _get(self, cluster: Cluster) -> None:
        self.close()
        try:
            self._source = open_cluster(cluster)
        except SecretUnavailable as error:
            self._judge(cluster, str(error))
            self._next = time.monotonic() + AGAIN
            return
        self._cluster, self._next_try = cluster, 0.0
        self._judge(cluster, "")

    def _try_out(self, cluster: Cluster) -> None:
        """Log in to a node now and then, beside the waiting: keys may be unknown there, and what is there may be of another version."""
        if time.monotonic() >= self._next_try and (self._thread is None or not self._thread.is_alive()):
            self._next_try = time.monotonic() + TRY_EVERY
            self._thread = threading.Thread(target=self._log_in, args=(cluster,), name="standby tries", daemon=True)
            self._thread.start()

    def _log_in(self, cluster: Cluster) -> None:
        trouble = _why_not(cluster)
        if self.is_ready(cluster):  # it is another one that counts now, or none any more
            self._judge(cluster, trouble)

    def _judge(self, cluster: Cluster, trouble: str) -> None:
        """Remember what keeps this flow from control_job, and say so when that changes."""
        if trouble and trouble != self.trouble:
            note(log, "standby.cannot-steer", level=logging.WARNING, cluster=cluster.name, why=trouble)
        elif self.trouble and not trouble:
            note(log, "standby.can-steer", level=logging.WARNING, cluster=cluster.name)
        if trouble:
            self._next_try = min(self._next_try, time.monotonic() + MENDED)
        self.trouble = trouble

    def take(self, cluster: Cluster) -> NodeBackend:
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


def _why_not(cluster: Cluster) -> str:
    """Return why no job could be steered on *cluster* from here; empty where it could."""
    why = ""
    try:
        with closing(open_cluster(cluster)) as source:
            names = source.names()
            some = random.sample(names, min(TRIED, len(names)))
            for node in some:
                try:
                    if source.answers(node):
                        return ""
                except NodeStateUnknown as error:
                    why = str(error)
            return why or ("" if source.any_other_reachable(some) else f"none of {', '.join(sorted(some))} answers there, nor do others")
    except HoldfastError as error:
        return str(error)
