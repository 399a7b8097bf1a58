"""`holdfast advise`: how often a job should save, from what was measured, and what it costs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from holdfast.cli.job_view import find_job
from holdfast.cli.output import heading, say, say_facts, say_json, say_rows
from holdfast.control.checkpoints.interval import ENOUGH, case_of, limits_of, parts_of
from holdfast.history import queries, statistics
from holdfast.history.models import Generation, Job
from holdfast.history.statistics import FleetStatistics, StepStatistics
from holdfast.history.store import History
from holdfast.report.wording import NOTHING, count, duration, plural, share
from holdfast.spec.job import CheckpointPlan
from policies.checkpoint_interval import RECOVERY_S, Advice, ExpectedLoss, IntervalCase, Rate, Waste, loss, table, waste
from policies.checkpoint_interval import advise as best

DAY: Final = 24.0
"""Hours."""
WIDTH: Final = 80
SURE: Final = 5
"""With fewer faults the rate is a guess that deserves a word."""
PARTS: Final = (
    ("detection", "", "see it, find the root, stop the ranks"),
    ("rollback", "T0", "steps computed again"),
    ("reschedule", "T1", "place and start the ranks"),
    ("communication", "T2", "form the process group"),
    ("load", "T3", "read the state back"),
    ("compilation", "T4", "compile, first step"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """How often the job saves now."""

    every: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that the answer stands on."""

    job: Job
    plan: CheckpointPlan
    fleet: FleetStatistics
    work: StepStatistics
    nodes: int
    ranks: int
    rate: Rate
    case: IntervalCase | None
    present: Present

    def hours(self, part: float) -> float:
        """Return how many compute-hours (one rank for an hour) a day the share *part* of the time is."""
        return part * DAY * self.ranks


def advise(reference: str | None, every: Sequence[int], *, as_json: bool) -> int:
    """Say how often a job should save, and what *every* so many steps would cost."""
    book = History.open(create=False)
    try:
        found = _gathered(book, find_job(book, reference))
    finally:
        book.close()
    if as_json:
        say_json(_record(found, every))
    else:
        _tell(found, every)
    return 0


def _gathered(book: History, job: Job) -> Figures:
    plan, newest = _plan(job), queries.newest_generation(book, job.id)
    fleet, work = statistics.fleet(book), statistics.work(book, job.name)
    wanted = job.spec.get("nodes") if isinstance(job.spec.get("nodes"), dict) else {}
    nodes = len(newest.ranks) if newest else int((wanted or {}).get("wanted", 1))
    ranks = newest.world_size if newest else nodes * int((wanted or {}).get("ranks", 1))
    case, rate = case_of(fleet, work, nodes)
    present = _present(plan, newest, work)
    return Figures(job=job, plan=plan, fleet=fleet, work=work, nodes=nodes, ranks=ranks, rate=rate, case=case, present=present)


def _plan(job: Job) -> CheckpointPlan:
    """Return what the job file says of checkpoints; another version's words that mean nothing here give way to the defaults."""
    try:
        return CheckpointPlan.model_validate(job.spec.get("checkpoint") or {})
    except ValidationError:
        return CheckpointPlan()


def _present(plan: CheckpointPlan, newest: Generation | None, work: StepStatistics) -> Present:
    chosen = (newest.facts or {}).get("every") if newest else None
    every, said = plan.first, "as the job file says"
    if plan.every == "auto":
        every, said = (int(chosen), "as `auto` chose it") if chosen else (plan.first, "with which `auto` begins")
    if work.spacing and work.spacing != every:
        said = f"as it was seen; the {'flow' if plan.every == 'auto' else 'job file'} said {count(every)}"
        every = work.spacing
    return Present(every=every, said=said)


# -- for programs -----------------------------------------------------------------------------------------------------


