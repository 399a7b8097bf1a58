"""Read every byte of what a job could go back to, and have the verifier process judge whether it belongs together."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.checkpoints.checksum import fast_sum
from holdfast.checkpoints.inventory import SnapshotSet, StoredSnapshot, restore_plan, snapshot_sets, stored_snapshots
from holdfast.checkpoints.verifier_process import VerifierProcess
from holdfast.memstore import store_folders
from holdfast.memstore.reader import MemstoreReader
from holdfast.memstore.shared_memory import Snapshot, UnusableSnapshot
from holdfast.runtime.checkpoint_verifier.files import StoredCheckpoint
from holdfast.runtime.snapshots.restore_planner import RestorePlan

ATTEMPTS: Final = 5
"""How often the newest whole step is looked for anew, when training has written over it before it was read."""
_NO_ROOM: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


class _Overwritten(Exception):
    """Training has written over a snapshot before it was read."""


def verify_disk(found: Sequence[StoredCheckpoint], verifier: VerifierProcess) -> None:
    """Have each checkpoint whose files are whole judged: whether all in it is of its step."""
    for one in found:
        if one.complete:
            one.add(verifier.ask(disk=one.path))


class MemoryVerifier:
    """Reads the memory of nodes, whose training may go on meanwhile."""

    def __init__(
        self, stores: Mapping[str, MemstoreReader], world: int, disk: Sequence[StoredCheckpoint], verifier: VerifierProcess
    ) -> None:
        self._stores, self._world, self._verifier = stores, world, verifier
        self._disk = {one.step: one for one in disk if one.complete}
        self.unreachable: dict[str, str] = {}

    def snapshot_sets(self) -> list[SnapshotSet]:
        """Return what is there, read and judged."""
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
        """Return the files whose first page is damaged, so that nobody knows of which step they were."""
        return [f"{name} in the memory of {node}: {why}" for node, one in self._stores.items() for name, why in one.damaged().items()]

    def _read(self, one: SnapshotSet) -> bool:
        """Read all snapshots of a step; tell whether training has left them alone meanwhile."""
        try:
            with _copies() as folder:
                self._judge(one, folder)
        except _Overwritten as name:
            one.findings.unproven = [f"not read: training has written over {name} meanwhile, as it goes on"]
            one.damaged = []
            return False
        except OSError as error:
            why = "there is not enough memory for a copy of it" if error.errno in _NO_ROOM else error.strerror or str(error)
            one.findings.unproven.append(f"not read: {why}")
        return True

    def _judge(self, one: SnapshotSet, folder: Path) -> None:
        """Copy the snapshots of a step into *folder*, check their bytes, and have those judged that a recovery would take."""
        copies: dict[StoredSnapshot, Path] = {}
        for number, held in enumerate(one.snapshots):
            into = folder / f"{number}.snap"
            try:
                self._stores[held.node].fetch(held.name, held.label, into)
                with Snapshot(into) as snapshot:
                    snapshot.verify(fast_sum)
            except (OSError, UnusableSnapshot) as error:
                if isinstance(error, OSError) and error.errno in _NO_ROOM:
                    raise
                if not self._is_unchanged(held):
                    raise _Overwritten(held.name) from error
                one.damaged.append(f"{held.name} (rank {held.label.rank}) in the memory of {held.node}: {error}")
            else:
                copies[held] = into
        if not one.damaged:
            one.findings.proven.append(f"every byte of {len(copies)} snapshots has the sum and the digest with which it was written")
        one.plan = restore_plan(copies, self._world)
        if not isinstance(one.plan, RestorePlan):
            return
        paths = {held.stored: path for held, path in copies.items()}
        used = {part for fetch in one.plan.fetches for part in (*fetch.parts, *([fetch.rank_state] if fetch.rank_state else []))}
        twin = self._disk.get(one.step)
        one.findings.add(
            self._verifier.ask(memory=[paths[part] for part in sorted(used)], disk=twin.path if twin else None, world=self._world)
        )

    def _is_unchanged(self, one: StoredSnapshot) -> bool:
        """Tell whether the snapshot is still where it was found: then it is damaged, else another one is in its place."""
        try:
            return self._stores[one.node].labels().get(one.name) == one.label
        except (OSError, UnusableSnapshot):
            return True


@contextmanager
def _copies() -> Iterator[Path]:
    """Give a folder in memory, for this user alone, for copies of what is being read; it is gone afterwards."""
    folder = store_folders.root() / f"audit-{os.getpid()}"
    store_folders.make(folder)
    try:
        yield folder
    finally:
        store_folders.wipe(folder)
