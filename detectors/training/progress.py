"""Faults of progress: a job that hangs although its processes are alive, or a recovery that does not finish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any, Final

from holdfast.detectors.catalogue import Attribution, Fault, FaultKind, RecommendedAction, fault_kind
from holdfast.detectors.evidence import EarlyExit, HangLimits, InterruptedRecovery, Progress, RankProgress, RecoveryTimeout, Sample
from holdfast.detectors.training.hang_analysis import CIRCLE, MISMATCH, STUCK, HangFinding, explain, numbered

WINDOW: Final = 64
"""Number of newest steps for the adaptive limit."""
SLOWEST_FACTOR: Final = 2.0
"""Pauses up to this many times the slowest recent step are jitter, from checkpoints and busy machines."""
REACTION: Final = 0.25
"""Seconds between the limit and a reaction (polling, the start of a task). If the cause is proven they are subtracted from the limit, so
that the reaction comes at the limit."""
MOVING: Final = 5.0
"""Up to this many limits, a step in which ranks still start operations is long and not a hang (ours)."""

PAUSES: Final = 3.0
"""A pause is a hang once it is this many times the longest one from which the job continued by itself (ours)."""

_ORDINARY: Final = 2

_STEADY: Final = (0.3,) * 8


def _ranks(age: float, *, section: str | None = None) -> dict[int, RankProgress]:
    return {
        0: RankProgress(node="n0", step=40, age=age, section=section),
        1: RankProgress(node="n1", step=39, age=age, section=section),
    }


_define = partial(fault_kind, component="job", recommended_action=RecommendedAction.RESTART, attributed_to=Attribution.PROCESS)
HANG: Final = _define(
    id="job-hang",
    title="No rank makes progress although all processes are alive",
    source="heartbeats",
    action="restart the workers; the rank with the lowest step is the first suspect",
    unhealthy=Sample(Progress(at=0.0, ranks=_ranks(900.0), step_seconds=_STEADY)),
    healthy=Sample(Progress(at=0.0, ranks=_ranks(0.6), step_seconds=_STEADY)),
    weight=40,
)
SECTION: Final = _define(
    id="job-section-overrun",
    title="A declared long section takes longer than its own limit",
    source="heartbeats",
    action="restart the workers; raise the section's limit if it may take this long",
    unhealthy=Sample(Progress(at=0.0, ranks=_ranks(2000.0, section="evaluation"), step_seconds=_STEADY)),
    healthy=Sample(Progress(at=0.0, ranks=_ranks(900.0, section="evaluation"), step_seconds=_STEADY)),
    weight=40,
)
NEVER_STEPPED: Final = _define(
    id="job-never-stepped",
    title="A job never reaches its first step",
    source="heartbeats",
    action="restart the workers; then try other nodes",
    unhealthy=Sample(Progress(at=0.0, ranks={0: RankProgress(node="n0", step=0, age=1900.0)}, since_start=1900.0)),
    healthy=Sample(Progress(at=0.0, ranks={0: RankProgress(node="n0", step=0, age=90.0)}, since_start=90.0)),
    weight=40,
)
SILENT: Final = _define(
    id="job-output-silent",
    title="A script without heartbeats has printed nothing for longer than it may",
    source="worker output",
    action="restart the workers; raise `timeouts.log_silence` if it may be quiet for this long",
    unhealthy=Sample(
        evidence=Progress(at=0.0, ranks={}, steps_expected=False, output_age=90.0),
        limits=HangLimits(log_silence=60.0),
    ),
    healthy=Sample(
        evidence=Progress(at=0.0, ranks={}, steps_expected=False, output_age=20.0),
        limits=HangLimits(log_silence=60.0),
    ),
    weight=35,
)
NOT_ENDING: Final = _define(
    id="job-end-stuck",
    title="Some ranks exited with status 0, and the others neither exit nor show any activity",
    source="process exits, heartbeats, worker output",
    action="make all ranks exit together (a barrier, then `destroy_process_group`); raise `timeouts.exit_grace` if the last need longer",
    unhealthy=Sample(Progress(at=0.0, ranks=_ranks(900.0), step_seconds=_STEADY, ended=(2, 3), since_end=900.0)),
    healthy=Sample(Progress(at=0.0, ranks=_ranks(900.0), step_seconds=_STEADY, ended=(2, 3), since_end=30.0)),
    weight=40,
)
EARLY_SECONDS: Final = 10.0
"""Ranks that finish together exit within this many seconds (our choice)."""
EARLY: Final = _define(
    id="rank-exited-early",
    title="A rank exited with status 0 while others still run, and no step is known",
    source="process exits",
    recommended_action=RecommendedAction.MONITOR,
    action="if the others wait for it, make every rank take part from `init_process_group` to the end; else nothing needs to be done",
    unhealthy=Sample(EarlyExit(at=0.0, node="n0", ended=(1,), running=(0, 2, 3), ran=2.0, since=11.0)),
    healthy=Sample(EarlyExit(at=0.0, node="n0", ended=(1,), running=(0, 2, 3), ran=2.0, since=3.0)),
    weight=10,
)
OVERRUN: Final = _define(
    id="recovery-overrun",
    title="A recovery does not bring the job to a step within its action's timeout",
    source="heartbeats",
    action="the next action is tried at once; raise `timeouts` in the policy if the job needs longer to start",
    unhealthy=Sample(
        evidence=RecoveryTimeout(at=0.0, action="restart-workers", seconds=121.0, limit=120.0, reached={0: ("n0", 1, "started")})
    ),
    healthy=Sample(
        evidence=RecoveryTimeout(at=0.0, action="restart-workers", seconds=20.0, limit=120.0, reached={0: ("n0", 1, "started")})
    ),
    weight=45,
)


STALLS: Final = frozenset({HANG.id, MISMATCH.id, CIRCLE.id, STUCK.id})
"""Kinds of a job that has made steps and makes none any more."""


def hang_limit(step_seconds: tuple[float, ...], limits: HangLimits) -> float:
    """Return after how many seconds without progress a job counts as hung, from its own newest steps.

    The largest of: the least limit, *factor* median steps, and twice the slowest recent step.
    """
    recent = [seconds for seconds in step_seconds[-WINDOW:] if isfinite(seconds)]
    if not recent:
        return limits.startup
    return max(limits.hang_min, limits.hang_multiplier * median(recent), SLOWEST_FACTOR * max(recent))


def act_limit(seen: Progress, limits: HangLimits) -> float:
    """Return after how many seconds without progress a job that has made steps is hung, where nothing that its ranks say proves it.

    An evaluation, a save or a compilation that nobody declared takes many times as long as a step: the job is given *hang* seconds, and
    longer where it has gone on by itself after a long pause before.
    """
    return max(hang_limit(seen.step_seconds, limits), limits.hang, PAUSES * seen.longest_pause)


def without_grace(limits: HangLimits) -> HangLimits:
    """Return *limits* by which a job is stalled as soon as it makes no progress for longer than its own steps explain."""
    return replace(limits, hang=0.0)


def pause_in(seen: Progress, limits: HangLimits) -> float:
    """Return for how many seconds a job that makes steps has been quiet, if that is longer than its own steps explain; else 0."""
    if not (seen.steps_expected and seen.ranks and seen.step_seconds) or seen.ended or any(held.section for held in seen.ranks.values()):
        return 0.0
    quiet = min(held.age for held in seen.ranks.values())
    return quiet if quiet > hang_limit(seen.step_seconds, limits) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A job that has made no progress for longer than usual, and what its ranks reported as the cause."""

    at: float
    """When this was seen, in seconds since 1970."""
    quiet: float
    """Seconds without progress until then."""
    usual: float
    """Seconds that a step usually takes."""
    hang_after: float
    """Seconds without progress after which the job counts as hung."""
    rank: int | None = None
    """The rank that the others wait for, if that is known."""
    node: str | None = None
    cause: str = ""

    @property
    def text(self) -> str:
        """Return the pause for people: how long, why, and when it counts as a hang."""
        return (
            f"no rank made progress for {self.quiet:.1f} s (a step takes {self.usual:.2f} s)"
            + (f": {self.cause}" if self.cause else "")
            + f". It counts as a hang after {self.hang_after:.0f} s (`timeouts.hang`), or at once when the ranks prove to wait "
            "for each other"
        )

    def as_record(self) -> dict[str, Any]:
        """Return the pause for the history."""
        return asdict(self)


