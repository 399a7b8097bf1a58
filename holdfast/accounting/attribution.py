"""Attribute the time of one job: every microsecond from its submission to its end is booked exactly once.

Steps come first: a computed step counts as computed whatever else was recorded for that time. The rest of the time from a fault to the
recovery is the incident's downtime, filled with its phases in order. What remains is what a generation does outside its steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from holdfast.accounting.ledger import ROLLBACK, UNFINISHED, UNRECORDED, Ledger, LedgerAccount, TimeCategory
from holdfast.accounting.timeline import GenerationSpan, IncidentSpan, JobTimeline, PhaseTime, StepSpans

_LAUNCHING: Final = -1
"""The index of the time before the first generation."""
WARM_UP: Final = "warm-up"


def attribute(timeline: JobTimeline, *, since: int | None = None) -> Ledger:
    """Return the ledger of *timeline*, from *since* on if given (microseconds since 1970)."""
    attribution = _Attribution(timeline, since=timeline.begin if since is None else max(since, timeline.begin))
    attribution.run()
    return attribution.ledger


class _Interval(NamedTuple):
    """An interval within one generation, and within one incident or none."""

    begin: int
    end: int
    position: int
    """Of the generation."""
    incident: IncidentSpan | None
    goes_on: bool
    """Nothing but the asked-for begin of the ledger separates it from the interval before."""


@dataclass(slots=True, kw_only=True)
class _RemainingPhases:
    """The phases of an incident that are not booked yet."""

    incident: IncidentSpan
    remaining: list[PhaseTime]

    def take(self, length: int) -> Iterator[tuple[str, int]]:
        """Yield the phases of the next *length* microseconds."""
        while length > 0 and self.remaining:
            name, left = self.remaining[0]
            taken = min(left, length)
            length -= taken
            if taken:
                yield name, taken
            self.remaining[0] = PhaseTime(name, left - taken)
            if left == taken:
                self.remaining.pop(0)
        if length > 0:
            yield UNRECORDED, length


@dataclass(slots=True)
class _Attribution:
    timeline: JobTimeline
    since: int
    ledger: Ledger = field(default_factory=Ledger)
    phases: _RemainingPhases | None = None
    bounds: list[int] = field(init=False)
    """Where each generation begins, and where the last one ends."""
    downtimes: list[tuple[int, int, IncidentSpan]] = field(init=False)
    """Incidents as intervals that do not overlap."""
    recovered_by: dict[int, IncidentSpan] = field(init=False)
    """Generation to the incident whose recovery started it."""
    saves_left: int = 0
    """Microseconds of saves that did not fit between the steps of the interval before."""

    def __post_init__(self) -> None:
        self.bounds = _generation_bounds(self.timeline)
        self.downtimes = _downtimes(self.timeline)
        self.recovered_by = {one.generation_after: one for one in self.timeline.incidents if one.generation_after is not None}

    def run(self) -> None:
        for interval in self._intervals():
            self._book(interval)
        for index, generation in enumerate(self.timeline.generations):  # steps were booked by generation: take the snapshots' share out
            own = LedgerAccount(TimeCategory.PRODUCTIVE, str(index))
            self.ledger.move(own, LedgerAccount(TimeCategory.SNAPSHOTS), round(generation.snapshots * 1_000_000))
            self.ledger.move(own, LedgerAccount(TimeCategory.PRODUCTIVE))
            self.ledger.booked.pop(own, None)
        for one, after in pairwise([*self.timeline.spares, None]):
            assert one is not None
            until = self.timeline.end if after is None else min(after.at, self.timeline.end)
            begin = max(one.at, self.since)
            idle = max(0, until - begin - _suspended(self.timeline, begin, until))
            self.ledger.book(LedgerAccount(TimeCategory.SPARE), 0, idle * one.devices)

    def _intervals(self) -> Iterator[_Interval]:
        """Split the job's time wherever something begins or ends; leave suspensions out."""
        timeline = self.timeline
        cuts = {timeline.begin, timeline.end, *self.bounds}
        cuts.update(at for begin, end, _ in self.downtimes for at in (begin, end))
        cuts.update(at for begin, end in timeline.suspensions for at in (begin, end))
        down = 0
        for begin, end in pairwise(sorted({*cuts, min(self.since, timeline.end)})):
            if any(start <= begin < until for start, until in timeline.suspensions):
                continue
            while down < len(self.downtimes) and self.downtimes[down][1] <= begin:
                down += 1
            incident = self.downtimes[down][2] if down < len(self.downtimes) and self.downtimes[down][0] <= begin else None
            position = bisect_right(self.bounds, begin, hi=len(timeline.generations)) - 1
            yield _Interval(begin, end, position, incident, goes_on=begin not in cuts)

    def _book(self, interval: _Interval) -> None:
        """Book the steps in *interval* and the time outside them."""
        generation = self.timeline.generations[interval.position] if interval.position != _LAUNCHING else None
        devices = self.timeline.devices if generation is None else generation.devices
        steps = self.timeline.steps.get(generation.number) if generation is not None else None
        free, counts = interval.end - interval.begin, interval.begin >= self.since
        for lost_to, length in steps.within(interval.begin, interval.end) if steps is not None else ():
            free -= length
            if counts and lost_to is None:
                self.ledger.book(LedgerAccount(TimeCategory.PRODUCTIVE, str(interval.position)), length, length * devices)
            elif counts and lost_to is not None:
                cause = self.recovered_by.get(lost_to)
                self.ledger.book(LedgerAccount(TimeCategory.LOST, ROLLBACK, cause.id if cause else ""), length, length * devices)
        for account, length in self._outside_steps(interval, generation, steps, free):
            if counts:
                self.ledger.book(account, length, length * devices)

    def _outside_steps(
        self, interval: _Interval, generation: GenerationSpan | None, steps: StepSpans | None, free: int
    ) -> Iterator[tuple[LedgerAccount, int]]:
        """Yield what the *free* microseconds of *interval* without a step were."""
        if interval.incident is not None:
            if self.phases is None or self.phases.incident is not interval.incident:
                self.phases = _RemainingPhases(incident=interval.incident, remaining=list(interval.incident.phases))
            yield from ((LedgerAccount(TimeCategory.LOST, name, interval.incident.id), length) for name, length in self.phases.take(free))
        elif generation is None:
            yield LedgerAccount(TimeCategory.STARTUP), free
        elif steps is None:  # up to the start of its work it starts; then nothing is known
            started = interval.end if generation.first_step_at is None else min(max(generation.first_step_at, interval.begin), interval.end)
            before = min(free, started - interval.begin)
            yield self._before_first_step(interval.position, generation), before
            unknown = TimeCategory.BETWEEN_STEPS if self.timeline.reports_steps else TimeCategory.STEPS_UNKNOWN
            yield LedgerAccount(unknown), free - before
        else:
            first, last = int(steps.begin[0]), int(steps.end[-1])
            head, tail = max(0, min(interval.end, first) - interval.begin), max(0, interval.end - max(interval.begin, last))
            between = free - head - tail
            yield self._before_first_step(interval.position, generation), head
            recorded = self._save_time(interval, generation.number) + (self.saves_left if interval.goes_on else 0)
            saves = min(between, recorded)
            self.saves_left = recorded - saves
            yield LedgerAccount(TimeCategory.CHECKPOINTS), saves
            yield LedgerAccount(TimeCategory.BETWEEN_STEPS), between - saves
            yield self._after_last_step(interval), tail

    def _before_first_step(self, index: int, generation: GenerationSpan) -> LedgerAccount:
        """Return the account of the time before a generation's first step."""
        incident = self.recovered_by.get(generation.number)
        if incident is not None:
            return LedgerAccount(TimeCategory.LOST, WARM_UP, incident.id)
        return LedgerAccount(TimeCategory.STARTUP if index == 0 else TimeCategory.MIGRATIONS)

    def _after_last_step(self, interval: _Interval) -> LedgerAccount:
        """Return the account of the time after a generation's last step, which depends on what came next."""
        ends = self.bounds[interval.position + 1]
        following = bisect_left(self.downtimes, interval.end, key=lambda down: down[0])
        if following < len(self.downtimes) and self.downtimes[following][0] <= ends and self.downtimes[following][2].stalled:
            return LedgerAccount(TimeCategory.LOST, UNFINISHED, self.downtimes[following][2].id)
        if interval.position + 1 < len(self.timeline.generations):
            return LedgerAccount(TimeCategory.MIGRATIONS)
        return LedgerAccount(TimeCategory.SHUTDOWN if self.timeline.ended else TimeCategory.BETWEEN_STEPS)

    def _save_time(self, interval: _Interval, number: int) -> int:
        """Return the microseconds of saves within *interval*."""
        saves = self.timeline.saves
        low = bisect_right(saves, interval.begin, key=lambda save: save.at)
        high = bisect_right(saves, interval.end, key=lambda save: save.at)
        return sum(save.stall for save in saves[low:high] if save.generation == number)


