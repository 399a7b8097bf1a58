"""Diagnose an incident: from all evidence to the root cause and its secondary failures, or to a user error if the failure follows the step.

The rules (what explains what, what nodes share, what makes a failure the script's, how long to wait for more evidence) are tables in
`associations.toml`. `causes` ranks the hypotheses, `correlation` infers faults from several observations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.detectors.associations import ASSOCIATIONS, follows_step, script_rule, settle_rule
from holdfast.detectors.catalogue import (
    CATALOGUE,
    CATALOGUE_ACTIONS,
    TAKES_NODE_OUT,
    Attribution,
    Fault,
    FaultKey,
    RecommendedAction,
    RecommendedActions,
    fault_kind,
)
from holdfast.detectors.causes import NEGLIGIBLE, Candidate, candidates, device_of, explained
from holdfast.detectors.confirmation import NEAR, UNUSED, confirmed
from holdfast.detectors.correlation import inferred
from holdfast.detectors.evidence import (
    AgentUnreachable,
    CheckpointFailure,
    EarlyExit,
    Evidence,
    FrozenParameters,
    GroupFailure,
    HangLimits,
    InterruptedRecovery,
    LogLine,
    LossHistory,
    MemstoreFailure,
    NodeLeaving,
    NodePartitioned,
    NonFiniteLoss,
    Progress,
    RecoveryTimeout,
    ReplaceRanksFailure,
    ReplicaDigests,
    Sample,
    SchedulerNodeState,
    StartFailure,
    StepBreakdowns,
    StepTimes,
    WorkerException,
    WorkerExit,
    WorkerStop,
)
from holdfast.detectors.log_lines.xids import see_xid
from holdfast.detectors.nodes.gpu_readings import XidEvent
from holdfast.detectors.nodes.health import see_growth, see_reading
from holdfast.detectors.nodes.node import see_agent_unreachable, see_leaving, see_partition, see_scheduler_state
from holdfast.detectors.nodes.readings import CounterGrowth, NodeReading, Reading
from holdfast.detectors.sources import source_of
from holdfast.detectors.training.checkpoint import see_checkpoint_failure, see_memory
from holdfast.detectors.training.exceptions import EXCEPTION, NO_PLACE
from holdfast.detectors.training.groups import see_group_failure, see_replace_ranks_failure
from holdfast.detectors.training.losses import see_frozen_parameters, see_losses, see_non_finite_loss, see_replica_digests
from holdfast.detectors.training.process import EXIT_CODE, see_exit, see_start, see_stop
from holdfast.detectors.training.progress import see_cut_short, see_early_exit, see_overrun, see_progress
from holdfast.detectors.training.stragglers import see_step_breakdowns, see_step_times

_BROKEN = WorkerException(type="ValueError", message="bad shape", traceback='File "train.py", line 3, in <module>')

USER_ERROR: Final = fault_kind(
    id="user-error",
    title="The script fails the same way at the same step wherever it runs",
    component="user code",
    source="diagnosis",
    recommended_action=RecommendedAction.USER_ERROR,
    attributed_to=Attribution.USER_CODE,
    action="fix the script: the traceback of the first failing rank is in the incident; running the job again will not help",
    unhealthy=Sample(
        evidence=(
            WorkerExit(node="n0", rank=0, at=0.0, code=1, step=7, raised=_BROKEN),
            WorkerExit(node="n1", rank=1, at=0.1, code=1, step=7, raised=_BROKEN),
        )
    ),
    healthy=Sample(
        evidence=(
            WorkerExit(node="n0", rank=0, at=0.0, signal=9, step=7),
            WorkerExit(node="n1", rank=1, at=0.1, signal=9, step=7),
        )
    ),
    weight=99,
)

SILENCE_SECONDS: Final = 5.0
"""Seconds after which an unreachable agent is noticed, by default (`timeouts.heartbeat`)."""
_FOLLOWS: Final = 0.9
"""Share of the weight of failures that moves to the script once they follow the step."""
_SURELY: Final = 0.5
"""From this strength on, a fault that another one elsewhere explains does not count against its node."""
_MAX_WRONG: Final = 3
"""Faults that a measurement rules out of which the reason says so."""
_SAME_TIME: Final = 1.0
"""Clock error in seconds within which a warning may belong to the root cause."""
_NO_NAME: Final[Mapping[str, str]] = {}
_MISSING: Final = ("ModuleNotFoundError", "ImportError")
_START_ERRORS: Final[Mapping[tuple[str, str], str]] = {
    **{(EXCEPTION.id, name): "Correct the script, then run the job again" for name in ("SyntaxError", "IndentationError", "TabError")},
    **{
        (EXCEPTION.id, name): "Install what is missing for the Python that runs the workers (`python` of the job), or correct the import"
        for name in _MISSING
    },
    (EXIT_CODE.id, "status 2"): "Correct the script's arguments (`args` of the job): a program exits with status 2 if it cannot use them",
}
"""Kind and type of an error that a script meets at every start, to what to do about it."""


def _see_line(seen: LogLine, limits: HangLimits) -> Fault | None:
    from holdfast.detectors.log_lines.classification import see_line  # noqa: PLC0415 (loads a thousand signatures, only if there are lines)

    return see_line(seen, limits)


DETECTORS: Final[dict[type, Callable[[Any, HangLimits], Fault | list[Fault] | None]]] = {
    WorkerExit: see_exit,
    WorkerStop: see_stop,
    AgentUnreachable: see_agent_unreachable,
    NodePartitioned: see_partition,
    Progress: see_progress,
    EarlyExit: see_early_exit,
    CheckpointFailure: see_checkpoint_failure,
    MemstoreFailure: see_memory,
    StartFailure: see_start,
    InterruptedRecovery: see_cut_short,
    NodeLeaving: see_leaving,
    SchedulerNodeState: see_scheduler_state,
    RecoveryTimeout: see_overrun,
    GroupFailure: see_group_failure,
    ReplaceRanksFailure: see_replace_ranks_failure,
    NodeReading: see_reading,
    CounterGrowth: see_growth,
    XidEvent: see_xid,
    NonFiniteLoss: see_non_finite_loss,
    LossHistory: see_losses,
    StepTimes: see_step_times,
    StepBreakdowns: see_step_breakdowns,
    ReplicaDigests: see_replica_digests,
    FrozenParameters: see_frozen_parameters,
    LogLine: _see_line,
}
"""Type of evidence to its detector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """An earlier failure of this job."""

    node: str | None
    step: int | None
    signature: str
    kind: str = ""
    at: float = 0.0
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStart:
    """The first start of a job that has made no progress yet."""

    ranks: frozenset[int]
    """All ranks of the job."""
    spares: int = 0
    """Nodes on which the ranks could run instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnosis of an incident: the *root* cause, its secondary failures, and the reason."""

    root: Fault
    secondary_failures: tuple[Fault, ...]
    reason: str
    candidates: tuple[Candidate, ...] = ()
    """All hypotheses, the most likely first."""
    excused: tuple[Fault, ...] = ()
    """Faults that do not count against their node: caused by another one, or only printed by its workers."""
    confirmed: Mapping[FaultKey, str] = field(default_factory=dict)
    """Faults that one log line does not prove, to the second signal that confirms them (`holdfast.detectors.confirmation`)."""

    def against_nodes(self) -> tuple[Fault, ...]:
        """Return the faults that count against the nodes they were seen on."""
        excused = {id(fault) for fault in self.excused}
        return tuple(fault for fault in (self.root, *self.secondary_failures) if id(fault) not in excused)