def describe_pause(seen: Progress, limits: HangLimits) -> Pause:
    """Return since when a job has made no progress, what the ranks report as the cause, and when it counts as hung."""
    found = explain(seen.ranks) if seen.status_requested else None
    rank = found.rank if found else None
    return Pause(
        at=seen.at,
        quiet=min(held.age for held in seen.ranks.values()),
        usual=median(seen.step_seconds[-WINDOW:]),
        hang_after=act_limit(seen, limits),
        rank=rank,
        node=seen.ranks[rank].node if rank in seen.ranks else None,
        cause=found.quote if found else "",
    )


def _proves(found: HangFinding | None, seen: Progress, limits: HangLimits) -> bool:
    """Return whether the status of the ranks proves that waiting is useless.

    A rank that does not come may be at an evaluation, a save or a compilation of its own, so that proves nothing, unless its process is
    stopped, dead, or on a node whose agent does not report.
    """
    if any(not held.reported for held in seen.ranks.values()):
        return True
    if found is None:
        return False
    if found.kind:
        return found.seconds >= min(limits.hang_min, hang_limit(seen.step_seconds, limits)) - REACTION
    return found.rank is not None and seen.ranks[found.rank].process in {"T", "t", "Z"}


def _process_rank(held: RankProgress) -> int:
    """Rate the state of a rank's process: 0 stopped or dead, 1 stuck in the kernel, 2 ordinary."""
    return {"T": 0, "t": 0, "Z": 0, "D": 1}.get(held.process, _ORDINARY)


