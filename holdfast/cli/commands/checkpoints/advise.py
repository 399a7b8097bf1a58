"""`holdfast checkpoint advise`: how often a job should save, from what was measured, and what it costs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from holdfast.cli.job_view import find_job
from holdfast.cli.output import WIDTH, echo, echo_facts, echo_json, echo_table, echo_wrapped, heading, section
from holdfast.control.checkpoints.interval import ENOUGH, case_of, limits_of, parts_of
from holdfast.history import queries, statistics
from holdfast.history.models import Job
from holdfast.history.statistics import FleetStatistics, StepStatistics
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.policies.checkpoint_interval import RECOVERY_S, Advice, ExpectedLoss, IntervalCase, Rate, Waste, loss, table, waste
from holdfast.policies.checkpoint_interval import advise as best
from holdfast.report import phases
from holdfast.report.text.wording import NOTHING, count, duration, share
from holdfast.spec.job import CheckpointPlan

DAY: Final = 24.0
"""Hours."""
FEW_FAULTS: Final = 5
"""With fewer faults the rate is uncertain, and the output says so."""
PARTS: Final = (
    ("detection", "detect"),
    ("rollback", "rollback"),
    ("reschedule", "reschedule"),
    ("communication", "communication"),
    ("load", "load"),
    ("compilation", "warm-up"),
)
"""Each part of an expected loss, and the phase of a recovery that it is."""
HEAD: Final = ("STEPS", "TRAINING", "SAVES", "ROLLBACK", "DOWNTIME", "WASTED", "HOURS A DAY", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The present checkpoint interval."""

    every: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that the advice is based on."""

    job: Job
    plan: CheckpointPlan
    fleet: FleetStatistics
    work: StepStatistics
    nodes: int
    ranks: int
    rate: Rate
    case: IntervalCase | None
    present: Present

    @property
    def advised(self) -> Advice | None:
        """Return the best interval; None before anything was measured."""
        return best(self.case, limits_of(self.plan)) if self.case else None

    @property
    def loss(self) -> ExpectedLoss | None:
        """Return what one fault is expected to cost at the advised interval."""
        advised = self.advised
        return loss(self.case, advised.steps, parts_of(self.fleet)) if self.case and advised else None

    def hours(self, part: float) -> float:
        """Return the share *part* of the time in compute-hours (one rank for an hour) a day."""
        return part * DAY * self.ranks

    def table(self, every: Sequence[int]) -> tuple[Waste, ...]:
        """Return the cost of the advised interval and others, *every* and the present one included."""
        advised = self.advised
        if advised is None or self.case is None:
            return ()
        return table(self.case, advised, limits_of(self.plan), also=[*every, self.present.every])


def advise(job: str | None, every: Sequence[int], *, as_json: bool) -> int:
    """Show how often a job should save, and what the intervals *every* would cost."""
    with closing(History.open(create=False)) as history:
        found = _gather(history, find_job(history, job))
    if as_json:
        echo_json(_record(found, every))
    else:
        _show(found, every)
    return 0


def _number(value: object) -> int:
    """Return a number of the stored job file, or 1: another version may have written it."""
    return int(str(value)) if re.fullmatch(r"[1-9][0-9]{0,5}", str(value), re.ASCII) else 1


def _gather(history: History, job: Job) -> Figures:
    try:
        plan = CheckpointPlan.model_validate(job.spec.get("checkpoint") or {})
    except ValidationError:  # written by another version
        plan = CheckpointPlan()
    newest = queries.newest_generation(history, job.id)
    fleet, work = statistics.fleet(history), statistics.work(history, job.name)
    nodes = len(newest.ranks) if newest else _number(str(job.spec.get("nnodes")).rpartition(":")[2])
    ranks = newest.world_size if newest else nodes * _number(job.spec.get("nproc_per_node"))
    case, rate = case_of(fleet, work, nodes)
    chosen = (newest.facts or {}).get("every") if newest else None
    steps, source = plan.first, "from the job file"
    if plan.interval == "auto":
        steps, source = (int(chosen), "chosen by `auto`") if chosen else (plan.first, "with which `auto` begins")
    if work.spacing and work.spacing != steps:
        source = f"as measured; the {'controller' if plan.interval == 'auto' else 'job file'} set {count(steps)}"
        steps = work.spacing
    present = Present(every=steps, said=source)
    return Figures(job=job, plan=plan, fleet=fleet, work=work, nodes=nodes, ranks=ranks, rate=rate, case=case, present=present)


# -- for programs -----------------------------------------------------------------------------------------------------


def _record(found: Figures, every: Sequence[int]) -> dict[str, Any]:
    case, advised, one = found.case, found.advised, found.loss
    present = _waste_record(found, waste(case, found.present.every)) if case and found.present.every else None
    return {
        "job": found.job.name,
        "id": found.job.id,
        "nodes": found.nodes,
        "ranks": found.ranks,
        "measured": {**asdict(found.work), "fleet": asdict(found.fleet)},
        "rate": {**asdict(found.rate), "between_s": found.rate.between_s(found.nodes)},
        "case": asdict(case) if case else None,
        "assumed": list(_assumed(found)),
        "limits": asdict(limits_of(found.plan)),
        "present": {**asdict(found.present), "waste": present},
        "advised": asdict(advised) if advised else None,
        "table": [_waste_record(found, row) for row in found.table(every)],
        "loss": {**asdict(one), "total": one.total} if one else None,
    }


def _waste_record(found: Figures, row: Waste) -> dict[str, Any]:
    return {**asdict(row), "total": row.total, "compute_hours_a_day": found.hours(row.total)}


# -- for people -------------------------------------------------------------------------------------------------------


def _show(found: Figures, every: Sequence[int]) -> None:
    now = "no checkpoints" if not found.present.every else f"every {plural(found.present.every, 'step')}"
    heading(f"{found.job.name}  checkpoints now: {now}, {found.present.said}")
    section("Measured")
    wrapped = [(name, textwrap.fill(text, WIDTH - 16, break_long_words=False, break_on_hyphens=False)) for name, text in _measured(found)]
    echo_facts(wrapped)
    advised, one = found.advised, found.loss
    section(f"Advised: every {plural(advised.steps, 'step')} ({duration(advised.seconds)})" if advised else "Advised: nothing yet")
    for line in _reasons(found, advised):
        echo_wrapped(line, "  ")
    if advised:
        section("Cost of each interval")
        _show_table(found, advised, found.table(every))
    if one:
        section(f"One fault is expected to cost {duration(one.total)}")
        _show_parts(one)


def _measured(found: Figures) -> Iterator[tuple[str, str]]:
    work, fleet, rate = found.work, found.fleet, found.rate
    written = f", then written for {duration(work.overlapped_s)} while training runs" if work.overlapped_s else ""
    yield "one save", f"{duration(work.save_s)}{written}, median of {plural(work.saves, 'save')}" if work.saves else "not measured yet"
    yield "one step", f"{duration(work.step_s)}, median of {plural(work.steps, 'step')}" if work.steps else "not measured yet"
    yield "faults", f"{plural(fleet.faults, 'fault')} in {fleet.node_hours:,.3g} node-hours of {plural(fleet.jobs, 'job')}"
    interval = f"; at least every {_hours(1 / rate.high)}, at 95% confidence"
    if rate.low:
        interval = f"; between {_hours(1 / rate.high)} and {_hours(1 / rate.low)}, at 90% confidence"
    yield "of one node", f"a fault every {_hours(1 / rate.per_node_hour)}{interval}"
    between = duration(rate.between_s(found.nodes))
    yield "of this job", f"{plural(found.nodes, 'node')}, {plural(found.ranks, 'rank')}: a fault every {between}"
    if fleet.recoveries:
        actions = ", ".join(f"{number} by {action}" for action, number in fleet.actions.items())
        yield "recoveries", f"{actions}; {fleet.back} of {fleet.recoveries} went back to a checkpoint"
    for number, text in enumerate(_assumed(found)):
        yield "assumed" if not number else "", text


def _hours(hours: float) -> str:
    return duration(hours * 3600)


def _assumed(found: Figures) -> Iterator[str]:
    """Yield what was not measured, or too rarely to be reliable."""
    fleet, work = found.fleet, found.work
    if not fleet.faults:
        yield f"the rate of faults ({found.rate.reason})"
    elif fleet.faults < FEW_FAULTS:
        yield f"the rate of faults, from {fleet.faults} only: the advice may change much with the next one"
    if not fleet.recoveries:
        yield f"that a fault costs {duration(RECOVERY_S)} of downtime and goes back to a checkpoint: no recovery is on record"
    if 0 < work.saves < ENOUGH:
        yield f"the cost of a save, from {work.saves} only; `auto` waits for {ENOUGH}"


def _reasons(found: Figures, advised: Advice | None) -> Iterator[str]:
    case, every = found.case, found.present.every
    if advised is None or case is None:
        missing = " and ".join(name for name, number in (("save", found.work.saves), ("step", found.work.steps)) if not number)
        cure = "run this again after the first saves. They are measured where the script uses `holdfast.session`."
        if not every:
            cure = "the job saves nothing. Set `checkpoint.interval`, or `auto`, and run this again after the first saves."
        yield f"The cost of a {missing} is not known yet: {cure}"
        return
    yield f"{advised.reason[0].upper()}{advised.reason[1:]}."
    low, high = (_at_rate(found, rate) for rate in (found.rate.high, found.rate.low))
    if low != high:
        yield f"Within the confidence interval of that rate it would be between {count(low)} and {plural(high, 'step')}."
    if not every:
        yield "The job saves nothing: a fault that goes back to a checkpoint restarts it from the beginning."
    elif every != advised.steps:
        saved = found.hours(waste(case, every).total - waste(case, advised.steps).total)
        if saved > 0:
            yield f"It wastes {_amount(saved)} compute-hours a day less than every {plural(every, 'step')}."
        else:
            yield f"Every {plural(every, 'step')} would waste {_amount(-saved)} compute-hours a day less, but is beyond the limits."
    if found.plan.interval != "auto":
        yield "With `checkpoint: {interval: auto}` the controller follows this by itself, while the job runs."


def _at_rate(found: Figures, per_node_hour: float) -> int:
    """Return the interval that would be advised at another rate of faults; without any faults the longest allowed."""
    limits = limits_of(found.plan)
    if found.case is None or not per_node_hour:
        return limits.most
    between = replace(found.rate, per_node_hour=per_node_hour).between_s(found.nodes)
    return best(replace(found.case, between_s=between), limits).steps


def _show_table(found: Figures, advised: Advice, rows: Sequence[Waste]) -> None:
    assert found.case is not None
    cells = []
    for row in rows:
        marks = [name for name, steps in (("advised", advised.steps), ("now", found.present.every)) if steps == row.steps]
        shares = [share(part) for part in (row.save, row.rollback, row.recovery, row.total)]
        cells.append(
            [count(row.steps), duration(row.steps * found.case.step_s), *shares, _amount(found.hours(row.total)), ", ".join(marks)]
        )
    echo_table(HEAD, cells)
    total = f"{found.hours(1):,.0f}"
    echo_wrapped(f"WASTED is the share of time without progress; HOURS A DAY, of the {total} compute-hours of its ranks.")


def _amount(hours: float) -> str:
    return f"{hours:,.{0 if hours >= 100 else 1 if hours >= 10 else 2}f}"  # noqa: PLR2004 (three digits are enough)


def _show_parts(one: ExpectedLoss) -> None:
    known = asdict(one)
    for name, phase in PARTS:
        seconds = known[name]
        shown = duration(seconds) if seconds is not None else NOTHING
        echo(f"  {phases.label_of(phase):<24}{shown:>13}")
    if one.detection is None:
        echo(f"  {'downtime':<24}{duration(one.downtime):>13}  assumed, in all")
    echo_wrapped(f"{one.reason}. The others are medians of past recoveries.")
