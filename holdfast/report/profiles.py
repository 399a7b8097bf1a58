"""The ranks' own words about their steps: the files below ``profile`` in a job's checkpoint folder, read and put side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.errors import NoProfile
from holdfast.report.layout import Layout, ProfileFacts, recognise
from holdfast.report.wording import plural, ranks

FORMAT: Final = 1
FOLDER: Final = "profile"
ASTRAY: Final = 0.5
"""Share of a step by which the ranks' clocks may differ at its begin; beyond that they are no common clock."""


class ProfileWait(NamedTuple):
    """A window of a step: begin and end in seconds since it began, what was waited for, the how manieth it was."""

    begin: float
    end: float
    kind: str
    number: int


class Copying(NamedTuple):
    """A stretch of copying: begin and end in seconds since the step began, and whether training waited meanwhile."""

    begin: float
    end: float
    overlapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OfKind:
    """The windows of one kind in a rank's newest step."""

    kind: str
    count: int
    seconds: float
    longest: float
    at: float
    """Where in the step the longest begins."""
    counted_on: float
    """Seconds in such windows that every coming step is predicted to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What one rank has told."""

    rank: int
    world: int
    node: str
    generation: int
    time: float
    step: int
    seconds: float
    idle: float
    took: float
    began: float
    waits: Sequence[ProfileWait]
    copies: Sequence[Copying]
    predicted: Mapping[str, float]
    """Seconds in windows that can be counted on, by kind."""
    told: ProfileFacts
    every: int
    plan: Mapping[str, Any] | None
    counts: Mapping[str, Any]

    @property
    def kinds(self) -> list[OfKind]:
        """Return the windows of the newest step by kind, most seconds first."""
        found = []
        for kind in dict.fromkeys([wait.kind for wait in self.waits]):
            waits = [wait for wait in self.waits if wait.kind == kind]
            longest = max(waits, key=lambda wait: wait.end - wait.begin)
            seconds = sum(wait.end - wait.begin for wait in waits)
            found.append(
                OfKind(
                    kind=kind,
                    count=len(waits),
                    seconds=seconds,
                    longest=longest.end - longest.begin,
                    at=longest.begin,
                    counted_on=self.predicted.get(kind, 0.0),
                )
            )
        return sorted(found, key=lambda one: -one.seconds)

    @property
    def longest(self) -> ProfileWait | None:
        """Return the longest window of the newest step."""
        return max(self.waits, key=lambda wait: wait.end - wait.begin, default=None)

    @property
    def idle_share(self) -> float:
        """Return which share of a usual step is idle."""
        return self.idle / self.seconds if self.seconds else 0.0

    @property
    def copy_s(self) -> float | None:
        """Return the seconds of copying of one snapshot."""
        taken = self.counts["taken"]
        return self.counts["copied"] / taken if taken else None

    @property
    def overlapped(self) -> float | None:
        """Return which share of all copying was done while training waited."""
        return min(1.0, self.counts["overlapped"] / self.counts["copied"]) if self.counts["copied"] else None

    @property
    def predicted_overhead(self) -> float | None:
        """Return which share of the training time the plan expects snapshots to cost."""
        return None if self.plan is None else float(self.plan.get("overhead") or 0.0)

    @property
    def measured_overhead(self) -> float | None:
        """Return which share of the training time snapshots have cost."""
        trained = self.counts["trained"]
        return self.counts["slowed"] / trained if trained else None

    @property
    def reason(self) -> str:
        """Return why snapshots are taken as often as they are."""
        return "" if self.plan is None else str(self.plan.get("reason") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """All ranks of a job, side by side."""

    world: int
    generation: int
    ranks: Sequence[RankProfile]
    """Those that have told, by rank."""
    layout: Layout
    notes: Sequence[str] = field(default=())
    """What a reader must know about where the figures come from."""
    starts: Mapping[int, float] = field(default_factory=dict)
    """When each rank's step began, in seconds after the first of all."""

    @property
    def step(self) -> int:
        """Return the newest step that any rank tells of."""
        return max(one.step for one in self.ranks)

    @property
    def time(self) -> float:
        """Return when the newest word came."""
        return max(one.time for one in self.ranks)

    @property
    def ordered(self) -> list[RankProfile]:
        """Return the ranks in the order in which they are drawn."""
        by_rank = {one.rank: one for one in self.ranks}
        return [by_rank[rank] for rank in self.layout.order if rank in by_rank]

    @property
    def span(self) -> float:
        """Return the seconds from the first rank's begin to the last one's end."""
        return max(self.starts[one.rank] + max([one.took, *(copy.end for copy in one.copies)]) for one in self.ranks)

    @property
    def nodes(self) -> int:
        """Return how many nodes have told."""
        return len({one.node for one in self.ranks})


def read(folder: Path, job: str, *, since: float = 0.0) -> JobProfile:
    """Return the profile of *job* whose checkpoints lie in *folder* and whose run began at *since*."""
    files = sorted((folder / FOLDER).glob("rank-*.json"))
    if not files:
        raise NoProfile(job, f"{folder / FOLDER} holds none")
    found, spoilt = [], []
    for file in files:
        try:
            found.append(_parsed(json.loads(file.read_bytes())))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            spoilt.append(f"{file.name}: {str(error) or type(error).__name__}")
    if not found:
        raise NoProfile(job, f"no file in {folder / FOLDER} can be read ({spoilt[0]})")
    return _together(found, spoilt, since)


def _together(found: Sequence[RankProfile], spoilt: Sequence[str], since: float) -> JobProfile:
    newest = max(found, key=lambda one: (one.time, one.generation))
    mine = {one.rank: one for one in found if (one.world, one.generation) == (newest.world, newest.generation) and one.rank < newest.world}
    those = [mine[rank] for rank in sorted(mine)]
    layout = recognise(newest.world, {one.rank: one.told for one in those})
    starts, aligned = _starts(those)
    notes = list(_notes(newest, those, len(found), spoilt, since))
    return JobProfile(world=newest.world, generation=newest.generation, ranks=those, layout=layout, starts=starts, notes=[*notes, *aligned])


def _notes(newest: RankProfile, those: Sequence[RankProfile], files: int, spoilt: Sequence[str], since: float) -> list[str]:
    notes = []
    missing = set(range(newest.world)) - {one.rank for one in those}
    if missing:
        notes.append(f"not told yet in generation {newest.generation}: {'rank' if len(missing) == 1 else 'ranks'} {ranks(missing)}")
    if files > len(those):
        notes.append(f"{plural(files - len(those), 'file')} of other generations or worlds left aside")
    notes += [f"{words}: cannot be read" for words in spoilt[:3]]
    if newest.time < since:
        notes.append("these figures are of an earlier run: this one has told nothing yet")
    return notes


def _starts(those: Sequence[RankProfile]) -> tuple[dict[int, float], list[str]]:
    """Return when each rank's step began, by the wall clock where that can be, and what to say where it cannot."""
    steps = {one.step for one in those}
    usual = max(one.took for one in those)
    if len(steps) > 1:
        low, high = min(steps), max(steps)
        return {one.rank: 0.0 for one in those}, [f"the ranks tell of steps {low} to {high}: each is drawn from its own begin"]
    first = min(one.began for one in those)
    if max(one.began for one in those) - first <= ASTRAY * usual:
        return {one.rank: one.began - first for one in those}, []
    firsts: dict[str, float] = {}
    for one in those:
        firsts[one.node] = min(firsts.get(one.node, one.began), one.began)
    starts = {one.rank: one.began - firsts[one.node] for one in those}
    if max(starts.values()) > ASTRAY * usual:  # not even within a node: the clock was set in between
        starts = dict.fromkeys(starts, 0.0)
    return starts, ["the nodes' clocks differ: each node is drawn from the begin of its own step"]


def _parsed(raw: Mapping[str, Any]) -> RankProfile:
    if raw["format"] != FORMAT:
        raise ValueError(f"of format {raw['format']}, which this Holdfast does not know")
    layout = raw.get("layout") or {}
    predicted: dict[str, float] = {}
    for one in raw["windows"]:
        predicted[str(one["kind"])] = predicted.get(str(one["kind"]), 0.0) + float(one["length"])
    counts = {name: raw["counts"].get(name) or 0 for name in _COUNTS} | {"newest": raw["counts"].get("newest")}
    return RankProfile(
        rank=int(raw["rank"]),
        world=int(raw["world"]),
        node=str(raw["node"]),
        generation=int(raw["generation"]),
        time=float(raw["time"]),
        step=int(raw["step"]),
        seconds=float(raw["seconds"]),
        idle=float(raw["idle"]),
        took=float(raw["took"]) or float(raw["seconds"]),
        began=float(raw["began"]),
        waits=[ProfileWait(float(begin), float(end), str(kind), int(number)) for begin, end, kind, number in raw["timeline"]],
        copies=[Copying(float(begin), float(end), bool(overlapped)) for begin, end, overlapped in raw["copies"]],
        predicted=predicted,
        told=ProfileFacts(
            operations=[(str(what), int(peer)) for what, peer in raw["operations"]],
            copies=[int(rank) for rank in layout.get("copies") or ()],
            sharded=bool(layout.get("sharded")),
        ),
        every=int(raw["every"]),
        plan=raw["plan"],
        counts=counts,
    )


_COUNTS: Final = ("steps", "taken", "given_up", "copied", "overlapped", "paused", "prepared", "slowed", "trained", "size")
