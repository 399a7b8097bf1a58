"""The profile of a job: the files that ranks write about their steps below ``profile`` in the checkpoint folder, read and combined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.errors import NoProfile
from holdfast.plurals import plural
from holdfast.report.layout import Layout, ProfileFacts, recognise
from holdfast.report.text.wording import ranks

FORMAT: Final = 1
FOLDER: Final = "profile"
MAX_SKEW: Final = 0.5
"""Share of a step by which the ranks' starts may differ; beyond that their clocks are not synchronised."""


class ProfileWait(NamedTuple):
    """A wait in a step: begin and end in seconds since the step began, what it waits for, and its 1-based index within the step."""

    begin: float
    end: float
    kind: str
    number: int


class ProfileCopy(NamedTuple):
    """An interval of copying: begin and end in seconds since the step began, and whether training was waiting meanwhile."""

    begin: float
    end: float
    overlapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsOfKind:
    """The waits of one kind in a rank's newest step."""

    kind: str
    count: int
    seconds: float
    longest: float
    at: float
    """When in the step the longest begins."""
    predicted: float
    """Predicted seconds of such waits in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """The profile that one rank reported."""

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
    copies: Sequence[ProfileCopy]
    predicted: Mapping[str, float]
    """Predicted seconds of waits in every step, by kind."""
    facts: ProfileFacts
    every: int
    plan: Mapping[str, Any] | None
    counts: Mapping[str, Any]

    @property
    def kinds(self) -> list[WaitsOfKind]:
        """Return the waits of the newest step by kind, most seconds first."""
        found = []
        for kind in dict.fromkeys([wait.kind for wait in self.waits]):
            waits = [wait for wait in self.waits if wait.kind == kind]
            longest = max(waits, key=lambda wait: wait.end - wait.begin)
            seconds = sum(wait.end - wait.begin for wait in waits)
            found.append(
                WaitsOfKind(
                    kind=kind,
                    count=len(waits),
                    seconds=seconds,
                    longest=longest.end - longest.begin,
                    at=longest.begin,
                    predicted=self.predicted.get(kind, 0.0),
                )
            )
        return sorted(found, key=lambda one: -one.seconds)

    @property
    def longest(self) -> ProfileWait | None:
        """Return the longest wait of the newest step."""
        return max(self.waits, key=lambda wait: wait.end - wait.begin, default=None)

    @property
    def idle_share(self) -> float:
        """Return the share of a typical step that is idle."""
        return self.idle / self.seconds if self.seconds else 0.0

    @property
    def copy_s(self) -> float | None:
        """Return the seconds of copying per snapshot."""
        taken = self.counts["taken"]
        return self.counts["copied"] / taken if taken else None

    @property
    def overlapped(self) -> float | None:
        """Return the share of copying that was done while training was waiting."""
        return min(1.0, self.counts["overlapped"] / self.counts["copied"]) if self.counts["copied"] else None

    @property
    def predicted_overhead(self) -> float | None:
        """Return the share of the training time that snapshots are predicted to cost."""
        return None if self.plan is None else float(self.plan.get("overhead") or 0.0)

    @property
    def measured_overhead(self) -> float | None:
        """Return the share of the training time that snapshots have cost."""
        trained = self.counts["trained"]
        return self.counts["slowed"] / trained if trained else None

    @property
    def reason(self) -> str:
        """Return the reason of the snapshot interval."""
        return "" if self.plan is None else str(self.plan.get("reason") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """The profiles of all ranks of a job."""

    world: int
    generation: int
    ranks: Sequence[RankProfile]
    """Those that have reported, by rank."""
    layout: Layout
    notes: Sequence[str] = field(default=())
    """What a reader must know about the data."""
    starts: Mapping[int, float] = field(default_factory=dict)
    """When each rank's step began, in seconds after the first one."""

    @property
    def step(self) -> int:
        """Return the newest step that any rank reports."""
        return max(one.step for one in self.ranks)

    @property
    def time(self) -> float:
        """Return the time of the newest report."""
        return max(one.time for one in self.ranks)

    @property
    def ordered(self) -> list[RankProfile]:
        """Return the ranks in the order in which they are drawn."""
        by_rank = {one.rank: one for one in self.ranks}
        return [by_rank[rank] for rank in self.layout.order if rank in by_rank]

    @property
    def span(self) -> float:
        """Return the seconds from the first rank's start to the last one's end."""
        return max(self.starts[one.rank] + max([one.took, *(copy.end for copy in one.copies)]) for one in self.ranks)

    @property
    def nodes(self) -> int:
        """Return how many nodes have reported."""
        return len({one.node for one in self.ranks})


