"""What is new among the conditions of this node in its Kubernetes cluster, from one sample to the next."""

from __future__ import annotations

import logging
import math
from typing import Final

from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.findings import THRESHOLDS, FaultFinding, ReadingPair
from holdfast.detectors.nodes.kubernetes import judge_kubernetes
from holdfast.detectors.nodes.readings import KubernetesReading
from holdfast.log import note

log = logging.getLogger("holdfast.agent.monitor")

MAX_REASONS: Final = 5
"""Reasons why conditions cannot be read that are reported, each once: a cluster that is being repaired may find many."""

Key = tuple[str, str]
"""Kind and part of a finding."""


class ConditionWatch:
    """Finds conditions that became bad since *began* (wall clock): one from before is old, as a line from before is in the kernel log."""

    def __init__(self, began: float) -> None:
        self._since = math.floor(began)  # the API has whole seconds
        self._present: frozenset[Key] | None = None
        self._reasons: set[str] = set()

    def unreadable(self, found: KubernetesReading | Unknown) -> str | None:
        """Return why *found* could not be read; None where that is reported already, or where nobody wanted to read it."""
        if not isinstance(found, Unknown) or found == NOT_REQUESTED or found.why in self._reasons or len(self._reasons) >= MAX_REASONS:
            return None
        self._reasons.add(found.why)
        note(log, "node-conditions.unreadable", why=found.why)
        return found.why

    def news(self, found: KubernetesReading | Unknown, at: float) -> list[tuple[FaultFinding, float]]:
        """Return what a sample from *at* (wall clock) found that the one before had not, each with when it began.

        The clock of who reports a condition may differ from this node's: it began between the two samples.
        """
        if isinstance(found, Unknown):
            return []
        before, since = self._present, self._since
        findings = {(one.kind, one.part): one for one in judge_kubernetes(ReadingPair(now=found, limits=THRESHOLDS))}
        self._present, self._since = frozenset(findings), int(at)
        fresh = [
            one for key, one in findings.items() if (key not in before if before is not None else one.at is not None and one.at >= since)
        ]
        return [(one, at if one.at is None else min(max(one.at, since), at)) for one in fresh]
