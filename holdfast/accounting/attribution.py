"""Settle the accounts of one job: every microsecond from its submission to its end is booked, each once.

Steps come first: what a rank computed was computed, whatever was thought meanwhile. What lies between the fault and the return of an
incident is its downtime, filled with the phases in their order. The rest is what a generation does beside its steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from holdfast.accounting.ledger import NOT_TOLD, ROLLBACK, UNFINISHED, Ledger, LedgerAccount, Use
from holdfast.accounting.steps import StepSpans
from holdfast.accounting.timeline import GenerationSpan, IncidentSpan, JobTimeline, PhaseTime

_LAUNCHING: Final = -1
"""The place of the generation before the first."""
WARM_UP: Final = "warm-up"


def settle(life: JobTimeline, *, since: int | None = None) -> Ledger:
    """Return the ledger of *life*, of what came after *since* (microseconds since 1970) where that is given."""
    settling = _Attribution(life, since=life.begin if since is None else max(since, life.begin))
    settling.book_all()
    return settling.ledger


class _Stay(NamedTuple):
    """A piece of time within one generation, and within one incident or none."""

    begin: int
    end: int
    place: int
    trouble: IncidentSpan | None


@dataclass(slots=True, kw_only=True)
class _Filling:
    """The phases of an incident that are still to be laid out."""

    trouble: IncidentSpan
    left: list[PhaseTime]

    def lay(self, length: int) -> Iterator[tuple[str, int]]:
        """Yield the phases of the next *length* microseconds."""
        while length > 0 and self.left:
            name, whole = self.left[0]
            took = min(whole, length)
            length -= took
            if took:
                yield name, took
            self.left[0] = PhaseTime(name, whole - took)
            if whole == took:
                self.left.pop(0)
        if length > 0:
            yield NOT_TOLD, length


@dataclass(slots=True)
class _Attribution:
    life: JobTimeline
    since: int
    ledger: Ledger = field(default_factory=Ledger)
    filling: _Filling | None = None
    bounds: list[int] = field(init=False)
    """Where each generation begins, and where the last one ends."""
    downs: list[tuple[int, int, IncidentSpan]] = field(init=False)
    """Incidents as intervals that do not overlap."""
    back_by: dict[int, IncidentSpan] = field(init=False)
    """The incident that each generation answered."""

    def __post_init__(self) -> None:
        self.bounds = _bounds(self.life)
        self.downs = _downs(self.life)
        self.back_by = {one.generation_after: one for one in self.life.troubles if one.generation_after is not None}

    def book_all(self) -> None:
        for stay in self._stays():
            self._book(stay)
        self._price_snapshots()
        for one, after in pairwise([*self.life.spares, None]):
            assert one is not None
            until, begin = self.life.end if after is None else min(after.at, self.life.end), max(one.at, self.since)
            suspended = sum(max(0, min(end, until) - max(start, begin)) for start, end in self.life.suspensions)
            self.ledger.idle(max(0, until - begin - suspended) * one.devices)

    def _stays(self) -> Iterator[_Stay]:
        """Part the job's time at all that begins or ends in it."""
        life = self.life
        cuts = {life.begin, life.end, min(self.since, life.end), *self.bounds}
        cuts.update(at for begin, end, _ in self.downs for at in (begin, end))
        cuts.update(at for begin, end in life.suspensions for at in (begin, end))
        down = 0
        for begin, end in pairwise(sorted(cuts)):
            if any(start <= begin < until for start, until in life.suspensions):
                continue
            while down < len(self.downs) and self.downs[down][1] <= begin:
                down += 1
            trouble = self.downs[down][2] if down < len(self.downs) and self.downs[down][0] <= begin else None
            yield _Stay(begin, end, bisect_right(self.bounds, begin, hi=len(life.eras)) - 1, trouble)

    def _book(self, stay: _Stay) -> None:
        """Book the steps in *stay*, and what lies beside them."""
        era = self.life.eras[stay.place] if stay.place != _LAUNCHING else None
        devices = self.life.devices if era is None else era.devices
        steps = self.life.steps.get(era.number) if era is not None else None
        free, counts = stay.end - stay.begin, stay.begin >= self.since
        for lost_to, length in steps.within(stay.begin, stay.end) if steps is not None else ():
            free -= length
            if counts:
                self.ledger.book(self._of_steps(lost_to, stay.place), length, devices)
        for account, length in self._beside(stay, era, steps, free):
            if counts:
                self.ledger.book(account, length, devices)

    def _of_steps(self, lost_to: int | None, place: int) -> LedgerAccount:
        """Return the account of steps that were lost to a generation, or kept: these by generation, until `_price_snapshots`."""
        if lost_to is not None:
            blamed = self.back_by.get(lost_to)
            return LedgerAccount(Use.LOST, ROLLBACK, blamed.id if blamed else "")
        return LedgerAccount(Use.PRODUCTIVE, str(place))

    def _price_snapshots(self) -> None:
        """Take out of each generation's kept steps what snapshots took of them."""
        for place, era in enumerate(self.life.eras):
            of_era, kept = LedgerAccount(Use.PRODUCTIVE, str(place)), LedgerAccount(Use.PRODUCTIVE)
            self.ledger.move(of_era, LedgerAccount(Use.SNAPSHOTS), round(era.snapshots * 1_000_000))
            self.ledger.move(of_era, kept)
            self.ledger.booked.pop(of_era, None)

    def _beside(self, stay: _Stay, era: GenerationSpan | None, steps: StepSpans | None, free: int) -> Iterator[tuple[LedgerAccount, int]]:
        """Yield what the *free* microseconds of *stay* were, in which no step was computed."""
        if stay.trouble is not None:
            if self.filling is None or self.filling.trouble is not stay.trouble:
                self.filling = _Filling(trouble=stay.trouble, left=list(stay.trouble.phases))
            yield from ((LedgerAccount(Use.LOST, name, stay.trouble.id), length) for name, length in self.filling.lay(free))
        elif era is None:
            yield LedgerAccount(Use.LAUNCH), free
        elif steps is None:
            yield from self._without_steps(stay, era, free)
        else:
            yield from self._around_steps(stay, era, steps, free)

    def _without_steps(self, stay: _Stay, era: GenerationSpan, free: int) -> Iterator[tuple[LedgerAccount, int]]:
        """Yield the time of a generation of which no step is known: the way to its first one, then what nobody told of."""
        at_work = stay.end if era.first_step_at is None else min(max(era.first_step_at, stay.begin), stay.end)
        before = min(free, at_work - stay.begin)
        yield self._way_in(stay.place, era), before
        yield LedgerAccount(Use.BESIDE if self.life.tells_steps else Use.UNSEEN), free - before

    def _around_steps(self, stay: _Stay, era: GenerationSpan, steps: StepSpans, free: int) -> Iterator[tuple[LedgerAccount, int]]:
        """Yield what lies before the first, between, and after the last of a generation's steps."""
        first, last = int(steps.begin[0]), int(steps.end[-1])
        head, tail = max(0, min(stay.end, first) - stay.begin), max(0, stay.end - max(stay.begin, last))
        between = free - head - tail
        yield self._way_in(stay.place, era), head
        saves = min(between, self._saved(stay, era.number))
        yield LedgerAccount(Use.CHECKPOINTS), saves
        yield LedgerAccount(Use.BESIDE), between - saves
        yield self._way_out(stay), tail

    def _way_in(self, place: int, era: GenerationSpan) -> LedgerAccount:
        """Return the account of the time before a generation's first step."""
        answered = self.back_by.get(era.number)
        if answered is not None:
            return LedgerAccount(Use.LOST, WARM_UP, answered.id)
        return LedgerAccount(Use.LAUNCH if place == 0 else Use.MOVES)

    def _way_out(self, stay: _Stay) -> LedgerAccount:
        """Return the account of the time after a generation's last step: what came next says what it was."""
        leaves = self.bounds[stay.place + 1]
        coming = bisect_left(self.downs, stay.end, key=lambda down: down[0])
        if coming < len(self.downs) and self.downs[coming][0] <= leaves and self.downs[coming][2].stalled:
            return LedgerAccount(Use.LOST, UNFINISHED, self.downs[coming][2].id)
        if stay.place + 1 < len(self.life.eras):
            return LedgerAccount(Use.MOVES)
        return LedgerAccount(Use.ENDING if self.life.ended else Use.BESIDE)

    def _saved(self, stay: _Stay, number: int) -> int:
        """Return the microseconds of saves within *stay*."""
        saves = self.life.saves
        low, high = bisect_right(saves, stay.begin, key=lambda save: save.at), bisect_right(saves, stay.end, key=lambda save: save.at)
        return sum(save.stood for save in saves[low:high] if save.generation == number)


