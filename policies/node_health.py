"""What is to be thought of a node, from a look at it and from what was thought of it before. It worsens at once, and mends slowly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final

from detectors.all_kinds import CATALOGUE
from detectors.catalogue import Fault, RecommendedAction
from detectors.evidence import NOT_REQUESTED, Unknown
from detectors.health import judge
from detectors.probe_result import NodeProbe, UnansweredProbe
from detectors.readings import NodeReading
from detectors.thresholds import THRESHOLDS

CLEAN: Final = 3
"""Looks in a row that have to show a node without a fault before that is thought over: so no verdict flaps."""
HELD: Final = THRESHOLDS.recent
"""Seconds for which a fault that makes a node unhealthy counts at least, after it was last seen. Many such faults are a line of a
log and no state: their silence proves little. A single look judges the same time of the log, so both ways of looking agree."""
FRESH: Final = 3600.0
"""Seconds for which a verdict speaks of now, where nobody has looked since."""


class NodeHealthState(StrEnum):
    """What is thought of a node, best to worst; of the last two nobody can tell how it is."""

    OK = "ok"
    DEGRADED = "degraded"
    """It works, and shows a fault that is to be watched."""
    UNHEALTHY = "unhealthy"
    """It shows a fault that asks for it, or one of its devices, to be taken out of service."""
    UNREACHABLE = "unreachable"
    """It did not answer, several times in a row."""
    UNKNOWN = "unknown"
    """It could not be looked at, for reasons that are not its own."""


UNHEALTHY: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
HARMLESS: Final = frozenset({RecommendedAction.RECORD, RecommendedAction.USER_ERROR})
OF_USE: Final = frozenset({"host-overloaded"})
"""Kinds that say how busy a node is now, and not that anything is wrong with it: they are shown, and make no node degraded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFinding:
    """A fault of a node, from the look that first showed it until it is over."""

    kind: str
    part: str
    """What tells it from others of its kind: the fault's signature."""
    quote: str
    since: float
    """When a look first showed it."""
    seen: float
    """When a look last showed it."""
    clean: int = 0
    """Looks in a row that did not show it."""

    @property
    def recommended_action(self) -> RecommendedAction:
        """Return how much it asks for. A kind that this version does not know is to be watched."""
        return CATALOGUE[self.kind].recommended_action if self.kind in CATALOGUE else RecommendedAction.MONITOR

    @property
    def words(self) -> str:
        """Return it in words."""
        return f"{self.kind}: {self.quote}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAssessment:
    """What is thought of a node."""

    node: str
    status: str
    """A `NodeHealthState`."""
    since: float
    """Since when it has that standing."""
    at: float
    """When it was last looked at."""
    seen: float
    """When a look last told anything of it; 0: never."""
    findings: tuple[HealthFinding, ...] = ()
    lost: tuple[str, ...] = ()
    """Parts that a look once saw and the last one did not."""
    reason: str = ""
    """What kept the last look from telling how the node is; empty where it did tell."""

    @property
    def is_bad(self) -> bool:
        """Tell whether a job should rather run elsewhere."""
        return self.status in {NodeHealthState.UNHEALTHY, NodeHealthState.UNREACHABLE}

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return what speaks for it, the worst first."""
        return (*((self.reason,) if self.reason else ()), *(one.words for one in worst_first(self.findings)))

    def is_fresh(self, now: float) -> bool:
        """Tell whether it speaks of *now*."""
        return now - self.at <= FRESH


def worst_first(findings: Iterable[HealthFinding]) -> list[HealthFinding]:
    """Return *findings* by how much they ask for, the most first."""
    return sorted(findings, key=lambda one: -LEVELS.index(one.recommended_action))


LEVELS: Final = list(RecommendedAction)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChange:
    """What is new about a node."""

    node: str
    before: str
    """The standing; empty for a node that was never looked at."""
    after: str
    new: tuple[HealthFinding, ...] = ()
    over: tuple[HealthFinding, ...] = ()
    reason: str

    @property
    def words(self) -> str:
        """Return it in words."""
        moved = f"{self.before or 'new'} -> {self.after}" if self.before != self.after else self.after
        return f"{self.node}: {moved}: {self.reason}"


def assess_health(look: NodeProbe, before: HealthAssessment | None = None, earlier: NodeReading | None = None) -> HealthAssessment:
    """Return what is thought of a node after *look*.

    Counters are compared with the look *earlier*. What could not be looked at keeps what was held against it: not seen is not mended.
    """
    findings = before.findings if before is not None else ()
    if isinstance(look.found, UnansweredProbe):
        reason = f"no answer, {look.found.times} in a row: {look.found.why}"
        return _made(look, before, NodeHealthState.UNREACHABLE, findings, reason)
    if isinstance(look.found, Unknown):
        held = before is not None and before.status in {NodeHealthState.DEGRADED, NodeHealthState.UNHEALTHY, NodeHealthState.UNREACHABLE}
        status = before.status if held and before is not None else NodeHealthState.UNKNOWN
        return _made(look, before, status, findings, f"could not be looked at: {look.found.why}")
    lost = _lost(look.found, earlier, before.lost if before is not None else ())
    found = _findings(look, judge(look.found, earlier), findings, blind=bool(lost))
    status, reason = _standing(found), "; ".join(f"{name} is not seen any more: {why}" for name, why in lost.items())
    told = _made(look, before, NodeHealthState.UNKNOWN if lost and status is NodeHealthState.OK else status, found, reason)
    return replace(told, seen=look.at, lost=tuple(lost))


def health_change(before: HealthAssessment | None, after: HealthAssessment) -> HealthChange | None:
    """Return what is new about a node; nothing when all is as it was, or when it is new and well."""
    old, new = _parts(before), _parts(after)
    came = tuple(worst_first(one for key, one in new.items() if key not in old))
    over = tuple(one for key, one in old.items() if key not in new)
    known = before.status if before is not None else ""
    if not came and not over and known == after.status:
        return None
    if not known and after.status == NodeHealthState.OK and not came:
        return None
    if came or after.reason:
        reason = "; ".join([*([after.reason] if after.reason else []), *(one.words for one in came)])
    elif over:
        reason = f"over: {', '.join(dict.fromkeys(one.kind for one in over))}"
    else:
        held = ", ".join(dict.fromkeys(one.kind for one in worst_first(after.findings)))
        reason = f"it answers, and {held or 'nothing'} speaks against it"
    return HealthChange(node=after.node, before=known, after=after.status, new=came, over=over, reason=reason)


def _parts(verdict: HealthAssessment | None) -> dict[str, HealthFinding]:
    return {one.part: one for one in verdict.findings} if verdict is not None else {}


def _made(
    look: NodeProbe, before: HealthAssessment | None, status: str, findings: tuple[HealthFinding, ...], reason: str
) -> HealthAssessment:
    same = before is not None and before.status == status
    return HealthAssessment(
        node=look.node,
        status=str(status),
        since=before.since if same and before is not None else look.at,
        at=look.at,
        seen=before.seen if before is not None else 0.0,
        findings=findings,
        lost=before.lost if before is not None else (),
        reason=reason,
    )


def _findings(look: NodeProbe, faults: list[Fault], before: tuple[HealthFinding, ...], *, blind: bool) -> tuple[HealthFinding, ...]:
    """Return what the look shows, and what looks before showed and is not thought to be over yet."""
    old = {one.part: one for one in before}
    now = {
        fault.signature: HealthFinding(
            kind=fault.kind,
            part=fault.signature,
            quote=fault.quote,
            since=old[fault.signature].since if fault.signature in old else look.at,
            seen=look.at,
        )
        for fault in faults
    }
    waning = (replace(one, clean=one.clean + (not blind)) for part, one in old.items() if part not in now)  # half blind, it proves nothing
    return (*now.values(), *(one for one in waning if not _is_over(one, look.at)))


def _is_over(one: HealthFinding, now: float) -> bool:
    return one.clean >= CLEAN and (one.recommended_action not in UNHEALTHY or now - one.seen >= HELD)


def _standing(findings: tuple[HealthFinding, ...]) -> NodeHealthState:
    recommended_actions = {one.recommended_action for one in findings if one.kind not in OF_USE}
    if recommended_actions & UNHEALTHY:
        return NodeHealthState.UNHEALTHY
    return NodeHealthState.DEGRADED if recommended_actions - HARMLESS else NodeHealthState.OK


def _lost(now: NodeReading, earlier: NodeReading | None, before: tuple[str, ...]) -> dict[str, str]:
    """Return the parts that looks before saw and this one did not, with the reason."""
    blind = {
        field.name: part.why for field in fields(now) if isinstance(part := getattr(now, field.name), Unknown) and part != NOT_REQUESTED
    }
    return {name: why for name, why in blind.items() if name in before or not isinstance(getattr(earlier, name, Unknown("")), Unknown)}