def suspect(ranks: dict[int, RankProgress]) -> int:
    """Return the rank that most likely blocks the others: by process state, then the lowest step, then the longest without progress."""
    return min(ranks, key=lambda rank: (_process_rank(ranks[rank]), ranks[rank].step, -ranks[rank].age))


def _fault(entry: FaultKind, seen: Progress, rank: int | None, quote: str, *, age: float) -> Fault:
    held = seen.ranks[rank] if rank is not None else None
    if held is not None and not held.reported:
        quote += f"; rank {rank} on {held.node} is the first suspect: its agent has not reported it"
    elif held is not None:
        quote += f"; rank {rank} on {held.node} is the first suspect (step {held.step}, process state {held.process}"
        quote += f", waiting in {held.wait})" if held.wait else ")"
    return _of(entry.id, seen, rank, quote, age=age)


def _of(kind_of_it: str, seen: Progress, rank: int | None, quote: str, *, age: float) -> Fault:
    held = seen.ranks[rank] if rank is not None else None
    return Fault(
        kind=kind_of_it,
        at=seen.at - age,
        node=held.node if held else None,
        rank=rank,
        step=held.step if held else None,
        quote=quote,
        signature=kind_of_it,
        detail="\n".join(_stacks(seen)),
    )


def _stacks(seen: Progress) -> Iterator[str]:
    """Yield the stack of every rank that answered, as in a traceback: the innermost line last."""
    for rank, held in sorted(seen.ranks.items()):
        if held.status is not None:
            waits = f" waits ({held.status.waits}) since {held.status.seconds:.1f} s" if held.status.waits else ""
            yield f"rank {rank} on {held.node}{waits}:"
            yield from (f"  {line}" for line in reversed(held.status.stack))


