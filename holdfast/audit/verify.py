"""Read every byte of what a job could go back to, and have it proven that it belongs together."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast.audit.checksum import fast_sum
from holdfast.audit.disk import OnDisk
from holdfast.audit.memory import SnapshotSet, StoredSnapshot, listed, moments, planned
from holdfast.audit.memstores import NodeMemory, bench
from holdfast.audit.verifier_process import VerifierProcess
from holdfast.memstore.shared_memory import Snapshot, Unusable
from holdfast.runtime.snapshots.restore_planner import RestorePlan

TRIES: Final = 5
"""How often the newest whole moment is looked for anew, when training has written over it before it was read."""
_NO_ROOM: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


class _Overtaken(Exception):
    """Training has written over a snapshot before it was read."""


def verify_disk(found: Sequence[OnDisk], prover: VerifierProcess) -> None:
    """Have it proven of each checkpoint whose files are whole that all in it is of its step."""
    for one in found:
        if one.whole:
            told = prover.ask(disk=one.path)
            one.broken += told["broken"]
            one.proven += told["proven"]
            one.unproven += told["unproven"]
            if one.broken:
                one.flaw = "checkpoint-corrupt"


class MemoryAudit:
    """Reads the memory of nodes, whose training may go on meanwhile."""

    def __init__(self, memory: Mapping[str, NodeMemory], world: int, disk: Sequence[OnDisk], prover: VerifierProcess) -> None:
        self._memory, self._world, self._prover = memory, world, prover
        self._disk = {one.step: one for one in disk if one.whole}
        self.away: dict[str, str] = {}

    def moments(self) -> list[SnapshotSet]:
        """Return what is there, read and judged."""
        found: list[SnapshotSet] = []
        newest: SnapshotSet | None = None
        for _ in range(TRIES):
            found = moments(listed(self._memory, self.away), self._world)
            newest = next((one for one in found if one.whole), None)
            if newest is None or self._read(newest):
                break
        for one in found:
            if one is not newest:
                self._read(one)
        return found

    def spoilt(self) -> list[str]:
        """Return the files whose first page is damaged, so that nobody knows of which moment they were."""
        return [f"{name} in the memory of {node}: {why}" for node, one in self._memory.items() for name, why in one.spoilt().items()]

    def _read(self, moment: SnapshotSet) -> bool:
        """Read all of a moment; tell whether training has left it alone meanwhile."""
        try:
            with bench() as place:
                self._judge(moment, place)
        except _Overtaken as one:
            moment.unproven = [f"not read: training has written over {one} meanwhile, as it goes on"]
            moment.spoilt = []
            return False
        except OSError as error:
            why = "there is not enough memory for a copy of it" if error.errno in _NO_ROOM else error.strerror or str(error)
            moment.unproven.append(f"not read: {why}")
        return True

    def _judge(self, moment: SnapshotSet, place: Path) -> None:
        brought: dict[StoredSnapshot, Path] = {}
        for number, one in enumerate(moment.kept):
            into = place / f"{number}.snap"
            try:
                self._memory[one.node].bring(one.name, one.label, into)
                with Snapshot(into) as snapshot:
                    snapshot.verify(fast_sum)
            except (OSError, Unusable) as error:
                if isinstance(error, OSError) and error.errno in _NO_ROOM:
                    raise
                if not self._still(one):
                    raise _Overtaken(one.name) from error
                moment.spoilt.append(f"{one.name} (rank {one.label.rank}) in the memory of {one.node}: {error}")
            else:
                brought[one] = into
        if not moment.spoilt:
            moment.proven.append(f"every byte of {len(brought)} snapshots has the sum and the digest with which it was written")
        moment.plan = planned(brought, self._world)
        if not isinstance(moment.plan, RestorePlan):
            return
        stored = {one.stored: path for one, path in brought.items()}
        used = {part for fetch in moment.plan.fetches for part in (*fetch.parts, *([fetch.light] if fetch.light else []))}
        twin = self._disk.get(moment.step)
        told = self._prover.ask(memory=[stored[one] for one in sorted(used)], disk=twin.path if twin else None, world=self._world)
        moment.broken += told["broken"]
        moment.proven += told["proven"]
        moment.unproven += told["unproven"]

    def _still(self, one: StoredSnapshot) -> bool:
        """Tell whether the snapshot still stands where it was found: then it is damaged, else another one is in its place."""
        try:
            return self._memory[one.node].labels().get(one.name) == one.label
        except (OSError, Unusable):
            return True
