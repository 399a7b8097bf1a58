"""What `holdfast checkpoints` tells a person."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.audit.disk import OnDisk
from holdfast.cli.commands.checkpoints import size_of
from holdfast.cli.output import heading, say, say_rows
from holdfast.report.wording import NOTHING, count, duration, plural, ranks, size

if TYPE_CHECKING:
    from holdfast.cli.commands.checkpoints import CheckpointReport

HEAD: Final = ("TIER", "STEP", "LINEAGE", "STATE", "AGE", "SIZE", "WHERE")
WIDTH: Final = 80


def show(account: CheckpointReport) -> None:
    """Tell all that was found."""
    outlook = account.outlook
    at = f" at step {count(outlook.step.step)}" if outlook.step else ""
    heading(f"{outlook.job.name}  {outlook.state}{at}")
    rows = [*_disk_rows(account), *_memory_rows(account)]
    if rows:
        say_rows(HEAD, rows, coloured=3)
    for line in (*_absent(account), _recovery(account)):
        _say(line)
    for title, lines in _reports(account):
        say()
        heading(title)
        for line in lines:
            _say(line, "  ")
    say(f"Checkpoints are in {account.directory}")


def _say(text: str, indent: str = "") -> None:
    """Write a sentence in lines that fit an ordinary terminal."""
    rest = indent + "  " * bool(indent)
    wrapped = textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )  # names of nodes and files stay in one piece
    for line in wrapped:
        say(line)


def _disk_rows(account: CheckpointReport) -> Iterator[list[str]]:
    now = time.time()
    for one in account.disk:
        told = one.manifest
        if told is None:
            yield ["disk", count(one.step), NOTHING, one.standing, NOTHING, NOTHING, one.path.name]
            continue
        where = f"{plural(len(told.files), 'file')}, {plural(told.world_size, 'rank')}"
        yield ["disk", count(one.step), NOTHING, one.standing, duration(max(0.0, now - told.time)), size(told.size), where]


def _memory_rows(account: CheckpointReport) -> Iterator[list[str]]:
    now = time.time()
    for one in account.moments:
        for tier, kept in one.tiers():
            nodes = ", ".join(sorted({each.node for each in kept}))
            where = f"{ranks(each.label.rank for each in kept)} on {nodes}"
            age = duration(max(0.0, now - max(each.label.time for each in kept)))
            yield [tier, count(one.step), str(one.lineage), one.standing, age, size(size_of(kept)), where]


def _absent(account: CheckpointReport) -> Iterator[str]:
    """Say what there is nothing of, and why."""
    if not account.disk:
        yield "disk: no checkpoint"
    for one in account.disk:
        if not account.verified:
            yield from (f"{one.path.name}: {why}" for why in one.broken)
    if not account.verified:
        yield from (f"memory, step {count(one.step)}: {one.lack}" for one in account.moments if one.lack)
    yield from (f"memory of {node} cannot be reached: {why}" for node, why in sorted(account.away.items()))
    if not account.moments and not account.away:
        if account.outlook.ended:
            yield "memory: none; what nodes keep there goes with the end of the job"
        elif account.outlook.holder is None:
            yield "memory: none, and no flow steers the job; `holdfast nodes` shows what runs"
        else:
            yield "memory: none yet, or `checkpoint.memory.every` is 0"


def _recovery(account: CheckpointReport) -> str:
    """Say what a recovery would take."""
    source, again = account.source, account.again
    if source is None:
        return "A recovery would begin at step 0: there is nothing whole to go back to."
    what = "the checkpoint" if isinstance(source, OnDisk) else "the memory of nodes"
    twice = "" if again is None else f"; {plural(again, 'step')} would be computed again"
    who = "The same job, run again," if account.outlook.ended else "A recovery with new processes"
    return f"{who} would go on from step {count(source.step)}, out of {what}{twice}."


def _reports(account: CheckpointReport) -> Iterator[tuple[str, list[str]]]:
    """Give what the audit found, one part for each checkpoint and moment."""
    if not account.verified:
        return
    for disk in account.disk:
        yield f"disk, step {count(disk.step)}: {disk.standing}", list(_lines(disk.broken, disk.proven, disk.unproven))
    for one in account.moments:
        lines = _lines([*one.spoilt, *one.broken, *([one.lack] if one.lack else [])], one.proven, one.unproven)
        yield f"memory, step {count(one.step)}, lineage {one.lineage}: {one.standing}", list(lines)
    if account.spoilt:
        yield "memory, step unknown: damaged", list(_lines(account.spoilt, [], []))


def _lines(broken: list[str], proven: list[str], unproven: list[str]) -> Iterator[str]:
    yield from (f"BROKEN  {line}" for line in broken)
    yield from (f"proven  {line}" for line in proven)
    yield from (f"open    {line}" for line in unproven)
