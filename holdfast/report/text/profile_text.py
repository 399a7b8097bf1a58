"""A profile as text and tables; the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.plurals import named_ranks, plural
from holdfast.report.layout import Layout
from holdfast.report.profiles import JobProfile, RankProfile
from holdfast.report.text.wording import NOTHING, count, duration, share

SCHEDULES: Final[Mapping[str, str]] = {
    "gpipe": "GPipe: all forward passes, then all backward passes",
    "1f1b": "1F1B: one forward pass, one backward pass in turn",
    "interleaved": "interleaved 1F1B",
    "looped": "looped: all forward passes of all chunks, then all backward passes",
}
COLUMNS: Final = 60
"""Width of the picture in characters."""
_CHARACTERS: Final = {"computes": "█", "waits": "·", "overlapped": "c", "exposed": "C"}


def layout_facts(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield name and text of what is known about the parallelism of the job."""
    if layout.stages:
        yield (
            "pipeline",
            f"{plural(len(layout.stages), 'stage')}: "
            + "; ".join(f"{number} on {named_ranks(of_stage)}" for number, of_stage in enumerate(layout.stages, 1)),
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
    return f"{plural(layout.width, what)} in parallel, each on its own data"


def _state(layout: Layout) -> str:
    if layout.copies is None:
        return "shards are replicated on different numbers of ranks"
    if layout.shards > 1:
        kind = "FSDP2" if layout.copies == 1 else "HSDP"
        return f"{kind}: sharded over {plural(layout.shards, 'rank')}, each shard on {plural(layout.copies, 'rank')}"
    if layout.copies == 1:
        return "each rank has its own, without a replica" if layout.world > 1 else "on one rank"
    return f"replicated on {plural(layout.copies, 'rank')}"


def rank_rows(profile: JobProfile) -> tuple[Sequence[str], list[list[str]]]:
    """Return head and rows of the ranks: their steps and their longest waits."""
    head = ("RANK", "NODE", "STEP", "IDLE", "SHARE", "LONGEST WAIT")
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
    """Return head and rows of the waits in each rank's newest step, by kind."""
    head = ("RANK", "KIND", "WAITS", "TIME", "SHARE", "LONGEST", "AT", "PREDICTED")
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
                    duration(kind.predicted),
                ]
            )
    return head, rows


def snapshot_rows(profile: JobProfile) -> tuple[Sequence[str], list[list[str]]]:
    """Return head and rows of what in-memory snapshots cost each rank."""
    head = ("RANK", "TAKEN", "ABANDONED", "COPY", "OVERLAPPED", "PREDICTED", "MEASURED")
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


def snapshot_interval(profile: JobProfile) -> list[str]:
    """Return sentences about the snapshot interval and its reasons."""
    agreed = sorted({one.every for one in profile.ranks})
    steps = ["every step" if every == 1 else f"every {every:,} steps" for every in agreed]
    reasons: dict[str, list[int]] = {}
    for one in profile.ranks:
        reasons.setdefault(one.reason or "no plan yet: it copies whenever it waits", []).append(one.rank)
    sentences = [f"A snapshot is taken {' or '.join(steps)}, the longest interval that any rank needs."]
    if len(reasons) == 1 and len(profile.ranks) > 1:
        return [*sentences, f"All ranks: {next(iter(reasons))}."]
    return [*sentences, *(f"{named_ranks(numbers).capitalize()}: {reason}." for reason, numbers in reasons.items())]


def picture(profile: JobProfile, limit: int) -> list[str]:
    """Return the newest step as characters, one line per rank: compute, wait, copy."""
    span = profile.span or 1.0
    lines = []
    for one in profile.ordered[:limit]:
        stage = profile.layout.stage_of(one.rank)
        name = f"{one.rank}" + (f" stage {stage + 1}" if stage is not None else "")
        lines.append(f"{name:<12} {''.join(_cells(one, profile.starts[one.rank], span)).rstrip()}")
    return lines


def _cells(one: RankProfile, start: float, span: float) -> Iterator[str]:
    """Yield a character for each part of the step, by what fills most of it; a copy shows even if it fills less."""
    for column in range(COLUMNS):
        low, high = column * span / COLUMNS - start, (column + 1) * span / COLUMNS - start
        inside = min(high, one.took) - max(low, 0.0)
        overlapped = sum(_overlap(copy.begin, copy.end, low, high) for copy in one.copies if copy.overlapped)
        exposed = sum(_overlap(copy.begin, copy.end, low, high) for copy in one.copies if not copy.overlapped)
        waits = sum(_overlap(wait.begin, wait.end, low, high) for wait in one.waits)
        if exposed > (high - low) / 4:
            yield _CHARACTERS["exposed"]
        elif overlapped > (high - low) / 4:
            yield _CHARACTERS["overlapped"]
        elif inside < (high - low) / 2:
            yield " "
        else:
            yield _CHARACTERS["waits" if waits > inside / 2 else "computes"]


def _overlap(begin: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(begin, low))


PICTURE_LEGEND: Final = "█ computes  · waits  c copies while it waits  C copies while training is stopped"


def record(profile: JobProfile) -> dict[str, Any]:
    """Return the profile as JSON."""
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
            "stages": [list(one) for one in layout.stages],
            "pipelines": [list(one) for one in layout.pipelines],
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
                "predicted_s": kind.predicted,
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
