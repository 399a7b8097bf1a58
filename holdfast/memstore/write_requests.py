"""Requests to write a snapshot to disk: small files in the memory store; a snapshot with a request is not overwritten.

A rank that has sealed a snapshot, or an agent whose node is about to be lost, writes one. The node's checkpoint writer carries it out
alongside training and removes it. Standard library only.
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
"""A file in a memory store whose checkpoint writers have failed too often."""


class BadWriteRequest(Exception):
    """A file that is not a request of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """One rank's part of a checkpoint that is to be written from a snapshot."""

    snapshot: str
    """Name of the snapshot's file in the memory store."""
    step: int
    lineage: int
    rank: int
    world: int
    generation: int
    """The generation whose checkpoint it is; once a newer one has begun, the checkpoint is not published."""
    directory: str
    """Folder of the job's checkpoints."""
    keep: int
    """Complete checkpoints to keep."""
    loss: float | None = None
    """The loss of the step."""
    paused: float = 0.0
    """Seconds for which training paused for it."""
    bandwidth: int | None = None
    """Bytes per second that this node may write; None: no limit."""

    @property
    def moment(self) -> tuple[int, int]:
        """Return step and lineage that the label of the snapshot must have."""
        return self.step, self.lineage

    @property
    def checkpoint(self) -> tuple[int, int, int, str]:
        """Return what the requests of one checkpoint have in common."""
        return self.generation, self.step, self.lineage, self.directory

    def write(self, memstore: Path) -> None:
        """Write the request into *memstore*, atomically; raise ``OSError`` when that fails."""
        path = (memstore / self.snapshot).with_suffix(REQUEST)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)

    def remove(self, memstore: Path) -> None:
        """Remove the request: the snapshot may be overwritten again."""
        drop(memstore / self.snapshot)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the request with these *values*; raise `BadWriteRequest` when they are not valid."""
        try:
            request = cls(**values)
        except TypeError as error:
            raise BadWriteRequest(str(error)) from error
        numbers = [values[name] for name in ("step", "lineage", "rank", "world", "generation", "keep")]
        valid = all(isinstance(one, int) and one >= 0 for one in numbers) and isinstance(request.directory, str)
        if not valid or request.rank >= request.world or "/" in str(request.snapshot) or not str(request.snapshot).endswith(SUFFIX):
            raise BadWriteRequest("a field is out of range")
        return request


def drop(snapshot: Path) -> None:
    """Remove the request for the file *snapshot*, if there is one."""
    with suppress(OSError):
        snapshot.with_suffix(REQUEST).unlink(missing_ok=True)


def close(memstore: Path) -> None:
    """Refuse requests in *memstore* and remove the pending ones: no checkpoint writer is left."""
    with suppress(OSError):
        (memstore / CLOSED).touch(0o600)
    for request in pending(memstore):
        request.remove(memstore)


def reopen(memstore: Path) -> None:
    """Accept requests again: a new agent has started, with checkpoint writers of its own."""
    with suppress(OSError):
        (memstore / CLOSED).unlink(missing_ok=True)


def is_closed(memstore: Path) -> bool:
    """Return whether requests in *memstore* are refused: ranks then write checkpoints themselves."""
    return (memstore / CLOSED).exists()


def is_pending(snapshot: Path) -> bool:
    """Return whether the file *snapshot* is still to be written to disk."""
    return snapshot.with_suffix(REQUEST).exists()


def pending(memstore: Path) -> list[WriteRequest]:
    """Return the requests in *memstore*, the newest checkpoint first; files that are not valid requests are removed."""
    found = []
    with suppress(OSError):
        for path in memstore.glob(f"*{REQUEST}"):
            try:
                found.append(WriteRequest.of(json.loads(path.read_text())))
            except (ValueError, TypeError, BadWriteRequest):
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
    return sorted(found, key=lambda request: (*request.checkpoint[:3], -request.rank), reverse=True)
