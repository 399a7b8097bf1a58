"""A profile in words and rows: what the terminal and the page say alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.report.layout import Layout
from holdfast.report.profiles import JobProfile, RankProfile
from holdfast.report.wording import NOTHING, count, duration, plural, ranks, share

SCHEDULES: Final[Mapping[str, str]] = {
    "gpipe": "GPipe: all forward passes, then all backward passes",
    "1f1b": "1F1B: one forward pass, one backward pass in turn",
    "interleaved": "interleaved 1F1B",
    "looped": "looped: all forward passes of all chunks, then all backward passes",
}
COLUMNS: Final = 60
"""Width of the picture in letters."""
_LETTERS: Final = {"computes": "█", "waits": "·", "overlapped": "c", "bare": "C"}


def layout_facts(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield what is known about how the ranks work together, name and words."""
    if layout.stages:
        yield (
            "pipeline",
            f"{plural(len(layout.stages), 'stage')}: "
            + "; ".join(
                f"{number} on {'rank' if len(held) == 1 else 'ranks'} {ranks(held)}" for number, held in enumerate(layout.stages, 1)
            ),
        )
        yield "schedule", _schedule(layout)
    elif layout.schedule == "unknown":
        yield "pipeline", f"unknown: {layout.reason}"
    yield "data", _data(layout)
    yield "state", _state(layout)


def _schedule(layout: Layout) -> str:
    if layout.schedule == "unknown":
        return f"unknown: {layout.reason}"
    parts = [SCHEDULES[layout.schedule]]
    if layout.microbatches:
        parts.append(plural(layout.microbatches, "micro-batch", "micro-batches"))
    if layout.chunks and layout.chunks > 1:
        parts.append(f"{layout.chunks} chunks of the model on each rank")
    return ", ".join(parts)


def _data(layout: Layout) -> str:
    if layout.width is None:
        return "unknown"
    what = "pipeline" if layout.stages else "rank"
    if layout.width == 1:
        return f"one {what}: no data parallelism"
    return f"{plural(layout.width, what)} side by side, each on data of its own"


def _state(layout: Layout) -> str:
    if layout.copies is None:
        return "pieces are held by different numbers of ranks"
    if layout.shards > 1:
        kind = "FSDP2" if layout.copies == 1 else "HSDP"
        held = "each on one rank" if layout.copies == 1 else f"each on {plural(layout.copies, 'rank')}"
        return f"{kind}: sharded over {plural(layout.shards, 'rank')}, {held}"
    if layout.copies == 1:
        return "each rank holds its own, of which there is no copy" if layout.world > 1 else "on one rank"
    return f"replicated, each piece on {plural(layout.copies, 'rank')}"


def rank_rows(profile: JobProfile) -> tuple[Sequence[str], list[list[str]]]:
    """Return head and rows of the ranks: their steps and their longest windows."""
    head = ("RANK", "NODE", "STEP", "IDLE", "SHARE", "LONGEST WINDOW")
    return head, [
        [str(one.rank), one.node, duration(one.seconds), duration(one.idle), share(one.idle_share), _longest(one)]
        for one in sorted(profile.ranks, key=lambda one: one.rank)
    ]


def _longest(one: RankProfile) -> str:
    wait = one.longest
    if wait is None:
        return NOTHING
    return f"{duration(wait.end - wait.begin)} {wait.kind}, at {share(wait.begin / one.took)} of the step"


def kind_rows(profile: JobProfile) -> tuple[Sequence[str], list[list[str]]]:
    """Return head and rows of the windows of each rank's newest step, by kind."""
    head = ("RANK", "KIND", "WINDOWS", "SECONDS", "SHARE", "LONGEST", "AT", "COUNTED ON")
    rows = []
    for one in sorted(profile.ranks, key=lambda one: one.rank):
        for place, kind in enumerate(one.kinds):
            rows.append(
                [
                    str(one.rank) if not place else "",
                    kind.kind,
                    count(kind.count),
                    duration(kind.seconds),
                    share(kind.seconds / one.took),
                    duration(kind.longest),
                    duration(kind.at),
                    duration(kind.counted_on),
                ]
            )
    return head, rows


def snapshot_rows(profile: JobProfile) -> tuple[Sequence[str], list[list[str]]]:
    """Return head and rows of what snapshots in memory cost each rank."""
    head = ("RANK", "TAKEN", "GIVEN UP", "COPY", "HIDDEN", "PREDICTED", "MEASURED")
    return head, [
        [
            str(one.rank),
            count(one.counts["taken"]),
            count(one.counts["given_up"]),
            duration(one.copy_s),
            share(one.overlapped),
            share(one.predicted_overhead),
            share(one.measured_overhead),
        ]
        for one in sorted(profile.ranks, key=lambda one: one.rank)
    ]


