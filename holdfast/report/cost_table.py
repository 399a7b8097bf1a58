"""The bill in words: the same rows on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from holdfast.accounting.bill import ENOUGH, Bill, JobBill, Mean
from holdfast.accounting.ledger import MEANING, NOT_TOLD, ROLLBACK, UNFINISHED, Use
from holdfast.report import loss_words
from holdfast.report import phases as known
from holdfast.report.wording import NOTHING, duration, moment, plural, share

Table = tuple[tuple[str, ...], list[list[str]]]
"""A head and rows."""

OWN: Final = {
    UNFINISHED: "what the step had taken that the fault cut short",
    NOT_TOLD: "downtime of which nobody knows what it went into",
    ROLLBACK: "steps thrown away, and computed a second time",
}
TENTHS: Final = 99.95


def hours(number: float) -> str:
    """Write hours as a person would: whole ones where they are many, minutes and seconds where it is less than one."""
    if number < 1:
        return duration(number * 3600)
    return f"{number:,.0f} h" if number >= TENTHS else f"{number:.1f} h"


def heading(bill: Bill, job: str | None) -> str:
    """Say whose bill it is, and of what time."""
    who = job or plural(len(bill.jobs), "job")
    begin = bill.since if bill.since is not None else min((one.job.at for one in bill.jobs), default=bill.until)
    return f"{who}, {moment(begin)} to {moment(bill.until)}"


def counted(bill: Bill) -> str:
    """Say what is counted, and whether it goes on."""
    live = sum(not one.job.ended and one.job.held for one in bill.jobs)
    left = sum(not one.job.ended and not one.job.held for one in bill.jobs)
    text = f"Times are {bill.unit.name}: {bill.unit.adds}, added up."
    if live:
        text += f" Until now for {plural(live, 'job')} that still {'runs' if live == 1 else 'run'}."
    if left:
        text += f" Until the last sign of life for {plural(left, 'job')} that nobody steers any more."
    return text


def figures(bill: Bill) -> Iterator[tuple[str, str]]:
    """Yield what faults cost, MTTF and MTTR with what they stand on."""
    yield from loss_words.figures(bill.figures)
    yield "MTTF", _mean(bill.mttf, "of running between failures of the fleet", "failure")
    yield "MTTR", _mean(bill.mttr, loss_words.measures(bill.figures).removeprefix("each "), "recovery")
    if bill.without:
        what = "ranks" if bill.unit.by_rank else "nodes"
        yield "WENT WITHOUT", f"{hours(bill.without)} of {what} that were missing while training went on with fewer, beside what was held"
    if bill.user_errors:
        yield "", f"{plural(bill.user_errors, 'incident')} more {'was' if bill.user_errors == 1 else 'were'} the script's own fault"


def _mean(mean: Mean, what: str, one: str) -> str:
    told = stands_on(mean, one)
    return f"{duration(mean.seconds)} {what}, {told}" if mean.seconds is not None else told


def stands_on(mean: Mean, one: str) -> str:
    """Say of how many a mean is, or that they are too few."""
    many = f"{one[:-1]}ies" if one.endswith("y") else f"{one}s"
    if mean.seconds is None:
        return f"not enough to tell: {plural(mean.n, one, many) if mean.n else f'no {one}'}, {ENOUGH} are needed"
    return f"over {plural(mean.n, one, many)}"


def uses(bill: Bill) -> Table:
    """Return what became of the time."""
    rows = [
        [use.value, hours(bill.hours(use)), _part(bill.hours(use), bill.whole), MEANING[use]]
        for use in Use
        if bill.hours(use) or use in {Use.PRODUCTIVE, Use.LOST}
    ]
    return ("WHAT", "TIME", "SHARE", "THAT IS"), [*rows, ["all", hours(bill.whole), _part(bill.whole, bill.whole), ""]]


def phases(bill: Bill) -> Table:
    """Return what was lost by phase."""
    lost = bill.hours(Use.LOST)
    return ("PHASE", "TIME", "OF LOST", "THAT IS"), [
        [phase, hours(spent), _part(spent, lost), meaning(phase)] for phase, spent in bill.phases.items()
    ]


def meaning(phase: str) -> str:
    """Say what a phase is."""
    return OWN.get(phase) or known.kind_of(phase).meaning


def kinds(bill: Bill) -> Table:
    """Return what was lost by kind of fault."""
    lost = bill.hours(Use.LOST)
    rows = [
        [one.kind, str(one.incidents), hours(one.hours), _part(one.hours, lost), ", ".join(list(one.phases)[:3]) or NOTHING]
        for one in bill.losses
    ]
    if not bill.without:
        return ("FAULT", "INCIDENTS", "TIME", "OF LOST", "MOST OF IT"), rows
    told = [hours(one.without) if one.without else NOTHING for one in bill.losses]
    return ("FAULT", "INCIDENTS", "TIME", "OF LOST", "WENT WITHOUT", "MOST OF IT"), [
        [*row[:4], without, row[4]] for row, without in zip(rows, told, strict=True)
    ]


def bad_nodes(bill: Bill) -> Table:
    """Return what nodes cost."""
    lost = bill.hours(Use.LOST)
    return ("NODE", "FAULTS", "INCIDENTS", "BLAMED", "TIME", "OF LOST", "QUARANTINE", "MOSTLY"), [
        [
            one.node,
            str(one.faults),
            str(one.incidents),
            str(one.blamed),
            hours(one.hours),
            _part(one.hours, lost),
            "yes" if one.to_quarantine else "no",
            one.worst or NOTHING,
        ]
        for one in bill.bad_nodes
    ]


def jobs(bill: Bill) -> Table:
    """Return what each job's part is."""
    return ("JOB", "STATE", "TIME", "PRODUCTIVE", "LOST", "IDLE", "INCIDENTS", "ID"), [_job(one) for one in bill.jobs]


