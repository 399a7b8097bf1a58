"""Checking a cluster up: sweep, judge each node by the look before, and remember. The same for a flow and for the command line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from detectors.evidence import Unknown
from detectors.health import unknown_signals
from detectors.probe_result import NodeProbe
from detectors.readings import NodeReading
from holdfast.history import History
from holdfast.history.health_samples import KnownHealth, latest_health, save_sweep
from holdfast.probe.sweep import DEADLINE, Sweeper
from holdfast.report.wording import plural
from policies.node_health import HealthAssessment, HealthChange, NodeHealthState, assess_health, health_change


@dataclass(slots=True)
class Checkup:
    """One cluster being checked up, sweep after sweep over the same connections."""

    cluster: str
    sweeper: Sweeper
    history: History
    looks: dict[str, NodeProbe] = field(default_factory=dict)
    """What the last sweep found."""
    verdicts: dict[str, HealthAssessment] = field(default_factory=dict)
    changes: list[HealthChange] = field(default_factory=list)
    at: float = 0.0
    """When the last sweep began."""
    seconds: float = 0.0
    """What it took."""
    _known: dict[str, KnownHealth] | None = None

    def sweep(self, deadline: float = DEADLINE) -> Mapping[str, NodeProbe]:
        """Look at all nodes."""
        self.at, begun = time.time(), time.monotonic()
        self.looks = self.sweeper.sweep(deadline)
        self.seconds = time.monotonic() - begun
        return self.looks

    def classify(self) -> list[HealthChange]:
        """Judge each node, by what is known from the look before, and return what changed."""
        if self._known is None:
            self._known = latest_health(self.history, self.cluster)
        before = {node: self._known.get(node, KnownHealth()) for node in self.looks}
        self.verdicts = {node: assess_health(look, before[node].verdict, before[node].reading) for node, look in self.looks.items()}
        self.changes = [change for node, told in self.verdicts.items() if (change := health_change(before[node].verdict, told)) is not None]
        self._known |= {node: KnownHealth(verdict=told, reading=self._reading(node, before[node])) for node, told in self.verdicts.items()}
        return self.changes

    def record(self) -> None:
        """Write what the sweep found into the history."""
        readings = {node: look.found for node, look in self.looks.items() if isinstance(look.found, NodeReading)}
        save_sweep(self.history, self.cluster, self.verdicts, self.changes, readings)

    def blind(self, node: str) -> dict[str, str]:
        """Return what the last sweep could not see of *node*, and why."""
        found = self.looks[node].found
        if isinstance(found, Unknown):
            return {"node": found.why}
        return dict(unknown_signals(found)) if isinstance(found, NodeReading) else {}

    def counts(self) -> dict[str, int]:
        """Return how many nodes have which standing, best first; those that none has are left out."""
        standings = [told.status for told in self.verdicts.values()]
        return {str(one): standings.count(one) for one in NodeHealthState if one in standings}

    @property
    def describe(self) -> str:
        """Return the last sweep in a sentence."""
        counted = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        return f"{plural(len(self.verdicts), 'node')} in {self.seconds:.1f} s: {counted}"

    def _reading(self, node: str, before: KnownHealth) -> NodeReading | None:
        found = self.looks[node].found
        return found if isinstance(found, NodeReading) else before.reading
