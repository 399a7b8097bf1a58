"""`holdfast checkpoints`: all that a job could go back to, and whether it is as it was written."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from holdfast.audit.disk import OnDisk, on_disk
from holdfast.audit.memory import SnapshotSet, listed, moments
from holdfast.audit.memstores import reach
from holdfast.audit.verifier_process import VerifierProcess
from holdfast.audit.verify import MemoryAudit, verify_disk
from holdfast.cli.job_view import JobView, find_job, look
from holdfast.cli.output import say_json
from holdfast.cluster import open_cluster
from holdfast.history.store import History
from holdfast.memstore import shared_memory
from holdfast.paths import job_directory
from holdfast.spec import TrainingJob
from holdfast.stored_job import recorded_cluster

BROKEN: Final = 1
"""Exit status when the newest of a tier is not whole, or the audit found damage."""


@dataclass(slots=True)
class CheckpointReport:
    """All that was found."""

    outlook: JobView
    directory: Path
    world: int
    disk: list[OnDisk]
    verified: bool
    moments: list[SnapshotSet] = field(default_factory=list)
    away: dict[str, str] = field(default_factory=dict)
    """Nodes whose memory could not be reached, and why."""
    spoilt: list[str] = field(default_factory=list)
    """Files in memory of which nobody knows any more of which moment they were."""

    @property
    def source(self) -> OnDisk | SnapshotSet | None:
        """Return what a recovery would take in which every process is new: the newest whole step, of the disk if memory has no newer."""
        disk = next((one for one in self.disk if one.whole), None)
        memory = next((one for one in self.moments if one.whole), None)
        if memory is not None and (disk is None or memory.step > disk.step):
            return memory
        return disk

    @property
    def again(self) -> int | None:
        """Return how many steps would then be computed again."""
        step, source = self.outlook.step, self.source
        return None if step is None or source is None else max(0, step.step - source.step)

    @property
    def sound(self) -> bool:
        """Tell whether the newest of each tier is whole, and nothing damaged was found by who looked at every byte.

        In memory the newest but one counts too: ranks seal their parts one after the other, so the newest may still be growing.
        """
        disk = not self.disk or self.disk[0].whole
        memory = not self.moments or any(one.whole for one in self.moments[:2])
        damage = self.spoilt or any(one.broken for one in self.disk if self.verified)
        return disk and memory and not damage and not any(one.spoilt or one.broken for one in self.moments)


def checkpoints(reference: str, *, verify: bool, as_json: bool) -> int:
    """Show all that a job could go back to; with *verify* read and judge it."""
    history = History.open(create=False)
    try:
        outlook = look(history, find_job(history, reference))
    finally:
        history.close()
    account = gather(outlook, verify=verify)
    if as_json:
        say_json(as_record(account))
    else:
        from holdfast.cli.checkpoint_tables import show  # noqa: PLC0415 (programs need no words)

        show(account)
    return 0 if account.sound else BROKEN


def gather(outlook: JobView, *, verify: bool) -> CheckpointReport:
    """Look at the disk and at the memory of nodes."""
    directory, python = _where(outlook)
    disk = on_disk(directory, verify=verify)
    cluster = recorded_cluster(outlook.job)
    generation = outlook.generation
    reached = reach(open_cluster(cluster), outlook.job, generation.ranks if generation and not outlook.ended else ())
    kept = listed(reached.memory, reached.away)
    world = generation.world_size if generation else max((one.label.world for one in kept), default=0)
    account = CheckpointReport(outlook, directory, world, disk, verify, away=reached.away)
    if not verify:
        account.moments = moments(kept, world)
        return account
    with VerifierProcess(python) as prover:
        verify_disk(disk, prover)
        memory = MemoryAudit(reached.memory, account.world, account.disk, prover)
        account.moments, account.spoilt = memory.moments(), memory.spoilt()
        account.away |= memory.away
    return account


def _where(outlook: JobView) -> tuple[Path, str]:
    """Return the folder of the checkpoints and the job's Python, as the job's description has them."""
    try:
        spec = TrainingJob.model_validate(outlook.job.spec)
    except ValidationError:  # written by another version: what it says of folders need not mean the same
        return job_directory(outlook.job.name) / "checkpoints", sys.executable
    return spec.checkpoints, spec.python or sys.executable


# -- for programs ---------------------------------------------------------------------------------------------------------


def as_record(account: CheckpointReport) -> dict[str, Any]:
    """Return everything as a program reads it; times in seconds since 1970."""
    now, outlook, source = time.time(), account.outlook, account.source
    recovery = None
    if source is not None:
        recovery = {"tier": "disk" if isinstance(source, OnDisk) else "memory", "step": source.step, "steps_again": account.again}
    return {
        "job": outlook.job.name,
        "id": outlook.job.id,
        "state": outlook.state,
        "step": outlook.step.step if outlook.step else None,
        "world_size": account.world,
        "directory": str(account.directory),
        "verified": account.verified,
        "sound": account.sound,
        "recovery": recovery,
        "disk": [_disk_record(one, now) for one in account.disk],
        "memory": [_moment_record(one, now) for one in account.moments],
        "spoilt": account.spoilt,
        "away": account.away,
    }


def _disk_record(one: OnDisk, now: float) -> dict[str, Any]:
    told = one.manifest
    return {
        "step": one.step,
        "standing": one.standing,
        "path": str(one.path),
        "size": told.size if told else None,
        "files": sorted(told.files) if told else None,
        "world_size": told.world_size if told else None,
        "generation": told.generation if told else None,
        "age_s": now - told.time if told else None,
        "broken": one.broken,
        "proven": one.proven,
        "unproven": one.unproven,
    }


def _moment_record(one: SnapshotSet, now: float) -> dict[str, Any]:
    return {
        "step": one.step,
        "lineage": one.lineage,
        "standing": one.standing,
        "whole": one.whole,
        "lack": one.lack,
        "age_s": now - one.time,
        "size": size_of(one),
        "snapshots": [
            {
                "node": kept.node,
                "file": kept.name,
                "tier": kept.tier,
                "rank": kept.label.rank,
                "part": kept.label.part,
                "parts": kept.label.parts,
                "size": kept.label.size,
            }
            for kept in one.kept
        ],
        "broken": [*one.spoilt, *one.broken],
        "proven": one.proven,
        "unproven": one.unproven,
    }


def size_of(one: SnapshotSet | Sequence[Any]) -> int:
    """Return the bytes of a moment's snapshots, or of some."""
    kept = one.kept if isinstance(one, SnapshotSet) else one
    return sum(shared_memory.PAGE + each.label.size + each.label.tail for each in kept)