def _job(one: JobBill) -> list[str]:
    whole = one.ledger.sum().hours
    parts = [_part(one.ledger.sum(use).hours, whole) for use in (Use.PRODUCTIVE, Use.LOST, Use.SPARE)]
    return [one.job.name, one.job.state, hours(whole), *parts, str(one.incidents), one.job.id]


def _part(hours_: float, whole: float) -> str:
    return share(hours_ / whole) if whole else NOTHING


def record(bill: Bill) -> dict[str, Any]:
    """Return the bill for programs; all amounts in hours of its unit."""
    return {
        "unit": bill.unit.name,
        "since": bill.since,
        "until": bill.until,
        "hours": bill.whole,
        "uses": {use.value: bill.hours(use) for use in Use},
        **bill.figures.as_record(),
        "mttf_s": bill.mttf.seconds,
        "failures": bill.mttf.n,
        "mttr_s": bill.mttr.seconds,
        "recoveries": bill.mttr.n,
        "user_errors": bill.user_errors,
        "hours_without": bill.without,
        "phases": bill.phases,
        "faults": [
            {"kind": one.kind, "incidents": one.incidents, "hours": one.hours, "phases": one.phases, "hours_without": one.without}
            for one in bill.losses
        ],
        "nodes": [
            {
                "node": one.node,
                "faults": one.faults,
                "incidents": one.incidents,
                "blamed": one.blamed,
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
                "steered": one.job.held,
                "incidents": one.incidents,
                "hours": one.ledger.sum().hours,
                "uses": {use.value: one.ledger.sum(use).hours for use in Use},
            }
            for one in bill.jobs
        ],
    }


def numbers(head: Sequence[str]) -> list[int]:
    """Return the columns of *head* that hold numbers: they stand to the right."""
    return [place for place, name in enumerate(head) if name in _NUMBERS]


_NUMBERS: Final = frozenset({"TIME", "SHARE", "OF LOST", "INCIDENTS", "FAULTS", "BLAMED", "PRODUCTIVE", "LOST", "IDLE", "WENT WITHOUT"})
