"""`holdfast checkpoints`: all that a job could go back to, and whether it is as it was written."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from holdfast.checkpoints.inventory import Inventory, SnapshotSet, snapshot_sets, stored_checkpoints, stored_snapshots
from holdfast.checkpoints.memstores import connect_stores
from holdfast.checkpoints.verify import MemoryVerifier, VerifierProcess, verify_disk
from holdfast.cli.job_view import JobView, find_job, look
from holdfast.cli.output import say_json
from holdfast.cluster import open_cluster
from holdfast.history.store import History
from holdfast.paths import job_directory
from holdfast.runtime.checkpoint_verifier.findings import StoredCheckpoint
from holdfast.spec import TrainingJob
from holdfast.stored_job import recorded_cluster

BROKEN: Final = 1
"""Exit status when the newest of a tier is not whole, or damage was found by reading it."""


@dataclass(slots=True)
class CheckpointReport:
    """All that a job could go back to, and how far the job is."""

    job: JobView
    found: Inventory

    @property
    def again(self) -> int | None:
        """Return how many steps would be computed again after a recovery."""
        step, source = self.job.step, self.found.source
        return None if step is None or source is None else max(0, step.step - source.step)


def checkpoints(reference: str, *, verify: bool, as_json: bool) -> int:
    """Show all that a job could go back to; with *verify* read and judge it."""
    history = History.open(create=False)
    try:
        job = look(history, find_job(history, reference))
    finally:
        history.close()
    report = CheckpointReport(job, gather(job, verify=verify))
    if as_json:
        say_json(as_record(report))
    else:
        from holdfast.cli.checkpoint_tables import show  # noqa: PLC0415 (programs need no words)

        show(report)
    return 0 if report.found.sound else BROKEN


def gather(job: JobView, *, verify: bool) -> Inventory:
    """Look at the disk and at the memory of nodes."""
    directory, python = _where(job)
    disk = stored_checkpoints(directory, verify=verify)
    cluster = recorded_cluster(job.job)
    generation = job.generation
    reached = connect_stores(open_cluster(cluster), job.job, generation.ranks if generation and not job.ended else ())
    snapshots = stored_snapshots(reached.stores, reached.unreachable)
    world = generation.world_size if generation else max((one.label.world for one in snapshots), default=0)
    found = Inventory(directory, world, disk, verify, unreachable=reached.unreachable)
    if not verify:
        found.memory = snapshot_sets(snapshots, world)
        return found
    with VerifierProcess(python) as verifier:
        verify_disk(disk, verifier)
        memory = MemoryVerifier(reached.stores, world, disk, verifier)
        found.memory, found.damaged = memory.snapshot_sets(), memory.damaged()
    found.unreachable |= memory.unreachable
    return found


def _where(job: JobView) -> tuple[Path, str]:
    """Return the folder of the checkpoints and the job's Python, as the job's description has them."""
    try:
        spec = TrainingJob.model_validate(job.job.spec)
    except ValidationError:  # written by another version: what it says of folders need not mean the same
        return job_directory(job.job.name) / "checkpoints", sys.executable
    return spec.checkpoints, spec.python or sys.executable


# -- for programs ---------------------------------------------------------------------------------------------------------


def as_record(report: CheckpointReport) -> dict[str, Any]:
    """Return everything as a program reads it; times in seconds since 1970."""
    now, job, found, source = time.time(), report.job, report.found, report.found.source
    recovery = None
    if source is not None:
        tier = "disk" if isinstance(source, StoredCheckpoint) else "memory"
        recovery = {"tier": tier, "step": source.step, "steps_again": report.again}
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
        "spoilt": found.damaged,
        "away": found.unreachable,
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
        "lack": one.missing,
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