def see(evidence: Iterable[Evidence | Reading], limits: HangLimits) -> list[Fault]:
    """Return the faults in *evidence*, in its order."""
    return [fault for item in evidence for fault in _detect(item, limits)]


def _detect(item: Evidence | Reading, limits: HangLimits) -> Iterator[Fault]:
    found = DETECTORS[type(item)](item, limits)
    for fault in found if isinstance(found, list) else [found] if found is not None else []:
        yield fault if fault.source else replace(fault, source=source_of(item))


def evidence_wait_seconds(
    faults: Iterable[Fault], members: int, *, silence: float = SILENCE_SECONDS, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS
) -> float:
    """Return how many seconds to wait for more evidence before the diagnosis; *members* is the number of nodes with ranks.

    0 for a root cause that is certain, a moment for a failure that other nodes may share. If only secondary failures are known: long enough
    to notice the node that caused them, *silence* seconds if it is unreachable.
    """
    acting = [fault for fault in faults if recommended_actions.needs_action(fault)]
    rule = settle_rule(candidates(acting, recommended_actions)[0].fault.kind) if acting else None
    if rule is None:
        return 0.0
    if len({fault.node for fault in acting if fault.node}) >= members:
        return rule.all
    return silence + 1.0 if rule.some is None else rule.some