def _generation_bounds(timeline: JobTimeline) -> list[int]:
    """Return where each generation begins, and the job's end.

    A planned migration is recorded only after the ranks have made it: between the last step of one generation and the first of the next the
    record decides, else the steps do.
    """
    found, last = list[int](), timeline.begin
    for generation in timeline.generations:
        steps = timeline.steps.get(generation.number)
        at = max(last, min(generation.at, int(steps.begin[0])) if steps is not None else generation.at)
        found.append(min(at, timeline.end))
        last = max(found[-1], int(steps.end[-1]) if steps is not None else found[-1])
    return [*found, timeline.end]


def _downtimes(timeline: JobTimeline) -> list[tuple[int, int, IncidentSpan]]:
    """Return the incidents in order, each beginning where the one before was over."""
    found, last = list[tuple[int, int, IncidentSpan]](), timeline.begin
    for one in sorted(timeline.incidents, key=lambda one: one.number):
        begin = min(max(one.fault_at, last), timeline.end)
        last = min(max(begin, one.recovered_at), timeline.end)
        if last > begin:
            found.append((begin, last, one))
    return found


def _suspended(timeline: JobTimeline, begin: int, end: int) -> int:
    """Return the microseconds of suspensions from *begin* to *end*."""
    return sum(max(0, min(until, end) - max(start, begin)) for start, until in timeline.suspensions)