def _bounds(life: JobTimeline) -> list[int]:
    """Return where each generation begins, and the job's end.

    A planned change is on record only after the ranks have made it: where the last step of one and the first of the next leave it open, the
    record decides, else the steps.
    """
    found, last = list[int](), life.begin
    for era in life.eras:
        steps = life.steps.get(era.number)
        at = max(last, min(era.at, int(steps.begin[0])) if steps is not None else era.at)
        found.append(min(at, life.end))
        last = max(found[-1], int(steps.end[-1]) if steps is not None else found[-1])
    return [*found, life.end]


def time_down(life: JobTimeline, since: int) -> int:
    """Return the microseconds after *since* in which incidents kept the job from training, each counted once, suspensions left out."""
    found = 0
    for begin, end, _ in _downs(life):
        begin = max(begin, since)  # noqa: PLW2901 (what came before is not asked for)
        suspended = sum(max(0, min(until, end) - max(start, begin)) for start, until in life.suspensions)
        found += max(0, end - begin - suspended)
    return found


def _downs(life: JobTimeline) -> list[tuple[int, int, IncidentSpan]]:
    """Return the incidents in their order, each from where the one before was over."""
    found, last = list[tuple[int, int, IncidentSpan]](), life.begin
    for one in sorted(life.troubles, key=lambda one: one.number):
        begin = min(max(one.fault_at, last), life.end)
        last = min(max(begin, one.back_at), life.end)
        if last > begin:
            found.append((begin, last, one))
    return found
