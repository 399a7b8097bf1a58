"""Read a node's memory store: from its files on this machine, or through the memory server of another one."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.memstore import client, shared_memory
from holdfast.memstore.shared_memory import Label, Snapshot, Unusable


class MemstoreReader(Protocol):
    """The memory store of one node."""

    def labels(self) -> dict[str, Label]:
        """Return the labels of the whole snapshots by the name of their file; raise ``OSError`` or `Unusable` when they cannot be read."""
        ...

    def damaged(self) -> dict[str, str]:
        """Return the files that are neither whole nor being written, with what is wrong with each, as far as can be seen."""
        ...

    def fetch(self, name: str, label: Label, into: Path) -> None:
        """Copy the snapshot with that *label* to the file *into*; raise ``OSError`` when that cannot be, `Unusable` when it is another."""
        ...


@dataclass(frozen=True, slots=True)
class LocalMemstore:
    """A memory store on this machine."""

    folder: Path

    def labels(self) -> dict[str, Label]:
        """Return the labels in the files."""
        return {path.name: label for path, label in shared_memory.labels(self.folder).items()}

    def damaged(self) -> dict[str, str]:
        """Return sealed files whose first page is not as it was written."""
        found = {}
        for path in sorted(self.folder.glob(f"*{shared_memory.SUFFIX}")):
            with suppress(OSError):
                with path.open("rb") as file:
                    page = file.read(shared_memory.PAGE)
                try:
                    shared_memory.read_label(page)
                except Unusable as error:
                    if shared_memory.is_sealed(page):
                        found[path.name] = error.why
        return found

    def fetch(self, name: str, label: Label, into: Path) -> None:
        """Copy the file, locked meanwhile: training takes another one, and would run out of them if it were read here for long."""
        with Snapshot(self.folder / name) as held:
            if held.label != label:
                raise Unusable(shared_memory.REPLACED)
            with os.fdopen(os.dup(held.fileno()), "rb") as source, into.open("xb") as target:
                source.seek(0)
                shutil.copyfileobj(source, target, 2**20)


@dataclass(frozen=True, slots=True)
class RemoteMemstore:
    """The memory store of another machine, read through its server."""

    address: tuple[str, int]
    token: str
    labels_seconds: float = client.LABELS_SECONDS
    """How long the labels may take."""
    stall_seconds: float = client.STALL_SECONDS
    """Seconds without a byte after which a transfer is given up."""

    def labels(self) -> dict[str, Label]:
        """Ask the server for the labels."""
        return client.labels(self.address, self.token, seconds=self.labels_seconds)

    def damaged(self) -> dict[str, str]:
        """Return nothing: a server reports whole snapshots only."""
        return {}

    def fetch(self, name: str, label: Label, into: Path) -> None:
        """Pull the file from the server."""
        client.pull(self.address, self.token, name, label, into, seconds=self.stall_seconds)