def diagnose(  # noqa: PLR0913 (all of them are what the job is known to be in)
    faults: Sequence[Fault],
    past: tuple[PastFailure, ...] = (),
    members: int = 2,
    places: Mapping[str, str] = _NO_NAME,
    recommended_actions: RecommendedActions = CATALOGUE_ACTIONS,
    *,
    first_start: FirstStart | None = None,
) -> Diagnosis:
    """Return the diagnosis of *faults* (at least one), given the job's *past* failures and the number of nodes with ranks.

    *places* maps the names of peers in faults (``rank 3``, a host, an address) to nodes. With *first_start*, an error of which a restart
    cannot cure the script is the script's at once.
    """
    faults = [fault for fault in faults if not _is_of_the_past(fault, past)] or faults
    signals = confirmed(faults)
    if further := list(inferred(faults, past, members, places, signals)):
        signals = confirmed([*faults, *further])
    all_faults = [*faults, *further]
    recommended_actions = replace(recommended_actions, confirmed=signals)
    ranked = candidates(all_faults, recommended_actions)
    root = ranked[0].fault
    cannot_start = _cannot_start(root, all_faults, members, first_start)
    why = cannot_start or _at_once(root, all_faults, members) or _again(root, past, members)
    if why is None:
        others = tuple(fault for fault in all_faults if fault is not root)
        reason = f"{root.kind} of {root.place}: {root.quote}" + _summary(ranked[0], recommended_actions)
        return Diagnosis(
            root=root,
            secondary_failures=others,
            reason=reason,
            candidates=tuple(ranked),
            excused=_excused(ranked[0], all_faults, members),
            confirmed=signals,
        )
    place = _place_in_script(root)
    said = root.quote.rstrip(". ") + (f" ({place})" if place and place not in root.quote else "")
    reason = f"{said}. {why[:1].upper()}{why[1:]}, so the script is at fault, not a node"
    if cannot_start is not None:
        reason += f". {start_error(root)}"
    user_error = replace(root, kind=USER_ERROR.id)
    return Diagnosis(
        root=user_error,
        secondary_failures=tuple(all_faults),
        reason=reason,
        candidates=_with_script(user_error, why, ranked),
        excused=tuple(all_faults),
        confirmed=signals,
    )


def _is_of_the_past(fault: Fault, past: Iterable[PastFailure]) -> bool:
    """Return whether *fault* is a line about an earlier failure of its node that was answered, and about nothing that lasts.

    A monitor may report what the kernel wrote about a process when the incident of that process is over.
    """
    if fault.rank is not None or not fault.log or fault.entry.recommended_action in TAKES_NODE_OUT:
        return False
    same = [old for old in past if old.node == fault.node and old.kind in CATALOGUE and fault.at <= old.at + _SAME_TIME]
    earlier = [Fault(kind=old.kind, at=old.at, node=old.node, quote="", signature=old.signature, device=old.device) for old in same]
    return any(max(explained(one, fault), explained(fault, one)) >= _SURELY for one in earlier)


def _with_script(root: Fault, why: str, ranked: list[Candidate]) -> tuple[Candidate, ...]:
    """Put the script in front of the hypotheses: it replaces the failures that follow the step."""
    first = ranked[0].fault
    twins = [one for one in ranked if (one.fault.kind, _identity(one.fault)) == (first.kind, _identity(first))]
    confidence = sum(one.confidence for one in twins)
    seen = tuple(sorted((fault for one in twins for fault in one.evidence), key=lambda fault: fault.at))
    explains = {id(fault): fault for one in twins for fault in one.explains if fault not in seen}
    unexplained = tuple(fault for fault in ranked[0].unexplained if id(fault) not in explains and fault not in seen)
    script = Candidate(
        fault=root,
        confidence=round(confidence * _FOLLOWS, 4),
        reason=why,
        evidence=seen,
        explains=tuple(explains.values()),
        unexplained=unexplained,
    )
    rest = [replace(one, confidence=round(one.confidence * (1 - _FOLLOWS), 4)) if one in twins else one for one in ranked]
    return script, *sorted((one for one in rest if one.confidence >= NEGLIGIBLE), key=lambda one: -one.confidence)


