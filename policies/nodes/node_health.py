"""Assess the health of a node from a probe and its previous health. Health gets worse at once and improves slowly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import Fault, RecommendedAction
from holdfast.detectors.confirmation import confirmed
from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.findings import THRESHOLDS
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.probe_result import NodeProbe, UnansweredProbe
from holdfast.detectors.nodes.readings import NodeReading

CLEAN: Final = 3
"""Consecutive probes without a fault before it counts as over, so that health does not flap."""
HELD: Final = THRESHOLDS.recent
"""Minimum seconds that a fault keeps a node unhealthy after it was last seen. Many such faults are log lines, not states, so their absence
proves little. A single probe reads the same span of the log, so both agree."""
FRESH: Final = 3600.0
"""Seconds for which an assessment is valid without a newer probe."""


class NodeHealthState(StrEnum):
    """Health of a node, best to worst; in the last two states its faults are not known."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It works, and shows a fault to monitor."""
    UNHEALTHY = "unhealthy"
    """It shows a fault for which it, or one of its devices, should be taken out of service."""
    UNREACHABLE = "unreachable"
    """It did not answer, several times in a row."""
    UNKNOWN = "unknown"
    """It could not be probed, for reasons that are not its own."""


UNHEALTHY: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
HARMLESS: Final = frozenset({RecommendedAction.RECORD, RecommendedAction.USER_ERROR})
OTHERS_SAY: Final = frozenset({"kubernetes", "dcgm"})
"""Parts of a reading that a monitor answers for, beside what is read of the node itself: that it does not answer says nothing of the node,
and keeps what it said before."""
LOAD_KINDS: Final = frozenset({"host-overloaded"})
"""Kinds that report load, not a defect: they are shown, but do not make a node degraded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFinding:
    """A fault of a node, from the first probe that showed it until it is over."""

    kind: str
    part: str
    """The fault's signature, which distinguishes it from others of its kind."""
    quote: str
    since: float
    """Time of the first probe that showed it."""
    seen: float
    """Time of the last probe that showed it."""
    clean: int = 0
    """Consecutive probes without it."""
    unproven: bool = False
    """One line of a log that does not prove it, and nothing else on the node that shows it."""

    @property
    def recommended_action(self) -> RecommendedAction:
        """Return its recommended action; an unproven one, and a kind that this version does not know, are monitored."""
        if self.unproven or self.kind not in CATALOGUE:
            return RecommendedAction.MONITOR
        return CATALOGUE[self.kind].recommended_action

    @property
    def words(self) -> str:
        """Return kind and evidence."""
        return f"{self.kind}: {self.quote}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAssessment:
    """Health of a node, with the findings behind it."""

    node: str
    status: str
    """A `NodeHealthState`."""
    since: float
    """Since when it has that status."""
    at: float
    """Time of the last probe."""
    seen: float
    """Time of the last probe with a reading; 0: never."""
    findings: tuple[HealthFinding, ...] = ()
    lost: tuple[str, ...] = ()
    """Parts that an earlier probe could read and the last one could not."""
    reason: str = ""
    """Why the last probe could not assess the node; empty if it could."""

    @property
    def is_bad(self) -> bool:
        """Return whether a job should run on another node."""
        return self.status in {NodeHealthState.UNHEALTHY, NodeHealthState.UNREACHABLE}

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return the evidence, the most severe first."""
        return (*((self.reason,) if self.reason else ()), *(one.words for one in worst_first(self.findings)))

    def is_fresh(self, now: float) -> bool:
        """Return whether it is recent enough at *now*."""
        return now - self.at <= FRESH


def worst_first(findings: Iterable[HealthFinding]) -> list[HealthFinding]:
    """Return *findings*, the most severe first."""
    return sorted(findings, key=lambda one: -LEVELS.index(one.recommended_action))


LEVELS: Final = list(RecommendedAction)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChange:
    """A change of a node's health."""

    node: str
    before: str
    """The status; empty for a node that was never looked at."""
    after: str
    new: tuple[HealthFinding, ...] = ()
    over: tuple[HealthFinding, ...] = ()
    reason: str

    @property
    def words(self) -> str:
        """Return the change as one line."""
        moved = f"{self.before or 'new'} -> {self.after}" if self.before != self.after else self.after
        return f"{self.node}: {moved}: {self.reason}"