def _record(found: Figures, every: Sequence[int]) -> dict[str, Any]:
    case, advised = found.case, _advised(found)
    rows = _rows(found, every)
    present = _waste_record(found, waste(case, found.present.every)) if case and found.present.every else None
    one = _loss(found)
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
        "table": [_waste_record(found, row) for row in rows],
        "loss": {**asdict(one), "total": one.total} if one else None,
    }


def _waste_record(found: Figures, row: Waste) -> dict[str, Any]:
    return {**asdict(row), "total": row.total, "compute_hours_a_day": found.hours(row.total)}


# -- for people -------------------------------------------------------------------------------------------------------


def _tell(found: Figures, every: Sequence[int]) -> None:
    now = "no checkpoints" if not found.present.every else f"every {plural(found.present.every, 'step')}"
    heading(f"{found.job.name}  checkpoints now: {now}, {found.present.said}")
    _title("Measured")
    say_facts([(name, _wrapped(text, 16)) for name, text in _facts(found)])
    advised = _advised(found)
    _title(f"Advised: every {plural(advised.steps, 'step')} ({duration(advised.seconds)})" if advised else "Advised: nothing yet")
    for line in _reason(found, advised):
        say(textwrap.indent(_wrapped(line, 2), "  "))
    if advised:
        _title("What a cadence costs")
        _table(found, advised, _rows(found, every))
    one = _loss(found)
    if one:
        _title(f"One fault is expected to cost {duration(one.total)}")
        _parts(one)


def _title(text: str) -> None:
    say()
    heading(text)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)


def _facts(found: Figures) -> Iterator[tuple[str, str]]:
    work, fleet, rate = found.work, found.fleet, found.rate
    beside = f", and is written for {duration(work.overlapped_s)} beside training" if work.overlapped_s else ""
    yield "one save", f"{duration(work.save_s)}{beside}, median of {plural(work.saves, 'save')}" if work.saves else "none was measured yet"
    yield "one step", f"{duration(work.step_s)}, median of {plural(work.steps, 'step')}" if work.steps else "none was measured yet"
    yield "faults", f"{plural(fleet.faults, 'fault')} in {fleet.node_hours:,.3g} node-hours of {plural(fleet.jobs, 'job')}"
    yield "of one node", f"a fault every {_hours(1 / rate.per_node_hour)}{_range(rate)}"
    yield (
        "of this job",
        f"{plural(found.nodes, 'node')}, {plural(found.ranks, 'rank')}: a fault every {duration(rate.between_s(found.nodes))}",
    )
    if fleet.recoveries:
        actions = ", ".join(f"{number} by {action}" for action, number in fleet.actions.items())
        yield "recoveries", f"{actions}; {fleet.back} of {fleet.recoveries} went back to a checkpoint"
    for number, text in enumerate(_assumed(found)):
        yield "assumed" if not number else "", text


def _hours(hours: float) -> str:
    return duration(hours * 3600)


def _range(rate: Rate) -> str:
    """Say how sure the rate is."""
    if not rate.low:
        return f"; at least every {_hours(1 / rate.high)}, at 95% confidence"
    return f"; between {_hours(1 / rate.high)} and {_hours(1 / rate.low)}, at 90% confidence"


def _assumed(found: Figures) -> Iterator[str]:
    """Say what was not measured, or too seldom to be relied on."""
    fleet, work = found.fleet, found.work
    if not fleet.faults:
        yield f"how often faults come ({found.rate.reason})"
    elif fleet.faults < SURE:
        yield f"how often faults come, from {fleet.faults} only: the advice may change much with the next one"
    if not fleet.recoveries:
        yield f"that a fault costs {duration(RECOVERY_S)} of downtime and goes back to a checkpoint: no recovery was seen"
    if 0 < work.saves < ENOUGH:
        yield f"what a save costs, from {work.saves} only; `auto` waits for {ENOUGH}"


def _advised(found: Figures) -> Advice | None:
    return best(found.case, limits_of(found.plan)) if found.case else None


