"""Classify errors of checkpoint storage, and report each cause once."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.runtime.agent_client import AgentLink, link

_log = logging.getLogger("holdfast.runtime")

_KINDS: Final = {
    errno.ENOSPC: "checkpoint-disk-full",
    errno.EDQUOT: "checkpoint-disk-full",
    errno.EROFS: "checkpoint-read-only",
    errno.EACCES: "checkpoint-read-only",
    errno.EPERM: "checkpoint-read-only",
}


@dataclass(frozen=True, slots=True)
class StorageError:
    """A fault *kind* of a checkpoint, and *why*."""

    kind: str
    why: str

    @classmethod
    def of(cls, error: OSError) -> StorageError:
        """Return the fault for an error of the file system."""
        return cls(_KINDS.get(error.errno or 0, "checkpoint-write-failed"), error.strerror or str(error))

    @classmethod
    def from_json(cls, values: Sequence[str] | None) -> StorageError | None:
        """Return the error that another rank sent as its kind and reason, if any."""
        return None if values is None else cls(str(values[0]), str(values[1]))


class StorageErrorReporter:
    """Reports storage errors to the agent and in the log: each cause once, until a save has succeeded."""

    def __init__(self, line: AgentLink | None = None) -> None:
        """*line*: the connection to the agent; default: this process's own."""
        self._line = line
        self._reported: set[StorageError] = set()

    def report(self, error: StorageError, step: int | None, path: Path, *, rank: int | None = None) -> None:
        """Report *error* with the checkpoint of *step* at *path* (of *rank*, if not this one), unless it was reported before."""
        if error in self._reported:
            return
        self._reported.add(error)
        (self._line or link()).storage_error(error.kind, step, path, error.why, rank=rank)
        _log.warning("%s: %s: %s", error.kind, path, error.why)

    def reset(self) -> None:
        """Report every cause again: a save succeeded."""
        self._reported.clear()
