"""A bill and the costs of failures as text and tables; the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from holdfast.accounting.bill import MIN_SAMPLES, Bill, Mean
from holdfast.accounting.ledger import MEANING, ROLLBACK, UNFINISHED, UNRECORDED, TimeCategory
from holdfast.accounting.losses import UNTIL_STARTED, UNTIL_STEP, FailureCosts
from holdfast.plurals import plural
from holdfast.report.phases import kind_of, label_of
from holdfast.report.text.wording import NOTHING, duration, moment, share

Table = tuple[tuple[str, ...], list[list[str]]]
"""Head and rows."""

NOT_KNOWN: Final = "not known"
NO_STEPS: Final = f"{NOT_KNOWN}: no steps are reported"
PHASE_MEANING: Final = {
    UNFINISHED: "time spent on the step that the fault interrupted",
    UNRECORDED: "downtime without a recorded phase",
    ROLLBACK: "steps thrown away and computed a second time",
}
_TENTHS: Final = 99.95
_NUMERIC: Final = frozenset(
    {"RANK-TIME", "NODE-TIME", "SHARE", "OF LOST", "INCIDENTS", "FAULTS", "ATTRIBUTED", "PRODUCTIVE", "LOST", "IDLE", "LOST CAPACITY"}
)


# -- the costs of failures --------------------------------------------------------------------------------------------------


def figures(costs: FailureCosts) -> Iterator[tuple[str, str]]:
    """Yield ETTR, downtime and lost steps, each with its name and what it measures."""
    why = NO_STEPS if costs.wall_s else "not known: no time has passed"
    yield "ETTR", why if costs.ettr is None else f"{share(costs.ettr)} of the time went into steps that were kept"
    yield "downtime", f"{duration(costs.downtime_s)}{f', {downtime_meaning(costs)}' if costs.until else ''}"
    yield "steps lost", NO_STEPS if costs.steps_lost is None else f"{costs.steps_lost:,}"


def sentence(costs: FailureCosts) -> str:
    """Return the costs as part of a sentence."""
    down = f"{duration(costs.downtime_s)} of downtime"
    if UNTIL_STARTED in costs.until:
        down += f" ({downtime_meaning(costs)})"
    if costs.steps_lost is None:
        return down
    return f"{down}, {plural(costs.steps_lost, 'step')} lost" + (f", ETTR {share(costs.ettr)}" if costs.ettr is not None else "")


def downtime_meaning(costs: FailureCosts) -> str:
    """Return from when to when downtimes last."""
    match costs.until:
        case (one,) if one == UNTIL_STARTED:
            return "each from the fault until all processes had started: training may have begun later"
        case (one,) if one == UNTIL_STEP:
            return "each from the fault to the first new step"
    return "from the fault to the first new step, or where no steps were reported until all processes had started"


# -- a bill -----------------------------------------------------------------------------------------------------------------


def hours(number: float) -> str:
    """Return hours as a person would write them: without decimals if many, in minutes and seconds if less than one."""
    if number < 1:
        return duration(number * 3600)
    return f"{number:,.0f} h" if number >= _TENTHS else f"{number:.1f} h"


def heading(bill: Bill, job: str | None) -> str:
    """Return whose bill it is, and for what time."""
    whose = job or plural(len(bill.jobs), "job")
    begin = bill.since if bill.since is not None else min((one.job.at for one in bill.jobs), default=bill.until)
    return f"{whose}, {moment(begin)} to {moment(bill.until)}"


def counted(bill: Bill) -> str:
    """Return the unit, and how many jobs still run or have no controller."""
    live = sum(not one.job.ended and one.job.has_controller for one in bill.jobs)
    lost = sum(not one.job.ended and not one.job.has_controller for one in bill.jobs)
    text = f"Times are {bill.unit.name}: {bill.unit.meaning}, added up."
    if live:
        text += f" Until now for {plural(live, 'job')} that still {'runs' if live == 1 else 'run'}."
    if lost:
        text += f" Until the last sign of life for {plural(lost, 'job')} without a controller."
    return text


def bill_figures(bill: Bill) -> Iterator[tuple[str, str]]:
    """Yield the costs of failures, MTTF and MTTR with their samples, and the lost capacity."""
    yield from figures(bill.costs)
    yield "MTTF", _mean(bill.mttf, "of running between failures", "failure")
    yield "MTTR", _mean(bill.mttr, downtime_meaning(bill.costs).removeprefix("each "), "recovery")
    if bill.lost_capacity:
        what = "ranks" if bill.unit.by_rank else "nodes"
        yield "LOST CAPACITY", f"{hours(bill.lost_capacity)} of {what} missing while training continued at reduced size, not in the table"
    if bill.user_errors:
        verb = "was" if bill.user_errors == 1 else "were"
        yield "", f"{plural(bill.user_errors, 'more incident')} {verb} caused by the script"


def _mean(mean: Mean, what: str, one: str) -> str:
    samples = sample_text(mean, one)
    return f"{duration(mean.seconds)} {what}, {samples}" if mean.seconds is not None else samples


def sample_text(mean: Mean, one: str) -> str:
    """Return the number of samples of a mean, or that there are too few."""
    many = f"{one[:-1]}ies" if one.endswith("y") else f"{one}s"
    if mean.seconds is None:
        return f"too few samples: {plural(mean.n, one, many) if mean.n else f'no {one}'}, {MIN_SAMPLES} are needed"
    return f"over {plural(mean.n, one, many)}"


def categories(bill: Bill) -> Table:
    """Return the time by category."""
    rows = []
    for one in TimeCategory:
        if one is TimeCategory.PRODUCTIVE and bill.total_hours and not bill.costs.steps_known:
            rows.append([one.value, NOT_KNOWN, NOTHING, MEANING[one]])
        elif bill.hours(one) or one in {TimeCategory.PRODUCTIVE, TimeCategory.LOST}:
            rows.append([one.value, hours(bill.hours(one)), _part(bill.hours(one), bill.total_hours), MEANING[one]])
    total = ["all", hours(bill.total_hours), _part(bill.total_hours, bill.total_hours), ""]
    return ("CATEGORY", _time(bill), "SHARE", "MEANING"), [*rows, total]


def phases(bill: Bill) -> Table:
    """Return the lost time by phase."""
    lost = bill.hours(TimeCategory.LOST)
    rows = [[label_of(phase), hours(spent), _part(spent, lost), phase_meaning(phase)] for phase, spent in bill.phases.items()]
    return ("PHASE", _time(bill), "OF LOST", "MEANING"), rows


def phase_meaning(phase: str) -> str:
    """Return what happens in a phase."""
    return PHASE_MEANING.get(phase) or kind_of(phase).meaning


def kinds(bill: Bill) -> Table:
    """Return the lost time by kind of fault."""
    lost = bill.hours(TimeCategory.LOST)
    head = ["FAULT", "INCIDENTS", _time(bill), "OF LOST", *(["LOST CAPACITY"] if bill.lost_capacity else []), "MOST OF IT"]
    rows = []
    for one in bill.losses:
        capacity = [hours(one.lost_capacity) if one.lost_capacity else NOTHING] if bill.lost_capacity else []
        most = ", ".join(map(label_of, list(one.phases)[:3])) or NOTHING
        rows.append([one.kind, str(one.incidents), hours(one.hours), _part(one.hours, lost), *capacity, most])
    return tuple(head), rows


def bad_nodes(bill: Bill) -> Table:
    """Return the lost time by node."""
    lost = bill.hours(TimeCategory.LOST)
    return ("NODE", "FAULTS", "INCIDENTS", "ATTRIBUTED", _time(bill), "OF LOST", "QUARANTINE", "MOSTLY"), [
        [
            one.node,
            str(one.faults),
            str(one.incidents),
            str(one.attributed),
            hours(one.hours),
            _part(one.hours, lost),
            "yes" if one.to_quarantine else "no",
            one.worst or NOTHING,
        ]
        for one in bill.bad_nodes
    ]


def jobs(bill: Bill) -> Table:
    """Return the time by job."""
    rows = []
    for one in bill.jobs:
        total = one.ledger.sum().hours
        parts = [_part(one.ledger.sum(part).hours, total) for part in (TimeCategory.PRODUCTIVE, TimeCategory.LOST, TimeCategory.SPARE)]
        if not one.costs.steps_known:
            parts[0] = NOT_KNOWN
        rows.append([one.job.name, one.job.state, hours(total), *parts, str(one.incidents), one.job.id])
    return ("JOB", "STATE", _time(bill), "PRODUCTIVE", "LOST", "IDLE", "INCIDENTS", "ID"), rows


def _time(bill: Bill) -> str:
    """Return the head of a column of times, which are summed over all ranks, or over nodes where ranks are not known."""
    return "RANK-TIME" if bill.unit.by_rank else "NODE-TIME"


def _part(part: float, total: float) -> str:
    return share(part / total) if total else NOTHING


def numeric_columns(head: Sequence[str]) -> list[int]:
    """Return the columns of *head* with numbers, which are aligned to the right."""
    return [column for column, name in enumerate(head) if name in _NUMERIC]


def record(bill: Bill) -> dict[str, Any]:
    """Return the bill as JSON; all amounts in hours of its unit."""
    return {
        "unit": bill.unit.name,
        "since": bill.since,
        "until": bill.until,
        "hours": bill.total_hours,
        "categories": {one.value: bill.hours(one) for one in TimeCategory},
        **bill.costs.as_record(),
        "mttf_s": bill.mttf.seconds,
        "failures": bill.mttf.n,
        "mttr_s": bill.mttr.seconds,
        "recoveries": bill.mttr.n,
        "user_errors": bill.user_errors,
        "lost_capacity_hours": bill.lost_capacity,
        "phases": bill.phases,
        "faults": [
            {
                "kind": one.kind,
                "incidents": one.incidents,
                "hours": one.hours,
                "phases": one.phases,
                "lost_capacity_hours": one.lost_capacity,
            }
            for one in bill.losses
        ],
        "nodes": [
            {
                "node": one.node,
                "faults": one.faults,
                "incidents": one.incidents,
                "attributed": one.attributed,
                "hours": one.hours,
                "worst": one.worst or None,
                "to_quarantine": one.to_quarantine,
            }
            for one in bill.bad_nodes
        ],
        "jobs": [
            {
                "job": one.job.name,
                "id": one.job.id,
                "state": one.job.state,
                "has_controller": one.job.has_controller,
                "incidents": one.incidents,
                "hours": one.ledger.sum().hours,
                "categories": {part.value: one.ledger.sum(part).hours for part in TimeCategory},
            }
            for one in bill.jobs
        ],
    }