def _reason(found: Figures, advised: Advice | None) -> Iterator[str]:
    case = found.case
    if advised is None or case is None:
        missing = " and ".join(name for name, number in (("save", found.work.saves), ("step", found.work.steps)) if not number)
        yield f"What a {missing} costs is not known yet: {_cure(found)}"
        return
    yield f"{advised.reason[0].upper()}{advised.reason[1:]}."
    low, high = (_at_rate(found, rate) for rate in (found.rate.high, found.rate.low))
    if low != high:
        yield f"Within the interval of that rate it would be between {count(low)} and {plural(high, 'step')}."
    if not found.present.every:
        yield "The job saves nothing: a fault that goes back to a checkpoint begins it anew."
    elif found.present.every != advised.steps:
        now, then = waste(case, found.present.every), waste(case, advised.steps)
        saved = found.hours(now.total - then.total)
        yield (
            f"It wastes {_amount(saved)} compute-hours a day less than every {plural(found.present.every, 'step')}."
            if saved > 0
            else (f"Every {plural(found.present.every, 'step')} would waste {_amount(-saved)} compute-hours a day less, beyond the limits.")
        )
    if found.plan.every != "auto":
        yield "With `checkpoint: {every: auto}` the flow follows this by itself, while the job runs."


def _cure(found: Figures) -> str:
    if not found.present.every:
        return "the job saves nothing. Set `checkpoint.every`, or `auto`, and ask again after the first saves."
    return "ask again after the first saves. They are measured where the script uses `holdfast.session`."


def _at_rate(found: Figures, per_node_hour: float) -> int:
    """Return the cadence that would be advised at another rate of faults; without any faults the most that is allowed."""
    limits = limits_of(found.plan)
    if found.case is None or not per_node_hour:
        return limits.most
    between = replace(found.rate, per_node_hour=per_node_hour).between_s(found.nodes)
    return best(replace(found.case, between_s=between), limits).steps


def _rows(found: Figures, every: Sequence[int]) -> tuple[Waste, ...]:
    advised = _advised(found)
    if advised is None or found.case is None:
        return ()
    return table(found.case, advised, limits_of(found.plan), also=[*every, found.present.every])


def _table(found: Figures, advised: Advice, rows: Sequence[Waste]) -> None:
    assert found.case is not None
    head = ("STEPS", "TRAINING", "SAVES", "ROLLBACK", "DOWNTIME", "WASTED", "HOURS A DAY", "")
    cells = []
    for row in rows:
        marks = [name for name, steps in (("advised", advised.steps), ("now", found.present.every)) if steps == row.steps]
        shares = [share(part) for part in (row.save, row.rollback, row.recovery, row.total)]
        cells.append(
            [count(row.steps), duration(row.steps * found.case.step_s), *shares, _amount(found.hours(row.total)), ", ".join(marks)]
        )
    say_rows(head, cells)
    whole = f"{found.hours(1):,.0f}"
    say(
        _wrapped(
            f"WASTED is the share of all time that brings training no further; HOURS A DAY, of the {whole} compute-hours of its ranks.", 0
        )
    )


def _amount(hours: float) -> str:
    return f"{hours:,.{0 if hours >= 100 else 1 if hours >= 10 else 2}f}"  # noqa: PLR2004 (three digits are all that a reader can use)


def _loss(found: Figures) -> ExpectedLoss | None:
    advised = _advised(found)
    return loss(found.case, advised.steps, parts_of(found.fleet)) if found.case and advised else None


def _parts(one: ExpectedLoss) -> None:
    known = asdict(one)
    for name, term, meaning in PARTS:
        seconds = known[name]
        say(f"  {name:<14}{term:<4}{duration(seconds) if seconds is not None else NOTHING:>13}  {meaning}")
    if one.detection is None:
        say(f"  {'downtime':<18}{duration(one.downtime):>13}  assumed, in all")
    say(_wrapped(f"{one.reason}. The others are medians of past recoveries.", 0))
