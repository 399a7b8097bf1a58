"""Read a node's memory store: from its files on this machine, or through the memory server of another one."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.memstore import shared_memory
from holdfast.memstore.connection import LONGEST_TAIL, connect
from holdfast.memstore.shared_memory import Label, Slot, Snapshot, UnusableSnapshot


@dataclass(frozen=True, slots=True)
class LocalMemstore:
    """A memory store on this machine."""

    folder: Path

    def labels(self) -> dict[str, Label]:
        """Return the labels of complete snapshots by file name."""
        return {path.name: label for path, label in shared_memory.labels(self.folder).items()}

    def damaged(self) -> dict[str, str]:
        """Return the files that are neither complete nor being written, each with the reason."""
        found = {}
        for path in sorted(self.folder.glob(f"*{shared_memory.SUFFIX}")):
            with suppress(OSError):
                with path.open("rb") as file:
                    page = file.read(shared_memory.PAGE)
                try:
                    shared_memory.read_label(page)
                except UnusableSnapshot as error:
                    if shared_memory.is_sealed(page):
                        found[path.name] = error.why
        return found

    def fetch(self, name: str, label: Label, into: Path) -> None:
        """Copy the snapshot with that *label* to the new file *into*; raise ``OSError``, or `UnusableSnapshot` when it is another one.

        The file is locked meanwhile and training uses another one, so a copy and not the original is read at length.
        """
        with Snapshot(self.folder / name) as snapshot:
            if snapshot.label != label:
                raise UnusableSnapshot(shared_memory.REPLACED)
            with os.fdopen(os.dup(snapshot.fileno()), "rb") as source, into.open("xb") as target:
                source.seek(0)
                shutil.copyfileobj(source, target, 2**20)


@dataclass(frozen=True, slots=True)
class RemoteMemstore:
    """The memory store of another machine, read through its server; ``OSError`` includes ``PermissionError`` and ``TimeoutError``."""

    address: tuple[str, int]
    token: str
    labels_seconds: float = 10.0
    """Timeout for the labels."""
    stall_seconds: float = 30.0
    """Seconds without a byte after which a transfer fails."""

    def labels(self) -> dict[str, Label]:
        """Request the labels from the server; raise ``OSError`` or `UnusableSnapshot` when that fails."""
        until = time.monotonic() + self.labels_seconds
        with connect(self.address, self.token, seconds=self.labels_seconds) as line:
            line.until = until
            found = line.request({"do": "labels"}).get("labels")
        if not isinstance(found, dict):
            raise UnusableSnapshot("the answer of the memory server contains no labels")
        return {name: shared_memory.label_of(label) for name, label in found.items()}

    def damaged(self) -> dict[str, str]:
        """Return nothing: a server lists complete snapshots only."""
        return {}

    def fetch(self, name: str, label: Label, into: Path) -> None:
        """Receive the snapshot into the new file *into*, which is sealed last and removed on failure; errors as for `LocalMemstore`.

        The data is stored as received; the checksums in the tail detect damage when it is read.
        """
        with connect(self.address, self.token, seconds=self.stall_seconds) as line:
            request = {"do": "get", "name": name, "step": label.step, "lineage": label.lineage, "digest": label.digest}
            size = line.request(request).get("size")
            if size != label.file_size or label.tail > LONGEST_TAIL:
                raise UnusableSnapshot(f"a file of {size} bytes is not the requested snapshot")
            if shared_memory.read_label(line.receive_exactly(shared_memory.PAGE)) != label:
                raise UnusableSnapshot("it is not the requested snapshot")
            slot = Slot(into, fresh=True)
            try:
                slot.begin(replace(label, tail=0, digest=""))
                line.receive_into(slot.data)
                slot.seal_copy(label, line.receive_exactly(label.tail))
            except BaseException:
                slot.discard()
                with suppress(OSError):
                    into.unlink()
                raise
            finally:
                slot.close()


MemstoreReader = LocalMemstore | RemoteMemstore
"""The memory store of one node."""
