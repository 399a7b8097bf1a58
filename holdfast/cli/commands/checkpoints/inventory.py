"""`holdfast checkpoint ls` and `verify`: everything that a job could resume from, and whether it is intact."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
from pydantic import ValidationError

from holdfast.checkpoints.inventory import Inventory, SnapshotSet, snapshot_sets, stored_checkpoints, stored_snapshots
from holdfast.checkpoints.memstores import connect_stores
from holdfast.checkpoints.verify import MemoryVerifier, VerifierProcess, verify_disk
from holdfast.cli.job_view import JobView, find_job, view_job
from holdfast.cli.output import echo, echo_json, echo_table, echo_wrapped, heading, section
from holdfast.cluster import open_cluster
from holdfast.errors import HistoryError
from holdfast.exit_codes import FAILED
from holdfast.history import queries
from holdfast.history.models import Checkpoint
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.report.text.wording import NOTHING, count, duration, ranks, size, visible
from holdfast.runtime.checkpoint_verifier.findings import Findings, StoredCheckpoint
from holdfast.spec import TrainingJob
from holdfast.stored_job import checkpoint_directory, recorded_cluster

FLAWS: Final = frozenset({"checkpoint-corrupt", "checkpoint-torn"})
"""Kinds of damage in a checkpoint that was complete once."""
HEAD: Final = ("TIER", "STEP", "LINEAGE", "STATE", "AGE", "SIZE", "WHERE")


@dataclass(slots=True)
class CheckpointReport:
    """Everything that a job could resume from, and its present step."""

    job: JobView
    found: Inventory

    @property
    def recomputed(self) -> int | None:
        """Return how many steps would be recomputed after a recovery."""
        step, source = self.job.step, self.found.source
        return None if step is None or source is None else max(0, step.step - source.step)


def list_checkpoints(job: str | None, *, as_json: bool) -> int:
    """Show everything that a job could resume from."""
    return _inspect(job, verify=False, as_json=as_json)


def verify_checkpoints(job: str | None, *, as_json: bool) -> int:
    """Read everything that a job could resume from, and show what is proven about it."""
    return _inspect(job, verify=True, as_json=as_json)


def _inspect(job: str | None, *, verify: bool, as_json: bool) -> int:
    with closing(History.open(create=False)) as history:
        view = view_job(history, find_job(history, job))
        report = CheckpointReport(view, gather(view, verify=verify))
        if verify:
            record_findings(history, report)  # first: whoever reads the output may leave in the middle of it
        else:
            recall_findings(history, report.found.disk)
    if as_json:
        echo_json(as_record(report))
    else:
        show(report)
    return 0 if report.found.sound else FAILED


def gather(job: JobView, *, verify: bool) -> Inventory:
    """Return what is on disk and in the memory of nodes."""
    directory = checkpoint_directory(job.job)
    disk = stored_checkpoints(directory, verify=verify)
    generation = job.generation
    members = generation.ranks if generation and not job.ended else ()
    reached = connect_stores(open_cluster(recorded_cluster(job.job)), job.job, members)
    snapshots = stored_snapshots(reached.stores, reached.unreachable)
    world = generation.world_size if generation else max((one.label.world for one in snapshots), default=0)
    found = Inventory(directory, world, disk, verify, unreachable=reached.unreachable)
    if not verify:
        found.memory = snapshot_sets(snapshots, world)
        return found
    with VerifierProcess(_python_of(job)) as verifier:
        verify_disk(disk, verifier)
        memory = MemoryVerifier(reached.stores, world, disk, verifier)
        found.memory, found.damaged = memory.snapshot_sets(), memory.damaged()
    found.unreachable |= memory.unreachable
    return found


def record_findings(history: History, report: CheckpointReport) -> None:
    """Record each corrupt checkpoint that a verification found, and each that is intact again, so that others need not read it."""
    disk = [one for one in report.found.disk if one.manifest is not None]
    known, job = _known_findings(history, disk), report.job
    rows = []
    for one in disk:
        before = known.get(str(one.path))
        if one.flaw == (before.problem if before is not None and before.problem in FLAWS else None):
            continue
        generation = one.manifest.generation if one.manifest else 0
        row = Checkpoint(job_id=job.job.id, at=time.time(), step=one.step, generation=generation, path=str(one.path), problem=one.flaw)
        row.reason = one.findings.broken[0] if one.flaw else "found intact by `holdfast checkpoint verify`"
        rows.append(row)
    if not rows:
        return
    try:
        with history.session() as session:
            session.add_all(rows)
    except HistoryError as error:
        click.echo(visible(f"the result is not recorded, so `holdfast checkpoint ls` will not know it: {error}"), err=True)


def recall_findings(history: History, disk: Sequence[StoredCheckpoint]) -> None:
    """Add to each checkpoint on *disk* the damage that a verification, or a rank that resumed, found since it was written."""
    for path, known in _known_findings(history, disk).items():
        one = next(one for one in disk if str(one.path) == path)
        if known.problem in FLAWS and one.complete:
            one.flaw = "checkpoint-corrupt"
            when = duration(max(0.0, time.time() - known.at))
            one.findings.broken.append(f"found {when} ago: {known.reason}; `holdfast checkpoint verify` reads it again")


def _known_findings(history: History, disk: Sequence[StoredCheckpoint]) -> dict[str, Checkpoint]:
    """Return by path the newest record of each of *disk*; one from before it was written is about an earlier checkpoint of that step."""
    written = {str(one.path): one.manifest.time for one in disk if one.manifest is not None}
    return {row.path: row for row in queries.checkpoints_at(history, list(written)) if row.at >= written[row.path]}


def _python_of(job: JobView) -> str:
    try:
        return TrainingJob.model_validate(job.job.spec).python or sys.executable
    except ValidationError:  # written by another version
        return sys.executable


# -- for programs -----------------------------------------------------------------------------------------------------


def as_record(report: CheckpointReport) -> dict[str, Any]:
    """Return the report for programs; times in seconds since 1970."""
    now, job, found, source = time.time(), report.job, report.found, report.found.source
    recovery = None
    if source is not None:
        tier = "disk" if isinstance(source, StoredCheckpoint) else "memory"
        recovery = {"tier": tier, "step": source.step, "steps_recomputed": report.recomputed}
    return {
        "job": job.job.name,
        "id": job.job.id,
        "state": job.state,
        "step": job.step.step if job.step else None,
        "world_size": found.world,
        "directory": str(found.directory),
        "verified": found.verified,
        "sound": found.sound,
        "recovery": recovery,
        "disk": [_checkpoint_record(one, now) for one in found.disk],
        "memory": [_set_record(one, now) for one in found.memory],
        "damaged": found.damaged,
        "unreachable": found.unreachable,
    }


def _checkpoint_record(one: StoredCheckpoint, now: float) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "step": one.step,
        "status": one.status,
        "path": str(one.path),
        "size": manifest.size if manifest else None,
        "files": sorted(manifest.files) if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "generation": manifest.generation if manifest else None,
        "age_s": now - manifest.time if manifest else None,
        **asdict(one.findings),
    }


def _set_record(one: SnapshotSet, now: float) -> dict[str, Any]:
    return {
        "step": one.step,
        "lineage": one.lineage,
        "status": one.status,
        "complete": one.complete,
        "missing": one.missing,
        "age_s": now - one.time,
        "size": sum(held.label.file_size for held in one.snapshots),
        "snapshots": [
            {
                "node": held.node,
                "file": held.name,
                "tier": held.tier,
                "rank": held.label.rank,
                "part": held.label.part,
                "parts": held.label.parts,
                "size": held.label.size,
            }
            for held in one.snapshots
        ],
        **asdict(one.findings),
        "broken": one.broken,
    }


# -- for people -------------------------------------------------------------------------------------------------------


def show(report: CheckpointReport) -> None:
    """Print everything that was found."""
    job, found = report.job, report.found
    at = f" at step {count(job.step.step)}" if job.step else ""
    heading(f"{job.job.name}  {job.state}{at}")
    rows = [*_disk_rows(found), *_memory_rows(found)]
    if rows:
        echo_table(HEAD, rows, coloured=3)
    for line in (*_absent(report), _recovery(report)):
        echo_wrapped(line)
    for title, lines in _findings(found):
        section(title)
        for line in lines:
            echo_wrapped(line, "  ", hanging="  ")
    echo(f"Checkpoints are in {found.directory}")


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
    """Yield what is missing, and why."""
    job, found = report.job, report.found
    if not found.disk:
        yield "disk: no checkpoint"
    if not found.verified:
        if any(one.complete for one in found.disk):
            yield "complete: by names and sizes, not verified; `holdfast checkpoint verify` reads every byte"
        yield from (f"{one.path.name}: {why}" for one in found.disk for why in one.findings.broken)
        yield from (f"memory, step {count(one.step)}: {one.missing}" for one in found.memory if one.missing)
    yield from (f"memory of {node} is unreachable: {why}" for node, why in sorted(found.unreachable.items()))
    if not found.memory and not found.unreachable:
        if job.ended:
            yield "memory: none; in-memory snapshots are deleted when the job ends"
        elif job.holder is None:
            yield "memory: none, and the job has no controller; `holdfast node ls` shows what runs"
        else:
            yield "memory: none yet, or `checkpoint.memory.interval` is 0"


def _recovery(report: CheckpointReport) -> str:
    """Return what a recovery would resume from."""
    source, again = report.found.source, report.recomputed
    if source is None:
        return "A recovery would begin at step 0: there is no complete checkpoint or snapshot."
    what = "the checkpoint" if isinstance(source, StoredCheckpoint) else "the memory of nodes"
    recomputed = "" if again is None else f"; {plural(again, 'step')} would be recomputed"
    who = "The same job, run again," if report.job.ended else "A recovery with new processes"
    return f"{who} would resume after step {count(source.step)}, from {what}{recomputed}."


def _findings(found: Inventory) -> Iterator[tuple[str, list[str]]]:
    """Yield what verification found, one part for each checkpoint and each step in memory."""
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
