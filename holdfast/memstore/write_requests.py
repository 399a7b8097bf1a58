"""Requests to put a snapshot on disk: each a small file in the memory store beside the snapshot, for as long as that must stay as it is.

A rank that has just sealed a snapshot, or an agent whose node is about to go, writes one; the node's checkpoint writer carries it out,
beside training, and removes it. Until then nobody takes the snapshot's slot for another one.
Standard library only, as `holdfast.memstore.shared_memory`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from holdfast.memstore.shared_memory import SUFFIX

REQUEST: Final = ".write"
CLOSED: Final = "no-writer"
"""A file in a memory store whose checkpoint writers have died too often."""


class BadWriteRequest(Exception):
    """A file that is no request of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """One rank's part of a checkpoint that is to be written out of a snapshot."""

    snapshot: str
    """Name of the snapshot's file in the memory store."""
    step: int
    lineage: int
    rank: int
    world: int
    generation: int
    """The generation whose checkpoint it is: once another one has begun, nothing of it is put in place."""
    directory: str
    """Folder of the job's checkpoints."""
    keep: int
    """Whole checkpoints that stay."""
    loss: float | None = None
    """The loss of the step."""
    stood: float = 0.0
    """Seconds for which training stood still for it."""
    bandwidth: int | None = None
    """Bytes a second that this node may write; None: as many as it can."""

    @property
    def moment(self) -> tuple[int, int]:
        """Return what the label of the snapshot must say."""
        return self.step, self.lineage

    @property
    def whole(self) -> tuple[int, int, int, str]:
        """Return what the requests of one checkpoint have in common."""
        return self.generation, self.step, self.lineage, self.directory

    def write(self, memstore: Path) -> None:
        """Leave the request in *memstore*, whole or not at all; raise ``OSError`` when that cannot be."""
        path = place_of(memstore / self.snapshot)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(path)

    def remove(self, memstore: Path) -> None:
        """Let go of the snapshot."""
        drop(memstore / self.snapshot)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the request that *values* are; raise `BadWriteRequest` when they are none."""
        try:
            request = cls(**values)
        except TypeError as error:
            raise BadWriteRequest(str(error)) from error
        numbers = [values[name] for name in ("step", "lineage", "rank", "world", "generation", "keep")]
        sound = all(isinstance(one, int) and one >= 0 for one in numbers) and isinstance(request.directory, str)
        if not sound or request.rank >= request.world or "/" in str(request.snapshot) or not str(request.snapshot).endswith(SUFFIX):
            raise BadWriteRequest("its fields cannot be")
        return request


def place_of(snapshot: Path) -> Path:
    """Return where the request for the snapshot at that path lies."""
    return snapshot.with_suffix(REQUEST)


def drop(snapshot: Path) -> None:
    """Take back the request for the snapshot at that path, if there is one."""
    with suppress(OSError):
        place_of(snapshot).unlink(missing_ok=True)


def close(memstore: Path) -> None:
    """Take no more requests for *memstore*, and none of those that lie there: nobody is left who carries them out."""
    with suppress(OSError):
        (memstore / CLOSED).touch(0o600)
    for request in pending(memstore):
        request.remove(memstore)


def reopen(memstore: Path) -> None:
    """Take requests again: another agent has come, with checkpoint writers of its own."""
    with suppress(OSError):
        (memstore / CLOSED).unlink(missing_ok=True)


def is_closed(memstore: Path) -> bool:
    """Tell whether nobody carries requests out in *memstore*: ranks then write checkpoints themselves."""
    return (memstore / CLOSED).exists()


def is_wanted(snapshot: Path) -> bool:
    """Tell whether the snapshot at that path is still to be put on disk."""
    return place_of(snapshot).exists()


def pending(memstore: Path) -> list[WriteRequest]:
    """Return the requests in *memstore*, the newest checkpoint first; what is none is removed."""
    found = []
    with suppress(OSError):
        for path in memstore.glob(f"*{REQUEST}"):
            try:
                found.append(WriteRequest.of(json.loads(path.read_text())))
            except (ValueError, TypeError, BadWriteRequest):
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
    return sorted(found, key=lambda request: (*request.whole[:3], -request.rank), reverse=True)