def _excused(root: Candidate, faults: Sequence[Fault], members: int) -> tuple[Fault, ...]:
    """Return the faults that do not count against their node; a fault on most nodes counts against none."""
    elsewhere = {id(fault) for fault in root.explains if fault.node != root.fault.node and explained(root.fault, fault) >= _SURELY}
    printed = {id(fault) for fault in faults if fault.rank is not None and isinstance(fault.entry.unhealthy.evidence, LogLine)}
    nodes = Counter(kind for kind, _ in {(fault.kind, fault.node) for fault in faults if fault.node and fault.kind != root.fault.kind})
    common = {kind for kind, count in nodes.items() if count > max(1, members // 2)}
    excused = elsewhere | printed | {id(fault) for fault in faults if fault.kind in common}
    return tuple(fault for fault in faults if id(fault) in excused and fault is not root.fault)


def unexplained_faults(root: Candidate, recommended_actions: RecommendedActions) -> list[Fault]:
    """Return the faults that *root* does not explain, without earlier warnings, which training survived."""
    return [fault for fault in root.unexplained if recommended_actions.needs_action(fault) or fault.at >= root.fault.at - _SAME_TIME]


def _summary(root: Candidate, recommended_actions: RecommendedActions) -> str:
    """Summarize other faults: further root causes, the number of secondary failures, and of unexplained faults."""
    left = [fault for fault in unexplained_faults(root, recommended_actions) if not fault.is_ruled_out]
    own = [fault for fault in left if fault.entry.weight >= ASSOCIATIONS.own]
    rest = len(left) - len(own)
    follow = len(root.explains) + len(root.evidence) - 1
    words = "".join(f"; also {fault.kind} of {fault.place}" for fault in own)
    wrong = [fault for fault in root.unexplained if fault.is_ruled_out and abs(fault.at - root.fault.at) <= NEAR]
    words += "".join(f"; {fault.kind} of {fault.place} is no cause: {fault.contradicted or UNUSED}" for fault in wrong[:_MAX_WRONG])
    words += f"; {follow} {'secondary failure' if follow == 1 else 'secondary failures'}" if follow else ""
    return words + (f"; {rest} unrelated {'fault' if rest == 1 else 'faults'} at the same time" if rest else "")


def _place_in_script(fault: Fault) -> str:
    """Return the file and line that *fault* came from, as an exception's signature has them; empty if it has none."""
    place = fault.signature.partition(" at ")[2] if fault.kind == EXCEPTION.id else ""
    return "" if place == NO_PLACE else place


def start_error(fault: Fault) -> str | None:
    """Return what to do about an error that a script raises whenever it is started; None for any other fault."""
    error = fault.signature.partition(" at ")[0]
    return _START_ERRORS.get((fault.kind, error))


def all_ranks_failed(fault: Fault, faults: Iterable[Fault], ranks: frozenset[int]) -> bool:
    """Return whether each of *ranks* failed as in *fault*."""
    return ranks <= {one.rank for one in faults if _identity(one) == _identity(fault)}


def _cannot_start(root: Fault, faults: Sequence[Fault], members: int, first_start: FirstStart | None) -> str | None:
    """Return the reason if *root* is a user error because it ended every rank at the job's first start, and will again.

    A single node that lacks a module could be replaced by a spare one, which may have it.
    """
    if first_start is None or start_error(root) is None or not all_ranks_failed(root, faults, first_start.ranks):
        return None
    if members == 1 and first_start.spares and root.signature.partition(" at ")[0] in _MISSING:
        return None
    count = len(first_start.ranks)
    return f"{'the only rank ends' if count == 1 else f'all {count} ranks end'} this way before the first step, and would again"


def _at_once(root: Fault, faults: Sequence[Fault], members: int) -> str | None:
    """Return the reason if *root* is a user error because several nodes have it in this incident."""
    rule = script_rule(root.kind)
    twins = {fault.node for fault in faults if fault.node and _identity(fault) == _identity(root)}
    if rule is None or not root.node or len(twins) < (members if rule.together == "all" else rule.together):
        return None
    if rule.reason:
        return f"{rule.reason} ({_listed(twins)})"
    return f"the same failure{_at_step(root)} on nodes {_listed(twins)} at once"


def _again(root: Fault, past: tuple[PastFailure, ...], members: int) -> str | None:
    """Return the reason if *root* is a user error because it happened before at the same step on another node (or on the only one).

    Without a known step the same line may fail hours apart because of the node: then it takes three occurrences.
    """
    twins = [old for old in past if (old.signature, old.step) == (root.signature, root.step)]
    if not follows_step(root.kind) or len(twins) < (1 if root.step is not None else 2):
        return None
    elsewhere = {old.node for old in twins if old.node and old.node != root.node}
    if elsewhere:
        return f"the same failure{_at_step(root)} first on {_listed(elsewhere)}, now on {root.node}"
    if members == 1:
        return f"the same failure{_at_step(root)} again after a restart, and there is no other node to compare"
    return None


def _identity(fault: Fault) -> tuple[str, int | None]:
    """Return what equal failures on two nodes have in common; of driver errors only the kind, as the device differs."""
    return fault.kind if fault.rank is None and device_of(fault) else fault.signature, fault.step


def _at_step(fault: Fault) -> str:
    return f" at step {fault.step}" if fault.step is not None else ""


def _listed(nodes: Iterable[str | None]) -> str:
    return ", ".join(sorted(node for node in nodes if node))
