"""What `holdfast checkpoints` tells a person."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.cli.output import heading, say, say_rows
from holdfast.report.wording import NOTHING, count, duration, plural, ranks, size
from holdfast.runtime.checkpoint_verifier.findings import StoredCheckpoint

if TYPE_CHECKING:
    from holdfast.checkpoints.inventory import Inventory
    from holdfast.cli.commands.checkpoints import CheckpointReport
    from holdfast.runtime.checkpoint_verifier.findings import Findings

HEAD: Final = ("TIER", "STEP", "LINEAGE", "STATE", "AGE", "SIZE", "WHERE")
WIDTH: Final = 80


def show(report: CheckpointReport) -> None:
    """Print all that was found."""
    job, found = report.job, report.found
    at = f" at step {count(job.step.step)}" if job.step else ""
    heading(f"{job.job.name}  {job.state}{at}")
    rows = [*_disk_rows(found), *_memory_rows(found)]
    if rows:
        say_rows(HEAD, rows, coloured=3)
    for line in (*_absent(report), _recovery(report)):
        _say(line)
    for title, lines in _findings(found):
        say()
        heading(title)
        for line in lines:
            _say(line, "  ")
    say(f"Checkpoints are in {found.directory}")


def _say(text: str, indent: str = "") -> None:
    """Write a sentence in lines that fit an ordinary terminal."""
    rest = indent + "  " * bool(indent)
    wrapped = textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )  # names of nodes and files stay in one piece
    for line in wrapped:
        say(line)


def _disk_rows(found: Inventory) -> Iterator[list[str]]:
    now = time.time()
    for one in found.disk:
        manifest = one.manifest
        if manifest is None:
            yield ["disk", count(one.step), NOTHING, one.status, NOTHING, NOTHING, one.path.name]
            continue
        where = f"{plural(len(manifest.files), 'file')}, {plural(manifest.world_size, 'rank')}"
        yield ["disk", count(one.step), NOTHING, one.status, duration(max(0.0, now - manifest.time)), size(manifest.size), where]


def _memory_rows(found: Inventory) -> Iterator[list[str]]:
    now = time.time()
    for one in found.memory:
        for tier, snapshots in one.tiers():
            labels = [held.label for held in snapshots]
            nodes = ", ".join(sorted({held.node for held in snapshots}))
            where = f"{ranks(label.rank for label in labels)} on {nodes}"
            age = duration(max(0.0, now - max(label.time for label in labels)))
            yield [tier, count(one.step), str(one.lineage), one.status, age, size(sum(label.file_size for label in labels)), where]


def _absent(report: CheckpointReport) -> Iterator[str]:
    """Say what there is nothing of, and why."""
    job, found = report.job, report.found
    if not found.disk:
        yield "disk: no checkpoint"
    if not found.verified:
        yield from (f"{one.path.name}: {why}" for one in found.disk for why in one.findings.broken)
        yield from (f"memory, step {count(one.step)}: {one.missing}" for one in found.memory if one.missing)
    yield from (f"memory of {node} cannot be reached: {why}" for node, why in sorted(found.unreachable.items()))
    if not found.memory and not found.unreachable:
        if job.ended:
            yield "memory: none; what nodes keep there goes with the end of the job"
        elif job.holder is None:
            yield "memory: none, and no flow steers the job; `holdfast nodes` shows what runs"
        else:
            yield "memory: none yet, or `checkpoint.memory.every` is 0"


def _recovery(report: CheckpointReport) -> str:
    """Say what a recovery would take."""
    source, again = report.found.source, report.again
    if source is None:
        return "A recovery would begin at step 0: there is nothing whole to go back to."
    what = "the checkpoint" if isinstance(source, StoredCheckpoint) else "the memory of nodes"
    twice = "" if again is None else f"; {plural(again, 'step')} would be computed again"
    who = "The same job, run again," if report.job.ended else "A recovery with new processes"
    return f"{who} would go on from step {count(source.step)}, out of {what}{twice}."


def _findings(found: Inventory) -> Iterator[tuple[str, list[str]]]:
    """Give what was found by reading everything, one part for each checkpoint and each step in memory."""
    if not found.verified:
        return
    for disk in found.disk:
        yield f"disk, step {count(disk.step)}: {disk.status}", _lines(disk.findings.broken, disk.findings)
    for one in found.memory:
        lines = _lines([*one.broken, *([one.missing] if one.missing else [])], one.findings)
        yield f"memory, step {count(one.step)}, lineage {one.lineage}: {one.status}", lines
    if found.damaged:
        yield "memory, step unknown: damaged", _lines(found.damaged)


def _lines(broken: list[str], findings: Findings | None = None) -> list[str]:
    proven, unproven = (findings.proven, findings.unproven) if findings else ([], [])
    return [*(f"BROKEN  {line}" for line in broken), *(f"proven  {line}" for line in proven), *(f"open    {line}" for line in unproven)]
