"""Read every byte of what a job can resume from, and have a verifier process check that the states of all ranks belong together."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from holdfast.checkpoints.inventory import SnapshotSet, StoredSnapshot, restore_plan, snapshot_sets, stored_snapshots
from holdfast.memstore import store_folders
from holdfast.memstore.reader import MemstoreReader
from holdfast.memstore.shared_memory import Snapshot, UnusableSnapshot, sum_words, weights
from holdfast.runtime.checkpoint_verifier.findings import Findings, StoredCheckpoint
from holdfast.runtime.snapshots.restore_planner import RestorePlan
from holdfast.source_tree import source_tree_env

ATTEMPTS: Final = 5
"""How often the newest complete step is looked up again when training has overwritten it before it was read."""
_NO_ROOM: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


def fast_sum(data: memoryview) -> int:
    """Return the `word_sum` of *data* with NumPy, without torch: gigabytes a second, plain Python manages tens of megabytes."""
    return sum_words(data, _dot, _weights())


@cache
def _weights() -> tuple[Any, Any]:
    first, second = (np.frombuffer(row, dtype="<u8") for row in weights())
    return first, second


def _dot(data: memoryview, row: Any) -> int:  # noqa: ANN401 (an array)
    words = np.frombuffer(data, dtype="<u8")
    return int(words.dot(row[: len(words)]))


class VerifierProcess:
    """Runs `holdfast.runtime.checkpoint_verifier` with the job's own Python, from the first request on."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(OSError):
                self._process.stdin.close()  # the process exits at the end of its input
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
        self._stderr.close()

    def verify(self, *, disk: Path | None = None, memory: Sequence[Path] = (), world: int = 0) -> Findings:
        """Verify a checkpoint, or the snapshots of one step, or compare both; a failure of the process is a finding too."""
        task = {"disk": None if disk is None else str(disk), "memory": [str(path) for path in memory], "world": world}
        try:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            return Findings(**json.loads(process.stdout.readline()))
        except (OSError, ValueError) as error:
            return Findings(broken=[f"the verification with {self._python} failed: {self._last_line() or error}"])

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # leave the cores to training
        return subprocess.Popen(
            [self._python, "-m", "holdfast.runtime.checkpoint_verifier"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment | source_tree_env(os.environ),
            cwd="/",
        )

    def _last_line(self) -> str:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return lines[-1][:300] if lines else ""


class _Overwritten(Exception):
    """Training has overwritten a snapshot before it was read."""


def verify_disk(found: Sequence[StoredCheckpoint], verifier: VerifierProcess) -> None:
    """Verify that everything in each checkpoint with complete files belongs to its step."""
    for one in found:
        if one.complete:
            one.add(verifier.verify(disk=one.path))


class MemoryVerifier:
    """Verifies the snapshots in the memory of nodes while training may go on."""

    def __init__(
        self, stores: Mapping[str, MemstoreReader], world: int, disk: Sequence[StoredCheckpoint], verifier: VerifierProcess
    ) -> None:
        self._stores, self._world, self._verifier = stores, world, verifier
        self._disk = {one.step: one for one in disk if one.complete}
        self.unreachable: dict[str, str] = {}

    def snapshot_sets(self) -> list[SnapshotSet]:
        """Return all snapshots, read and verified."""
        found: list[SnapshotSet] = []
        newest: SnapshotSet | None = None
        for _ in range(ATTEMPTS):
            found = snapshot_sets(stored_snapshots(self._stores, self.unreachable), self._world)
            newest = next((one for one in found if one.complete), None)
            if newest is None or self._read(newest):
                break
        for one in found:
            if one is not newest:
                self._read(one)
        return found

    def damaged(self) -> list[str]:
        """Return the files whose first page is damaged, so that their step is unknown."""
        return [f"{name} in the memory of {node}: {why}" for node, one in self._stores.items() for name, why in one.damaged().items()]

    def _read(self, one: SnapshotSet) -> bool:
        """Read all snapshots of a step; return False when training has overwritten one meanwhile."""
        try:
            with _copies() as folder:
                self._verify(one, folder)
        except _Overwritten as name:
            one.findings.unproven = [f"not read: training has overwritten {name} meanwhile"]
            one.damaged = []
            return False
        except OSError as error:
            why = "there is not enough memory for a copy of it" if error.errno in _NO_ROOM else error.strerror or str(error)
            one.findings.unproven.append(f"not read: {why}")
        return True

    def _verify(self, one: SnapshotSet, folder: Path) -> None:
        """Copy the snapshots of a step into *folder*, check their bytes, and verify those that a recovery would use."""
        copies: dict[StoredSnapshot, Path] = {}
        for number, stored in enumerate(one.snapshots):
            into = folder / f"{number}.snap"
            try:
                self._stores[stored.node].fetch(stored.name, stored.label, into)
                with Snapshot(into) as snapshot:
                    snapshot.verify(fast_sum)
            except (OSError, UnusableSnapshot) as error:
                if isinstance(error, OSError) and error.errno in _NO_ROOM:
                    raise
                if not self._is_unchanged(stored):
                    raise _Overwritten(stored.name) from error
                one.damaged.append(f"{stored.name} (rank {stored.label.rank}) in the memory of {stored.node}: {error}")
            else:
                copies[stored] = into
        if not one.damaged:
            one.findings.proven.append(f"every byte of {len(copies)} snapshots matches the checksums and the digest written with it")
        one.plan = restore_plan(copies, self._world)
        if not isinstance(one.plan, RestorePlan):
            return
        paths = {stored.ref: path for stored, path in copies.items()}
        used = {part for fetch in one.plan.fetches for part in (*fetch.parts, *([fetch.rank_state] if fetch.rank_state else []))}
        twin = self._disk.get(one.step)
        disk = twin.path if twin else None
        one.findings.add(self._verifier.verify(memory=[paths[part] for part in sorted(used)], disk=disk, world=self._world))

    def _is_unchanged(self, one: StoredSnapshot) -> bool:
        """Return whether the snapshot is still in its file: then it is damaged, else another one has replaced it."""
        try:
            return self._stores[one.node].labels().get(one.name) == one.label
        except (OSError, UnusableSnapshot):
            return True


@contextmanager
def _copies() -> Iterator[Path]:
    """Provide a private folder in memory for copies of what is being read, and remove it afterwards."""
    folder = store_folders.root() / f"audit-{os.getpid()}"
    store_folders.make(folder)
    try:
        yield folder
    finally:
        store_folders.wipe(folder)
