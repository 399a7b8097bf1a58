"""What faults cost a job, in the words that every view uses: ETTR, downtime, steps lost."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.accounting.losses import UNTIL_STARTED, UNTIL_STEP, FailureCosts
from holdfast.report.wording import duration, plural, share

NO_STEPS = "not known: no steps are reported"


def figures(found: FailureCosts) -> Iterator[tuple[str, str]]:
    """Yield each figure under its name, with what it measures."""
    why = NO_STEPS if found.wall_s else "not known: no time has passed"
    yield "ETTR", why if found.ettr is None else f"{share(found.ettr)} of the time went into steps that were kept"
    yield "downtime", f"{duration(found.downtime_s)}{f', {measures(found)}' if found.until else ''}"
    yield "steps lost", NO_STEPS if found.steps_lost is None else f"{found.steps_lost:,}"


def sentence(found: FailureCosts) -> str:
    """Return the figures as part of a sentence."""
    down = f"{duration(found.downtime_s)} of downtime"
    if UNTIL_STARTED in found.until:
        down += f" ({measures(found)})"
    if found.steps_lost is None:
        return down
    return f"{down}, {plural(found.steps_lost, 'step')} lost" + (f", ETTR {share(found.ettr)}" if found.ettr is not None else "")


def measures(found: FailureCosts) -> str:
    """Say from when to when downtimes go."""
    match found.until:
        case (one,) if one == UNTIL_STARTED:
            return "each from the fault until all processes had started: training may have begun later"
        case (one,) if one == UNTIL_STEP:
            return "each from the fault to the first new step"
    return "from the fault to the first new step, or where no steps were reported until all processes had started"