def _hang(entry: FaultKind, seen: Progress, quote: str, *, age: float) -> Fault:
    """Name the rank that blocks the others, from the reported statuses; else the first suspect."""
    found = explain(seen.ranks)
    if found is None:
        return _fault(entry, seen, suspect(seen.ranks), quote, age=age)
    return _of(found.kind or entry.id, seen, found.rank, f"{found.quote}; {quote}", age=age)


def see_progress(seen: Progress, limits: HangLimits) -> Fault | None:
    """Report a hang once no rank has made progress for longer than the job's own limit.

    One rank without progress among advancing ones is no hang: it may wait for its turn. While a rank is in a declared section the others
    wait for it, so only the section's limit applies, unless the ranks report that it waits itself.
    """
    if seen.steps_expected and any(held.section for held in seen.ranks.values()):
        return _see_sections(seen, limits) or _see_waits(seen, limits)
    if seen.ended and seen.ranks:
        return _see_end(seen, limits)
    if not seen.steps_expected:
        return _see_output(seen, limits)
    if not seen.ranks:
        return None
    quiet = min(held.age for held in seen.ranks.values())
    return _see_steps(seen, limits, quiet) if seen.step_seconds else _see_first_step(seen, limits, quiet)


def _see_sections(seen: Progress, limits: HangLimits) -> Fault | None:
    for rank, held in seen.ranks.items():
        limit = held.section_limit if held.section_limit is not None else limits.section
        if held.section and held.age > limit:
            return _fault(SECTION, seen, rank, f"section '{held.section}' has taken {held.age:.1f} s (limit {limit:.1f} s)", age=held.age)
    return None


def _see_waits(seen: Progress, limits: HangLimits) -> Fault | None:
    """Report ranks that wait within a section for a rank that is in none, or for each other: a section is given time for its own work.

    A rank that hangs, or is cut off, while others meet at a checkpoint would be found only after the section's limit.
    """
    found = explain(seen.ranks) if seen.status_requested else None
    if found is None or not seen.step_seconds:
        return None
    if found.kind == STUCK.id:  # what a section exchanges may be large: that it takes longer than a step proves nothing
        limits = replace(limits, hang_min=act_limit(seen, limits))
    elif not found.kind and (found.rank is None or seen.ranks[found.rank].section):
        return None
    return _see_steps(seen, limits, min(held.age for held in seen.ranks.values()))


def _see_steps(seen: Progress, limits: HangLimits, quiet: float) -> Fault | None:
    found = explain(seen.ranks) if seen.status_requested else None
    proven = _proves(found, seen, limits)
    limit = hang_limit(seen.step_seconds, limits) if proven else act_limit(seen, limits)
    sure = found is not None and (found.kind != STUCK.id if proven else found.rank is not None)  # the network may recover
    if quiet <= limit - (REACTION if sure else 0.0) or (seen.moved is not None and seen.moved <= limit and quiet <= MOVING * limit):
        return None
    return _hang(HANG, seen, f"no rank made progress for {quiet:.1f} s (limit {limit:.1f} s)", age=quiet)


def _see_first_step(seen: Progress, limits: HangLimits, quiet: float) -> Fault | None:
    """Measure from the last progress, so that a declared section (a long compile) does not count against the first step."""
    waited = min(quiet, seen.since_start)
    if waited <= limits.startup:
        return None
    quote = f"no first step {seen.since_start:.1f} s after the start, no progress for {waited:.1f} s (limit {limits.startup:.1f} s)"
    return _hang(NEVER_STEPPED, seen, quote, age=waited)


def _see_output(seen: Progress, limits: HangLimits) -> Fault | None:
    """Suspect only a rank with an unusual process state: without steps nothing else distinguishes ranks."""
    limit, age = limits.log_silence, seen.output_age
    if limit is None or age is None:
        return None
    if not seen.printed:  # it loads, compiles or downloads: the limit of the startup applies
        limit = max(limit, limits.startup)
    if age <= limit:
        return None
    odd = {rank: held for rank, held in seen.ranks.items() if _process_rank(held) < _ORDINARY}
    words = f"no output for {age:.1f} s" if seen.printed else f"no output since the start {age:.1f} s ago"
    return _fault(SILENT, seen, suspect(odd) if odd else None, f"{words} (limit {limit:.1f} s)", age=age)


