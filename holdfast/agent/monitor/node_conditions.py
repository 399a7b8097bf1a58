"""What is new among the conditions and events of this node in its Kubernetes cluster, from one sample to the next."""

from __future__ import annotations

import logging
import math
from typing import Final

from holdfast.detectors.catalogue import Certainty
from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.kubernetes import judge_conditions, judge_events
from holdfast.detectors.nodes.readings import KubernetesReading
from holdfast.log import note

log = logging.getLogger("holdfast.agent.monitor")

MAX_REASONS: Final = 5
"""Reasons why conditions cannot be read that are reported, each once: a cluster that is being repaired may find many."""

QUOTED: Final = 120.0
"""Seconds around a line of the kernel log in which a monitor reports it: clocks differ, and it groups what repeats."""
KEPT: Final = 600.0
"""Seconds for which such a line is remembered: a sample is taken every minute, or soon after the line."""

Key = tuple[str, str]
"""Kind and part of a finding."""


def certainty_of(found: FaultFinding) -> Certainty:
    """Return how much the line of *found* says of the fault."""
    return Certainty.PROOF if found.is_proof else Certainty.LINE


class ConditionWatch:
    """Finds conditions that became bad since *began* (wall clock): one from before is old, as a line from before is in the kernel log.

    An event is news each time that it is reported again.
    """

    def __init__(self, began: float) -> None:
        self._began = self._since = math.floor(began)  # the API has whole seconds
        self._present: frozenset[Key] | None = None
        self._reported: frozenset[tuple[Key, float | None]] = frozenset()
        self._reasons: set[str] = set()
        self._lines: dict[Key, tuple[float, Certainty]] = {}

    def unreadable(self, found: KubernetesReading | Unknown) -> str | None:
        """Return why *found*, or its events, could not be read; None where that is reported already, or where nobody wanted to read it."""
        if isinstance(found, KubernetesReading):
            return None if not isinstance(found.events, Unknown) else self.unreadable(found.events)
        if found == NOT_REQUESTED or found.why in self._reasons or len(self._reasons) >= MAX_REASONS:
            return None
        self._reasons.add(found.why)
        note(log, "node-conditions.unreadable", why=found.why)
        return found.why

    def saw_line(self, found: FaultFinding, at: float) -> None:
        """Remember a line of this node's kernel log (*at*, wall clock): a monitor that quotes it says nothing new."""
        self._lines[found.kind, found.part] = at, certainty_of(found)

    def news(self, found: KubernetesReading | Unknown, at: float) -> list[tuple[FaultFinding, float]]:
        """Return what a sample from *at* (wall clock) found that the one before had not, each with when it began.

        The clock of who reports a condition may differ from this node's: it began between the two samples.
        """
        if isinstance(found, Unknown):
            return []
        before, since = self._present, self._since
        findings = {(one.kind, one.part): one for one in judge_conditions(found)}
        self._present, self._since = frozenset(findings), int(at)
        fresh = [
            one for key, one in findings.items() if (key not in before if before is not None else one.at is not None and one.at >= since)
        ]
        news = [(one, at if one.at is None else min(max(one.at, since), at)) for one in fresh]
        news += [(one, min(began, at)) for one, began in self._new_events(found)]
        self._lines = {key: (when, certainty) for key, (when, certainty) in self._lines.items() if at - when < KEPT}
        return [(one, began) for one, began in news if not self._is_quote(one, began)]

    def _is_quote(self, found: FaultFinding, at: float) -> bool:
        """Return whether the kernel log has the line that *found* quotes, or one that says more."""
        when, certainty = self._lines.get((found.kind, found.part), (-math.inf, Certainty.CONTRADICTED))
        return abs(at - when) < QUOTED and certainty >= certainty_of(found)

    def _new_events(self, found: KubernetesReading) -> list[tuple[FaultFinding, float]]:
        """Return the events since this watch began that were not reported before, or not so lately, each with its last time."""
        if isinstance(found.events, Unknown):
            return []
        before, findings = self._reported, {((one.kind, one.part), one.at): one for one in judge_events(found)}
        self._reported = frozenset(findings)
        return [(one, at) for (key, at), one in findings.items() if at is not None and at >= self._began and (key, at) not in before]
