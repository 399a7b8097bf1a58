"""A flow that hears none of its job's nodes is relieved by a standby that reaches them: nobody has to die for that."""

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
from holdfast.errors import HoldfastError, NodeStateUnknown
from holdfast.history import History, Lease, queries
from holdfast.log import note
from holdfast.spec import Cluster

log = logging.getLogger("holdfast.control")

TRIED: Final = 16
"""Nodes of the job that are tried, taken at random: enough to tell a network that is there from one that is not."""
HANDS: Final = 8
"""Nodes that are tried at once."""
AGAIN: Final = 2.0
"""Seconds between two searches."""
BACK: Final = 5.0
"""Seconds for which a standby that reached no more of them leaves the job to others: longer than from one search to the next."""


@dataclass(slots=True)
class PartitionFailover:
    """What a standby does about a flow that holds its lease and hears nobody."""

    history: History
    yields_until: float = 0.0
    """Until when the job is left to others (monotonic)."""
    _search: Search | None = None
    _next: float = 0.0

    def offer(self, lease: Lease, cluster: Cluster) -> None:
        """Go on with the search for the job's nodes; ask the holder of *lease* to let go of the job once most of them were reached."""
        if self._search is None:
            if time.monotonic() >= self._next:
                self._search = Search(cluster, _nodes(self.history, lease.job_id))
                self._search.start()
        elif not self._search.is_alive():
            search, self._search, self._next = self._search, None, time.monotonic() + AGAIN
            note(log, "standby.seeks", job=lease.job_id, answered=search.answered, tried=len(search.nodes), why=search.why)
            if search.reaches_most:
                self.yields_until = 0.0
                by = f"the standby on {platform.node()}, which reaches {search.answered} of {len(search.nodes)} nodes,"
                request_detach(self.history, lease, by)
            else:
                self.yields_until = time.monotonic() + BACK


class Search(threading.Thread):
    """One attempt at some nodes, beside the waiting."""

    def __init__(self, cluster: Cluster, nodes: Sequence[str]) -> None:
        super().__init__(name="standby seeks", daemon=True)
        self.nodes, self._cluster = nodes, cluster
        self.answered = 0
        self.why = ""
        """Why none could be tried."""

    @property
    def reaches_most(self) -> bool:
        """Tell whether more of them answered than did not: those would be taken for lost by who steers from here."""
        return 2 * self.answered > len(self.nodes)

    def run(self) -> None:
        """Try all of them."""
        try:
            with closing(open_cluster(self._cluster)) as source, ThreadPoolExecutor(HANDS, thread_name_prefix="standby tries") as hands:
                self.nodes = self.nodes or _some(source.names())
                self.answered = sum(hands.map(partial(_answers, source), self.nodes))
        except HoldfastError as error:
            self.why = str(error)


def _nodes(history: History, job_id: str) -> list[str]:
    """Return nodes that hold ranks of the job; none where it has not begun."""
    newest = queries.newest_generation(history, job_id)
    return [] if newest is None else _some(sorted(newest.ranks))


def _some(nodes: Sequence[str]) -> list[str]:
    return random.sample(nodes, min(TRIED, len(nodes)))


def _answers(source: NodeBackend, node: str) -> bool:
    try:
        return source.answers(node)
    except NodeStateUnknown:  # the key is not known here, say: then nobody is steered from here
        return False
