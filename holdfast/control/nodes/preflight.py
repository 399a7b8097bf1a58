"""A look at nodes before ranks are put on them, beside whatever else is done for a launch; and at spare ones now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from detectors.burn_in_results import CheckMark
from detectors.evidence import Unknown
from holdfast.errors import HoldfastError
from holdfast.history import History
from holdfast.history.health_samples import verdicts
from holdfast.log import note
from holdfast.probe.burn_in.connections import open_burn_in_connections
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.runner import BurnInRunner
from holdfast.probe.sweep import Sweeper, open_sweeper
from holdfast.spec import Cluster
from policies.node_health import HealthAssessment, NodeHealthState, assess_health

log = logging.getLogger("holdfast.control")

SECONDS: Final = 3.0
"""How long a launch waits for a look at most, from its begin on. Agents start meanwhile; what is not seen by then stops nobody. Of a local
cluster it waits for none: all nodes are this machine, so the look cannot change which are chosen. It is told when it comes."""
AGAIN: Final = 300.0
"""Seconds between two looks at spare nodes while training runs: what a recovery may need is known before it does."""
SOON: Final = 30.0
"""Seconds for which a look at a node need not be repeated."""


@dataclass(slots=True)
class Preflight:
    """What speaks against using nodes: looks of our own, and what the history last heard of them by `cluster-health`."""

    cluster: Cluster
    history: History
    on: bool = True
    why_suspect: Callable[[str], str] = lambda _: ""
    """What makes a node suspect, whoever looked at it."""
    cut_short: Callable[[str], str] = lambda _: ""
    """What will take a node away before the job could end."""
    _told: dict[str, HealthAssessment] = field(default_factory=dict)
    _kept: dict[str, HealthAssessment] = field(default_factory=dict)
    """Of the history."""
    _sweeper: Sweeper | None = None
    _thread: threading.Thread | None = None
    _trial: threading.Thread | None = None
    """The short burn-in beside the look, where the cluster wants one."""
    _failed: dict[str, str] = field(default_factory=dict)
    """Node to what it failed of a short burn-in."""
    _until: float = 0.0
    _next: float = 0.0
    _said: dict[str, str] = field(default_factory=dict)
    """Node to what was told against it last."""

    def begin(self, nodes: Collection[str]) -> None:
        """Begin to look at *nodes* beside what else is done. A look that is under way is not joined by another one."""
        now = time.time()
        wanted = [node for node in nodes if node not in self._told or now - self._told[node].at > SOON]
        if not self.on or not wanted or (self._thread is not None and self._thread.is_alive()):
            return
        self._until = time.monotonic() + SECONDS
        self._thread = threading.Thread(target=self._look, args=(wanted,), name="preflight", daemon=True)
        self._thread.start()
        if self.tries_out and (self._trial is None or not self._trial.is_alive()):
            self._trial = threading.Thread(target=self._try_out, args=(wanted,), name="short burn-in", daemon=True)
            self._trial.start()

    @property
    def tries_out(self) -> bool:
        """Tell whether nodes also work for a moment before a launch; on one machine, which all nodes share, only if that is asked for."""
        wanted = self.cluster.burn_in.before_launch
        return self.cluster.kind != "local" if wanted is None else wanted

    def finish(self) -> None:
        """Wait until what is under way has ended, if it can change anything, but not beyond its deadline."""
        look = self._thread if self.cluster.kind != "local" else None
        for thread in (look, self._trial):
            if thread is not None:
                thread.join(max(0.0, self._until - time.monotonic()))

    def remember(self) -> None:
        """Read what the history has of the nodes, where it can be read."""
        if self.on:
            try:
                self._kept = verdicts(self.history, self.cluster.name)
            except HoldfastError as error:
                note(log, "preflight.no-history", why=error)

    def news(self, nodes: Iterable[str]) -> dict[str, list[str]]:
        """Return what has come to speak against *nodes* since this was last asked, each with the nodes of which that is so."""
        found: dict[str, list[str]] = {}
        for node in nodes:
            why = self.objection(node)
            if why and self._said.get(node) != why:
                found.setdefault(why, []).append(node)
            self._said[node] = why
        return found

    def maintain(self, spares: Collection[str]) -> None:
        """Look at spare nodes when it is time to; never waits."""
        if spares and time.monotonic() >= self._next:
            self._next = time.monotonic() + AGAIN
            self.begin(spares)

    def objection(self, node: str) -> str:
        """Return what speaks against using *node*; empty when nothing does, or when nobody knows."""
        return self._against(node, self._told)

    def _against(self, node: str, looks: Mapping[str, HealthAssessment]) -> str:
        now = time.time()
        for told in (looks.get(node), self._kept.get(node)):
            if told is not None and told.status == NodeHealthState.UNHEALTHY and told.is_fresh(now):
                return f"unhealthy: {'; '.join(told.evidence[:2])}"
        if (failed := self._failed.get(node)) is not None:
            return f"failed the short burn-in: {failed}"
        return self.why_suspect(node) or self.cut_short(node)

    def is_healthy(self, node: str) -> bool:
        """Tell whether nothing speaks against the health of *node*, for all that it may be taken away soon."""
        return self.objection(node) in ("", self.cut_short(node))

    def by_preference(self, nodes: Iterable[str]) -> list[str]:
        """Return *nodes*, those later that will be taken away before the job could end, and those last that are not well.

        All are judged by the same looks, whatever comes in meanwhile.
        """
        looks = self._told

        def worth(node: str) -> int:
            why = self._against(node, looks)
            return 0 if not why else 1 if why == self.cut_short(node) else 2

        return sorted(nodes, key=worth)

    def close(self) -> None:
        """Let go of all connections."""
        if self._sweeper is not None:
            self._sweeper.close()

    def _look(self, nodes: list[str]) -> None:
        self.remember()
        try:
            self._sweeper = self._sweeper or open_sweeper(self.cluster)
            asked = None if self.cluster.kind == "local" else nodes  # one look at this machine tells of all its nodes
            looks = self._sweeper.sweep(max(0.5, self._until - time.monotonic()), asked)
            for node, look in looks.items():
                if isinstance(look.found, Unknown):
                    note(log, "preflight.blind", node=node, why=look.found.why)
            # All at once: where one look tells of all nodes, no node may come before another because of when it was taken in.
            self._told = {**self._told, **{node: assess_health(look) for node, look in looks.items()}}
        except (HoldfastError, OSError) as error:  # it could not look: that speaks against no node, and must stop no launch
            note(log, "preflight.blind", why=error)

    def _try_out(self, nodes: list[str]) -> None:
        """Have nodes work for a moment. One that cannot is blind, which speaks against nobody; what comes too late counts the next time."""
        try:
            with open_burn_in_connections(self.cluster) as posts:
                for node, found in BurnInRunner(posts, BurnInPlan.of(self.cluster.burn_in, short=True)).try_out(nodes).items():
                    note(log, "preflight.tried", node=node, outcome=found.mark, reason=found.reason)
                    self._failed.pop(node, None)
                    if found.mark is CheckMark.FAILED:
                        self._failed[node] = found.reason
        except (HoldfastError, OSError) as error:  # as for a look
            note(log, "preflight.blind", why=error)
