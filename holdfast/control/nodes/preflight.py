"""Health checks of nodes before ranks are placed on them, while the launch does its other work; and of spare nodes now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.errors import HoldfastError
from holdfast.history import History
from holdfast.history.health_samples import health_by_node
from holdfast.log import note
from holdfast.policies.nodes.node_health import HealthAssessment, NodeHealthState, assess_health
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.runner import BurnInRunner
from holdfast.probe.burn_in.session import open_burn_in_connections
from holdfast.probe.sweep import Sweeper, open_sweeper
from holdfast.spec import Cluster

log = logging.getLogger("holdfast.control")

SECONDS: Final = 3.0
"""How long a launch waits for a check, at most, from its begin. Agents start meanwhile; a node without a result by then is used. On a local
cluster nothing waits: all nodes are this machine, so the check cannot change which are chosen, and its result is reported when it comes."""
SPARE_INTERVAL: Final = 300.0
"""Seconds between two checks of spare nodes while training runs: what a recovery needs is known before it begins."""
FRESH: Final = 30.0
"""Seconds for which the check of a node need not be repeated."""


@dataclass(slots=True)
class Preflight:
    """What speaks against using nodes: own checks, and what `cluster-health` last wrote to the history."""

    cluster: Cluster
    history: History
    on: bool = True
    why_suspect: Callable[[str], str] = lambda _: ""
    """Returns why a node is suspect, whoever found that."""
    cut_short: Callable[[str], str] = lambda _: ""
    """Returns what takes a node away before the job could end."""
    _checked: dict[str, HealthAssessment] = field(default_factory=dict)
    _recorded: dict[str, HealthAssessment] = field(default_factory=dict)
    """Health by the history."""
    _burn_in_failures: dict[str, str] = field(default_factory=dict)
    """Node to why it failed the short burn-in."""
    _sweeper: Sweeper | None = None
    _check_thread: threading.Thread | None = None
    _burn_in_thread: threading.Thread | None = None
    """The short burn-in alongside the check, if the cluster wants one."""
    _until: float = 0.0
    _next_spare_check: float = 0.0
    _reported: dict[str, str] = field(default_factory=dict)
    """Node to what was last reported against it."""

    def begin(self, nodes: Collection[str]) -> None:
        """Begin to check *nodes* in another thread, unless a check is running."""
        now = time.time()
        wanted = [node for node in nodes if node not in self._checked or now - self._checked[node].at > FRESH]
        if not self.on or not wanted or (self._check_thread is not None and self._check_thread.is_alive()):
            return
        self._until = time.monotonic() + SECONDS
        self._check_thread = threading.Thread(target=self._check, args=(wanted,), name="preflight", daemon=True)
        self._check_thread.start()
        if self.has_burn_in and (self._burn_in_thread is None or not self._burn_in_thread.is_alive()):
            self._burn_in_thread = threading.Thread(target=self._burn_in, args=(wanted,), name="short burn-in", daemon=True)
            self._burn_in_thread.start()

    @property
    def has_burn_in(self) -> bool:
        """Return whether nodes run a short burn-in before a launch; on a local cluster, one machine, only if that is configured."""
        wanted = self.cluster.burn_in.before_launch
        return self.cluster.kind != "local" if wanted is None else wanted

    def finish(self) -> None:
        """Wait for the running checks, up to their deadline, if their results can change anything."""
        check = self._check_thread if self.cluster.kind != "local" else None
        for thread in (check, self._burn_in_thread):
            if thread is not None:
                thread.join(max(0.0, self._until - time.monotonic()))

    def remember(self) -> None:
        """Read the nodes' health from the history, if it can be reached."""
        if self.on:
            try:
                self._recorded = health_by_node(self.history, self.cluster.name)
            except HoldfastError as error:
                note(log, "preflight.no-history", why=error)

    def maintain(self, spares: Collection[str]) -> None:
        """Check spare nodes when it is time to, without waiting."""
        if spares and time.monotonic() >= self._next_spare_check:
            self._next_spare_check = time.monotonic() + SPARE_INTERVAL
            self.begin(spares)

    def close(self) -> None:
        """Close all connections."""
        if self._sweeper is not None:
            self._sweeper.close()

    # -- results ------------------------------------------------------------------------------------------------------

    def objection(self, node: str) -> str:
        """Return what speaks against using *node*; empty when nothing does, or nothing is known."""
        return self._objection(node, self._checked)

    def _objection(self, node: str, checked: Mapping[str, HealthAssessment]) -> str:
        now = time.time()
        for health in (checked.get(node), self._recorded.get(node)):
            if health is not None and health.status == NodeHealthState.UNHEALTHY and health.is_fresh(now):
                return f"unhealthy: {'; '.join(health.evidence[:2])}"
        if (failed := self._burn_in_failures.get(node)) is not None:
            return f"failed the short burn-in: {failed}"
        return self.why_suspect(node) or self.cut_short(node)

    def is_healthy(self, node: str) -> bool:
        """Return whether nothing speaks against the health of *node*, though it may be taken away before the job ends."""
        return self.objection(node) in ("", self.cut_short(node))

    def news(self, nodes: Iterable[str]) -> dict[str, list[str]]:
        """Return the objections against *nodes* that are new since the last call, each with its nodes."""
        found: dict[str, list[str]] = {}
        for node in nodes:
            why = self.objection(node)
            if why and self._reported.get(node) != why:
                found.setdefault(why, []).append(node)
            self._reported[node] = why
        return found

    def by_preference(self, nodes: Iterable[str]) -> list[str]:
        """Return *nodes*: first those without objection, then those that are taken away before the job ends, last the unhealthy ones.

        All are compared by the same results, whatever arrives meanwhile.
        """
        checked = self._checked

        def rank(node: str) -> int:
            why = self._objection(node, checked)
            return 0 if not why else 1 if why == self.cut_short(node) else 2

        return sorted(nodes, key=rank)

    # -- in other threads ---------------------------------------------------------------------------------------------

    def _check(self, nodes: list[str]) -> None:
        self.remember()
        try:
            self._sweeper = self._sweeper or open_sweeper(self.cluster)
            targets = None if self.cluster.kind == "local" else nodes  # one check of this machine covers all its nodes
            found = self._sweeper.sweep(max(0.5, self._until - time.monotonic()), targets)
            for node, sample in found.items():
                if isinstance(sample.found, Unknown):
                    note(log, "preflight.skipped", node=node, why=sample.found.why)
            # All at once: where one check covers all nodes, none may be preferred because its result was stored earlier.
            self._checked = {**self._checked, **{node: assess_health(sample) for node, sample in found.items()}}
        except (HoldfastError, OSError) as error:  # a check that fails speaks against no node, and must stop no launch
            note(log, "preflight.skipped", why=error)

    def _burn_in(self, nodes: list[str]) -> None:
        """Run the short burn-in. A node that cannot run it is not failed by that; late results count for the next launch."""
        try:
            with open_burn_in_connections(self.cluster) as connections:
                plan = BurnInPlan.of(self.cluster.burn_in, short=True)
                for node, found in BurnInRunner(connections, plan).try_out(nodes).items():
                    note(log, "preflight.burn-in", node=node, outcome=found.mark, reason=found.reason)
                    self._burn_in_failures.pop(node, None)
                    if found.mark is CheckMark.FAILED:
                        self._burn_in_failures[node] = found.reason
        except (HoldfastError, OSError) as error:  # as for a check
            note(log, "preflight.skipped", why=error)