def read(folder: Path, job: str, *, since: float = 0.0) -> JobProfile:
    """Return the profile of *job* whose checkpoints lie in *folder* and whose run began at *since*."""
    files = sorted((folder / FOLDER).glob("rank-*.json"))
    if not files:
        raise NoProfile(job, f"{folder / FOLDER} holds none")
    found, unreadable = [], []
    for file in files:
        try:
            found.append(_parsed(json.loads(file.read_bytes())))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            unreadable.append(f"{file.name}: {str(error) or type(error).__name__}")
    if not found:
        raise NoProfile(job, f"no file in {folder / FOLDER} can be read ({unreadable[0]})")
    return _combined(found, unreadable, since)


def _combined(found: Sequence[RankProfile], unreadable: Sequence[str], since: float) -> JobProfile:
    newest = max(found, key=lambda one: (one.time, one.generation))
    mine = {one.rank: one for one in found if (one.world, one.generation) == (newest.world, newest.generation) and one.rank < newest.world}
    current = [mine[rank] for rank in sorted(mine)]
    layout = recognise(newest.world, {one.rank: one.facts for one in current})
    starts, clock_notes = _starts(current)
    notes = []
    if missing := set(range(newest.world)) - mine.keys():
        notes.append(f"not reported yet in generation {newest.generation}: {'rank' if len(missing) == 1 else 'ranks'} {ranks(missing)}")
    if len(found) > len(current):
        notes.append(f"{plural(len(found) - len(current), 'file')} of other generations or world sizes ignored")
    notes += [f"{problem}: cannot be read" for problem in unreadable[:3]]
    if newest.time < since:
        notes.append("this profile is of an earlier run: the present one has reported none yet")
    return JobProfile(
        world=newest.world, generation=newest.generation, ranks=current, layout=layout, starts=starts, notes=[*notes, *clock_notes]
    )


def _starts(profiles: Sequence[RankProfile]) -> tuple[dict[int, float], list[str]]:
    """Return when each rank's step began, by the wall clock if possible, else with notes about that."""
    steps = {one.step for one in profiles}
    longest = max(one.took for one in profiles)
    if len(steps) > 1:
        low, high = min(steps), max(steps)
        return {one.rank: 0.0 for one in profiles}, [f"the ranks report steps {low} to {high}: each is drawn from its own start"]
    first = min(one.began for one in profiles)
    if max(one.began for one in profiles) - first <= MAX_SKEW * longest:
        return {one.rank: one.began - first for one in profiles}, []
    firsts: dict[str, float] = {}
    for one in profiles:
        firsts[one.node] = min(firsts.get(one.node, one.began), one.began)
    starts = {one.rank: one.began - firsts[one.node] for one in profiles}
    if max(starts.values()) > MAX_SKEW * longest:  # the clock of a node was set in between
        starts = dict.fromkeys(starts, 0.0)
    return starts, ["the nodes' clocks differ: each node is drawn from the start of its own step"]


def _parsed(raw: Mapping[str, Any]) -> RankProfile:
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']} is not supported by this version")
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
        copies=[ProfileCopy(float(begin), float(end), bool(overlapped)) for begin, end, overlapped in raw["copies"]],
        predicted=predicted,
        facts=ProfileFacts(
            operations=[(str(what), int(peer)) for what, peer in raw["operations"]],
            copies=[int(rank) for rank in layout.get("copies") or ()],
            sharded=bool(layout.get("sharded")),
        ),
        every=int(raw["every"]),
        plan=raw["plan"],
        counts=counts,
    )


_COUNTS: Final = ("steps", "taken", "given_up", "copied", "overlapped", "paused", "prepared", "slowed", "trained", "size")