def _see_end(seen: Progress, limits: HangLimits) -> Fault | None:
    """Report ranks that outlive others for too long, measured from the last exit, output or step of the job."""
    signs = [seen.since_end, *([seen.output_age] if seen.output_age is not None else [])]
    if seen.steps_expected:
        signs.append(min(held.age for held in seen.ranks.values()))
    age, limit = min(signs), max(limits.exit_grace, limits.log_silence or 0.0)
    if age <= limit:
        return None
    left = sorted(seen.ranks)
    odd = {rank: held for rank, held in seen.ranks.items() if _process_rank(held) < _ORDINARY}
    quote = (
        f"{numbered(seen.ended)} exited with status 0, {numbered(left)} did not, without any activity for {age:.1f} s "
        f"(limit {limit:.1f} s, `timeouts.exit_grace`)"
    )
    return _of(NOT_ENDING.id, seen, suspect(odd or seen.ranks) if odd or len(left) == 1 else None, quote, age=age)


def see_early_exit(seen: EarlyExit, limits: HangLimits) -> Fault | None:
    """Report the ranks that exited, in time to act before the others count as stuck."""
    if seen.since < EARLY_SECONDS:
        return None
    runs = "runs" if len(seen.running) == 1 else "run"
    quote = (
        f"{numbered(seen.ended)} exited with status 0, the first {seen.ran:.1f} s after its start, and {numbered(seen.running)} still "
        f"{runs}; without any activity for {limits.exit_grace:.0f} s (`timeouts.exit_grace`) that is a fault"
    )
    return Fault(kind=EARLY.id, at=seen.at - seen.since, node=seen.node, rank=seen.ended[0], quote=quote, signature=EARLY.id)


def see_overrun(seen: RecoveryTimeout, _limits: HangLimits) -> Fault | None:
    """Report a recovery that exceeds its timeout, and the only node that blocks it, if there is one."""
    if seen.seconds <= seen.limit:
        return None
    least = min((far for _, far, _ in seen.reached.values()), default=0)
    behind = {rank: node for rank, (node, far, _) in seen.reached.items() if far == least}
    nodes = set(behind.values())
    only_one = len(nodes) == 1 and len(behind) < len(seen.reached)
    words = ", ".join(f"rank {rank} {words}" for rank, (_, far, words) in sorted(seen.reached.items()) if far == least)
    return Fault(
        kind=OVERRUN.id,
        at=seen.at - seen.seconds,
        node=nodes.pop() if only_one else None,
        quote=f"{seen.action} brought no step within {seen.seconds:.1f} s ({words or 'no worker started'}); limit {seen.limit:.1f} s",
        signature=OVERRUN.id,
    )


CUT_SHORT: Final = _define(
    id="recovery-cut-short",
    title="A controller died in the middle of a recovery, with the ranks stopped",
    source="agents' event logs",
    attributed_to=Attribution.NONE,
    action="restart the workers; the reason for the recovery is in the history if the controller could write it",
    unhealthy=Sample(InterruptedRecovery(at=0.0, state="RUNNING")),
    healthy=Sample(Progress(at=0.0, ranks=_ranks(0.6), step_seconds=_STEADY)),
    weight=20,
)


def see_cut_short(seen: InterruptedRecovery, _limits: HangLimits) -> Fault:
    """Report ranks that a dead controller had stopped."""
    quote = f"the previous controller stopped the ranks and died before it could restart them (state in the history: {seen.state})"
    return Fault(kind=CUT_SHORT.id, at=seen.at, quote=quote, signature=CUT_SHORT.id)
