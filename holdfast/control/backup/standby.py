"""What a standby controller does before it has the job: keep its connections to the cluster ready, and take over at a partition.

A controller that reaches none of its job's nodes hands the job to a standby controller that reaches most of them; no process has to die.
"""

from __future__ import annotations

import logging
import platform
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.cluster import NodeBackend, open_cluster
from holdfast.control.supervisor.requests import request_detach
from holdfast.errors import HoldfastError, NodeStateUnknown, OperatorError, SecretUnavailable
from holdfast.history import History, Lease, queries
from holdfast.log import note
from holdfast.spec import Cluster

log = logging.getLogger("holdfast.control")

RETRY: Final = 2.0
"""Seconds between two attempts to get a secret from where it is kept, and between two searches for a job's nodes."""
PROBE_INTERVAL: Final = 60.0
"""Seconds between two attempts to reach a node: hosts may lose keys, and get other versions."""
PROBE_RETRY: Final = 10.0
"""The same after a failure: whoever corrects it wants to see that."""
PROBED: Final = 3
"""Nodes that are tried, taken at random, until one answers."""
SEARCHED: Final = 16
"""Nodes of the job that a search tries, taken at random: enough to distinguish a working network from a broken one."""
THREADS: Final = 8
"""Nodes that are tried at once."""
YIELD_SECONDS: Final = 5.0
"""How long a standby controller that reached too few nodes leaves the job to others: longer than from one search to the next."""


@dataclass(slots=True)
class BackupPrerequisites:
    """What it takes to reach the nodes of one cluster: keys, known hosts, secrets."""

    problem: str = ""
    """Why this controller could not run the job now, as far as is known."""
    _cluster: Cluster | None = None
    _source: NodeBackend | None = None
    _next: float = 0.0
    _next_probe: float = 0.0
    _thread: threading.Thread | None = None

    def is_ready(self, cluster: Cluster) -> bool:
        """Return whether everything is here to run a job on *cluster*."""
        return self._cluster is cluster or self._cluster == cluster

    def prepare(self, cluster: Cluster) -> None:
        """Get what *cluster* takes, or try again later where a secret is unavailable; raise `OperatorError`.

        Once it is here, log in to a node now and then: it may not accept the keys, or have another version.
        """
        now = time.monotonic()
        if not self.is_ready(cluster):
            if now >= self._next:
                self._open(cluster)
        elif now >= self._next_probe and (self._thread is None or not self._thread.is_alive()):
            self._next_probe = now + PROBE_INTERVAL
            self._thread = threading.Thread(target=self._probe, args=(cluster,), name="standby probe", daemon=True)
            self._thread.start()

    def _open(self, cluster: Cluster) -> None:
        self.close()
        try:
            self._source = open_cluster(cluster)
        except SecretUnavailable as error:
            self._set_problem(cluster, str(error))
            self._next = time.monotonic() + RETRY
            return
        self._cluster, self._next_probe = cluster, 0.0
        self._set_problem(cluster, "")

    def _probe(self, cluster: Cluster) -> None:
        problem = _why_unreachable(cluster)
        if self.is_ready(cluster):  # else another cluster, or none, counts by now
            self._set_problem(cluster, problem)

    def _set_problem(self, cluster: Cluster, problem: str) -> None:
        """Remember what keeps this controller from running the job, and log a change."""
        if problem and problem != self.problem:
            note(log, "standby.not-ready", level=logging.WARNING, cluster=cluster.name, why=problem)
        elif self.problem and not problem:
            note(log, "standby.ready-again", level=logging.WARNING, cluster=cluster.name)
        if problem:
            self._next_probe = min(self._next_probe, time.monotonic() + PROBE_RETRY)
        self.problem = problem

    def take(self, cluster: Cluster) -> NodeBackend:
        """Return the backend of *cluster*, opened now, as keys may have changed; the one opened before is the fallback."""
        try:
            source = open_cluster(cluster)
        except OperatorError as error:
            before = self._source if self.is_ready(cluster) else None
            if before is None:
                raise
            note(log, "standby.uses-earlier-backend", level=logging.WARNING, cluster=cluster.name, why=error)
            self._source, source = None, before
        self.close()
        return source

    def close(self) -> None:
        """Close the backend that was not taken."""
        if self._source is not None:
            with closing(self._source):
                self._source = None
        self._cluster = None


def _why_unreachable(cluster: Cluster) -> str:
    """Return why no job could be run on *cluster* from here; empty where it could."""
    why = ""
    try:
        with closing(open_cluster(cluster)) as source:
            names = source.names()
            some = random.sample(names, min(PROBED, len(names)))
            for node in some:
                try:
                    if source.is_reachable(node):
                        return ""
                except NodeStateUnknown as error:
                    why = str(error)
            return why or ("" if source.any_other_reachable(some) else f"neither {', '.join(sorted(some))} nor any other node answers")
    except HoldfastError as error:
        return str(error)


@dataclass(slots=True)
class PartitionFailover:
    """What a standby controller does about one that holds the job's lease and reaches no node."""

    history: History
    yields_until: float = 0.0
    """Until when the job is left to others (monotonic)."""
    _search: Search | None = None
    _next: float = 0.0

    def offer(self, lease: Lease, cluster: Cluster) -> None:
        """Search for the job's nodes; ask the holder of *lease* to release the job once most of them were reached."""
        if self._search is None:
            if time.monotonic() >= self._next:
                newest = queries.newest_generation(self.history, lease.job_id)
                self._search = Search(cluster, [] if newest is None else _some(sorted(newest.ranks)))
                self._search.start()
        elif not self._search.is_alive():
            search, self._search, self._next = self._search, None, time.monotonic() + RETRY
            note(log, "standby.search", job=lease.job_id, answered=search.answered, tried=len(search.nodes), why=search.why)
            if search.reaches_most:
                self.yields_until = 0.0
                by = f"the standby controller on {platform.node()}, which reaches {search.answered} of {len(search.nodes)} nodes,"
                request_detach(self.history, lease, by)
            else:
                self.yields_until = time.monotonic() + YIELD_SECONDS


class Search(threading.Thread):
    """One attempt to reach some nodes."""

    def __init__(self, cluster: Cluster, nodes: Sequence[str]) -> None:
        super().__init__(name="standby search", daemon=True)
        self.nodes, self._cluster = nodes, cluster
        self.answered = 0
        self.why = ""
        """Why none could be tried."""

    @property
    def reaches_most(self) -> bool:
        """Return whether most of them answered: a controller here would take the others for lost."""
        return 2 * self.answered > len(self.nodes)

    def run(self) -> None:
        """Try all of them."""
        try:
            with (
                closing(open_cluster(self._cluster)) as source,
                ThreadPoolExecutor(THREADS, thread_name_prefix="standby search") as threads,
            ):
                self.nodes = self.nodes or _some(source.names())
                self.answered = sum(threads.map(partial(_answers, source), self.nodes))
        except HoldfastError as error:
            self.why = str(error)


def _some(nodes: Sequence[str]) -> list[str]:
    return random.sample(nodes, min(SEARCHED, len(nodes)))


def _answers(source: NodeBackend, node: str) -> bool:
    try:
        return source.is_reachable(node)
    except NodeStateUnknown:  # its key is unknown here, for example: then no job can be run from here
        return False
