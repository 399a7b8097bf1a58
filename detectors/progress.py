"""Faults of progress: a job that stands still although all its processes live."""

from __future__ import annotations

from statistics import median
from typing import Final

from detectors.catalogue import Blame, Fault, FaultKind, Level, kind
from detectors.evidence import HangLimits, Overrun, Progress, RankProgress, Sample

WINDOW: Final = 64
"""Newest steps that the adaptive limit is taken from."""
SLOWEST_FACTOR: Final = 2.0
"""A stall as long as this many of the slowest recent step is still jitter: checkpoints and busy machines make steps uneven."""

_STEADY: Final = (0.3,) * 8


def _ranks(age: float, *, section: str | None = None) -> dict[int, RankProgress]:
    return {
        0: RankProgress(node="n0", step=40, age=age, section=section),
        1: RankProgress(node="n1", step=39, age=age, section=section),
    }


HANG: Final = kind(
    FaultKind(
        id="job-hang",
        title="No rank makes progress although all processes live",
        component="job",
        source="heartbeats",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart the workers; the rank that is furthest behind is the first suspect",
        reference="docs/architecture.md",
        sick=Sample(evidence=Progress(at=0.0, ranks=_ranks(9.0), step_seconds=_STEADY)),
        healthy=Sample(evidence=Progress(at=0.0, ranks=_ranks(0.6), step_seconds=_STEADY)),
        weight=40,
    )
)
SECTION: Final = kind(
    FaultKind(
        id="job-section-overrun",
        title="A declared long section takes longer than its own limit",
        component="job",
        source="heartbeats",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart the workers; raise the section's limit if it may take this long",
        reference="docs/architecture.md",
        sick=Sample(evidence=Progress(at=0.0, ranks=_ranks(2000.0, section="evaluation"), step_seconds=_STEADY)),
        healthy=Sample(evidence=Progress(at=0.0, ranks=_ranks(900.0, section="evaluation"), step_seconds=_STEADY)),
        weight=40,
    )
)
NEVER_STEPPED: Final = kind(
    FaultKind(
        id="job-never-stepped",
        title="A job never reaches its first step",
        component="job",
        source="heartbeats",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart the workers; then try other nodes",
        reference="docs/architecture.md",
        sick=Sample(evidence=Progress(at=0.0, ranks={0: RankProgress(node="n0", step=0, age=1900.0)}, since_start=1900.0)),
        healthy=Sample(evidence=Progress(at=0.0, ranks={0: RankProgress(node="n0", step=0, age=90.0)}, since_start=90.0)),
        weight=40,
    )
)
SILENT: Final = kind(
    FaultKind(
        id="job-output-silent",
        title="A script without heartbeats has printed nothing for longer than it may",
        component="job",
        source="worker output",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart the workers; raise `limits.output_silence` if it may be quiet for this long",
        reference="docs/architecture.md",
        sick=Sample(
            evidence=Progress(at=0.0, ranks={}, steps_expected=False, output_age=90.0),
            limits=HangLimits(output_silence=60.0),
        ),
        healthy=Sample(
            evidence=Progress(at=0.0, ranks={}, steps_expected=False, output_age=20.0),
            limits=HangLimits(output_silence=60.0),
        ),
        weight=35,
    )
)


OVERRUN: Final = kind(
    FaultKind(
        id="recovery-overrun",
        title="A recovery does not bring the job to a step within its rung's deadline",
        component="job",
        source="heartbeats",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="the next rung is tried at once; raise `deadlines` if the job needs longer to start",
        reference="docs/architecture.md",
        sick=Sample(evidence=Overrun(at=0.0, rung="restart-in-place", seconds=121.0, limit=120.0, reached={0: ("n0", 1, "started")})),
        healthy=Sample(evidence=Overrun(at=0.0, rung="restart-in-place", seconds=20.0, limit=120.0, reached={0: ("n0", 1, "started")})),
        weight=45,
    )
)