def total_downtime(timeline: JobTimeline, since: int) -> int:
    """Return the microseconds after *since* in which incidents kept the job from training, each counted once, without suspensions."""
    spans = [(max(begin, since), end) for begin, end, _ in _downtimes(timeline)]
    return sum(max(0, end - begin - _suspended(timeline, begin, end)) for begin, end in spans)


def lost_capacity(timeline: JobTimeline, *, since: int | None = None) -> Counter[str]:
    """Return the device-microseconds of ranks missing at reduced size (after *since*), by the id of the incident; empty: without one.

    They are not part of the ledger, because nobody held those devices. If a job grows back in part, the ranks removed last return first.
    """
    begin, found = timeline.begin if since is None else since, Counter[str]()
    caused_by = {one.generation_after: one.id for one in timeline.incidents}
    removed: list[str] = []
    """For each missing device the incident that removed it."""
    for generation, after in pairwise([*timeline.generations, None]):
        assert generation is not None
        missing = max(0, timeline.full_devices - generation.devices)
        removed = removed[:missing] + [caused_by.get(generation.number, "")] * (missing - len(removed))
        until = timeline.end if after is None else min(after.at, timeline.end)
        for incident, devices in Counter(removed).items():
            found[incident] += devices * max(0, until - max(generation.at, begin))
    return +found