def assess_health(probe: NodeProbe, before: HealthAssessment | None = None, earlier: NodeReading | None = None) -> HealthAssessment:
    """Return the health of a node after a probe.

    Counters are compared with the *earlier* reading. Findings of a part that could not be read are kept: not seen is not healthy.
    """
    findings = before.findings if before is not None else ()
    if isinstance(probe.found, UnansweredProbe):
        reason = f"no answer, {probe.found.times} in a row: {probe.found.why}"
        return _assessment(probe, before, NodeHealthState.UNREACHABLE, findings, reason)
    if isinstance(probe.found, Unknown):
        held = before is not None and before.status in {NodeHealthState.DEGRADED, NodeHealthState.UNHEALTHY, NodeHealthState.UNREACHABLE}
        status = before.status if held and before is not None else NodeHealthState.UNKNOWN
        return _assessment(probe, before, status, findings, f"could not be probed: {probe.found.why}")
    lost = _lost(probe.found, earlier, before.lost if before is not None else ())
    found = _findings(probe, judge(probe.found, earlier), findings, incomplete=bool(lost))
    own = {name: why for name, why in lost.items() if name not in OTHERS_SAY}
    status, reason = _standing(found), "; ".join(f"{name} is no longer readable: {why}" for name, why in own.items())
    assessment = _assessment(probe, before, NodeHealthState.UNKNOWN if own and status is NodeHealthState.HEALTHY else status, found, reason)
    return replace(assessment, seen=probe.at, lost=tuple(lost))


def health_change(before: HealthAssessment | None, after: HealthAssessment) -> HealthChange | None:
    """Return the change between two assessments; None if there is none, or if a new node is healthy."""
    old, new = _parts(before), _parts(after)
    came = tuple(worst_first(one for key, one in new.items() if key not in old))
    over = tuple(one for key, one in old.items() if key not in new)
    known = before.status if before is not None else ""
    if not came and not over and known == after.status:
        return None
    if not known and after.status == NodeHealthState.HEALTHY and not came:
        return None
    if came or after.reason:
        reason = "; ".join([*([after.reason] if after.reason else []), *(one.words for one in came)])
    elif over:
        reason = f"over: {', '.join(dict.fromkeys(one.kind for one in over))}"
    else:
        held = ", ".join(dict.fromkeys(one.kind for one in worst_first(after.findings)))
        reason = f"it answers; open faults: {held or 'none'}"
    return HealthChange(node=after.node, before=known, after=after.status, new=came, over=over, reason=reason)


def _parts(assessment: HealthAssessment | None) -> dict[str, HealthFinding]:
    return {one.part: one for one in assessment.findings} if assessment is not None else {}


def _assessment(
    probe: NodeProbe, before: HealthAssessment | None, status: str, findings: tuple[HealthFinding, ...], reason: str
) -> HealthAssessment:
    same = before is not None and before.status == status
    return HealthAssessment(
        node=probe.node,
        status=str(status),
        since=before.since if same and before is not None else probe.at,
        at=probe.at,
        seen=before.seen if before is not None else 0.0,
        findings=findings,
        lost=before.lost if before is not None else (),
        reason=reason,
    )


def _findings(probe: NodeProbe, faults: list[Fault], before: tuple[HealthFinding, ...], *, incomplete: bool) -> tuple[HealthFinding, ...]:
    """Return the findings of the probe, and earlier ones that are not over yet."""
    old, signals = {one.part: one for one in before}, confirmed(faults)
    now = {
        fault.signature: HealthFinding(
            kind=fault.kind,
            part=fault.signature,
            quote=fault.quote,
            since=old[fault.signature].since if fault.signature in old else probe.at,
            seen=probe.at,
            unproven=fault.needs_proof and fault.key not in signals,
        )
        for fault in faults
    }
    fading = (
        replace(one, clean=one.clean + (not incomplete)) for part, one in old.items() if part not in now
    )  # an incomplete probe proves nothing
    return (*now.values(), *(one for one in fading if not _is_over(one, probe.at)))


def _is_over(one: HealthFinding, now: float) -> bool:
    return one.clean >= CLEAN and (one.recommended_action not in UNHEALTHY or now - one.seen >= HELD)


def _standing(findings: tuple[HealthFinding, ...]) -> NodeHealthState:
    recommended_actions = {one.recommended_action for one in findings if one.kind not in LOAD_KINDS}
    if recommended_actions & UNHEALTHY:
        return NodeHealthState.UNHEALTHY
    return NodeHealthState.DEGRADED if recommended_actions - HARMLESS else NodeHealthState.HEALTHY


def _lost(now: NodeReading, earlier: NodeReading | None, before: tuple[str, ...]) -> dict[str, str]:
    """Return the parts that earlier probes could read and this one could not, with the reason."""
    unknown = {
        field.name: part.why for field in fields(now) if isinstance(part := getattr(now, field.name), Unknown) and part != NOT_REQUESTED
    }
    return {name: why for name, why in unknown.items() if name in before or not isinstance(getattr(earlier, name, Unknown("")), Unknown)}