def hang_limit(step_seconds: tuple[float, ...], limits: HangLimits) -> float:
    """Return after how many seconds without progress a job counts as hung, from its own newest steps.

    The largest of: the least limit, *factor* median steps, and twice the slowest recent step.
    """
    recent = step_seconds[-WINDOW:]
    if not recent:
        return limits.first_step
    return max(limits.least, limits.factor * median(recent), SLOWEST_FACTOR * max(recent))


def suspect(ranks: dict[int, RankProgress]) -> int:
    """Return the rank that most likely holds the others up: stopped or stuck in the kernel first, then furthest behind, then longest quiet."""
    oddness = {"T": 0, "t": 0, "Z": 0, "D": 1}
    return min(ranks, key=lambda rank: (oddness.get(ranks[rank].process, 2), ranks[rank].step, -ranks[rank].age))


def _fault(entry: FaultKind, seen: Progress, limit: float, quote: str, *, age: float) -> Fault:
    rank = suspect(seen.ranks) if seen.ranks else None
    held = seen.ranks[rank] if rank is not None else None
    if held is not None:
        quote += f"; rank {rank} on {held.node} is the first suspect (step {held.step}, process state {held.process}"
        quote += f", waiting in {held.wait})" if held.wait else ")"
    return Fault(
        kind=entry.id,
        at=seen.at - age,
        node=held.node if held else None,
        rank=rank,
        step=held.step if held else None,
        quote=f"{quote}; limit {limit:.1f} s",
        signature=entry.id,
    )


def see_progress(seen: Progress, limits: HangLimits) -> Fault | None:
    """Call no progress a fault once every rank has been quiet for longer than the job's own limit.

    One quiet rank among advancing ones is no hang: a rank may be waiting for its turn.
    """
    if not seen.steps_expected:
        return _see_output(seen, limits)
    if not seen.ranks:
        return None
    in_section = {rank: held for rank, held in seen.ranks.items() if held.section}
    for rank, held in in_section.items():
        limit = held.section_limit if held.section_limit is not None else limits.section
        if held.age > limit:
            quote = f"section '{held.section}' of rank {rank} has taken {held.age:.1f} s"
            return _fault(SECTION, seen, limit, quote, age=held.age)
    if in_section:
        return None  # one rank saving or evaluating makes the others wait for it
    if not seen.step_seconds:
        return _see_first_step(seen, limits)
    limit = hang_limit(seen.step_seconds, limits)
    youngest = min(held.age for held in seen.ranks.values())
    if youngest <= limit:
        return None
    return _fault(HANG, seen, limit, f"no rank made progress for {youngest:.1f} s", age=youngest)


def _see_first_step(seen: Progress, limits: HangLimits) -> Fault | None:
    if seen.since_start <= limits.first_step:
        return None
    return _fault(NEVER_STEPPED, seen, limits.first_step, f"no first step {seen.since_start:.1f} s after the start", age=seen.since_start)


def _see_output(seen: Progress, limits: HangLimits) -> Fault | None:
    if limits.output_silence is None or seen.output_age is None or seen.output_age <= limits.output_silence:
        return None
    return _fault(SILENT, seen, limits.output_silence, f"no output for {seen.output_age:.1f} s", age=seen.output_age)


def see_overrun(seen: Overrun, _limits: HangLimits) -> Fault | None:
    """Call a recovery that takes too long a fault, and blame the node that alone holds the others up, if there is one."""
    if seen.seconds <= seen.limit:
        return None
    least = min((far for _, far, _ in seen.reached.values()), default=0)
    behind = {rank: node for rank, (node, far, _) in seen.reached.items() if far == least}
    nodes = set(behind.values())
    alone = len(nodes) == 1 and len(behind) < len(seen.reached)
    words = ", ".join(f"rank {rank} {words}" for rank, (_, far, words) in sorted(seen.reached.items()) if far == least)
    return Fault(
        kind=OVERRUN.id,
        at=seen.at - seen.seconds,
        node=nodes.pop() if alone else None,
        quote=f"{seen.rung} brought no step within {seen.seconds:.1f} s ({words or 'no worker started'}); limit {seen.limit:.1f} s",
        signature=OVERRUN.id,
    )