def cadence(profile: JobProfile) -> list[str]:
    """Say every how many steps a snapshot is taken, and why."""
    agreed = sorted({one.every for one in profile.ranks})
    steps = ["every step" if every == 1 else f"every {every:,} steps" for every in agreed]
    told: dict[str, list[int]] = {}
    for one in profile.ranks:
        words = one.reason or "no plan yet: it copies whenever it waits"
        told.setdefault(words, []).append(one.rank)
    said = [f"A snapshot is taken {' or '.join(steps)}, as the rank needs that asks for the longest distance."]
    if len(told) == 1 and len(profile.ranks) > 1:
        return [*said, f"All ranks: {next(iter(told))}."]
    return [*said, *(f"{'Rank' if len(held) == 1 else 'Ranks'} {ranks(held)}: {words}." for words, held in told.items())]


def picture(profile: JobProfile, most: int) -> list[str]:
    """Return the newest step in letters, a line a rank: computes, waits, copies."""
    whole = profile.span or 1.0
    lines = []
    for one in profile.ordered[:most]:
        stage = profile.layout.stage_of(one.rank)
        name = f"{one.rank}" + (f" stage {stage + 1}" if stage is not None else "")
        lines.append(f"{name:<12} {''.join(_cells(one, profile.starts[one.rank], whole)).rstrip()}")
    return lines


def _cells(one: RankProfile, start: float, whole: float) -> Iterator[str]:
    """Yield a letter for each piece of the step, by what fills most of it; a copy that nobody waits for shows in any case."""
    for column in range(COLUMNS):
        low, high = column * whole / COLUMNS - start, (column + 1) * whole / COLUMNS - start
        inside = min(high, one.took) - max(low, 0.0)
        overlapped = sum(_overlap(copy.begin, copy.end, low, high) for copy in one.copies if copy.overlapped)
        bare = sum(_overlap(copy.begin, copy.end, low, high) for copy in one.copies if not copy.overlapped)
        waits = sum(_overlap(wait.begin, wait.end, low, high) for wait in one.waits)
        if bare > (high - low) / 4:
            yield _LETTERS["bare"]
        elif overlapped > (high - low) / 4:
            yield _LETTERS["overlapped"]
        elif inside < (high - low) / 2:
            yield " "
        else:
            yield _LETTERS["waits" if waits > inside / 2 else "computes"]


def _overlap(begin: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(begin, low))


PICTURE_LEGEND: Final = "█ computes  · waits  c copies while it waits  C copies while training stands still"


def record(profile: JobProfile) -> dict[str, Any]:
    """Return the profile as a program reads it."""
    layout = profile.layout
    return {
        "world": profile.world,
        "generation": profile.generation,
        "step": profile.step,
        "time": profile.time,
        "notes": list(profile.notes),
        "layout": {
            "schedule": layout.schedule,
            "reason": layout.reason,
            "stages": [list(held) for held in layout.stages],
            "pipelines": [list(held) for held in layout.pipelines],
            "width": layout.width,
            "shards": layout.shards,
            "copies": layout.copies,
            "microbatches": layout.microbatches,
            "chunks": layout.chunks,
        },
        "ranks": [_rank_record(profile, one) for one in sorted(profile.ranks, key=lambda one: one.rank)],
    }


def _rank_record(profile: JobProfile, one: RankProfile) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "node": one.node,
        "stage": profile.layout.stage_of(one.rank),
        "step": one.step,
        "step_s": one.seconds,
        "idle_s": one.idle,
        "idle_share": one.idle_share,
        "took_s": one.took,
        "starts_s": profile.starts[one.rank],
        "windows": [wait._asdict() for wait in one.waits],
        "kinds": [
            {
                "kind": kind.kind,
                "windows": kind.count,
                "seconds": kind.seconds,
                "longest_s": kind.longest,
                "longest_at_s": kind.at,
                "counted_on_s": kind.counted_on,
            }
            for kind in one.kinds
        ],
        "copies": [copy._asdict() for copy in one.copies],
        "every": one.every,
        "reason": one.reason,
        "copy_s": one.copy_s,
        "overlapped": one.overlapped,
        "predicted_overhead": one.predicted_overhead,
        "measured_overhead": one.measured_overhead,
        "counts": dict(one.counts),
    }
