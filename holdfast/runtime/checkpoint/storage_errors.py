"""Name what is wrong with a checkpoint's storage, and say each cause once."""

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
        """Judge an error of the file system."""
        return cls(_KINDS.get(error.errno or 0, "checkpoint-write-failed"), error.strerror or str(error))

    @classmethod
    def told(cls, words: Sequence[str] | None) -> StorageError | None:
        """Return the trouble that another rank told of, if it did: its kind and why."""
        return None if words is None else cls(str(words[0]), str(words[1]))


class StorageErrorReporter:
    """Report troubles to the agent and on standard error: each cause once, until a save has succeeded."""

    def __init__(self, line: AgentLink | None = None) -> None:
        """*line*: over which the agent hears it; the process's own unless another one is given."""
        self._line = line
        self._told: set[StorageError] = set()

    def tell(self, storage_error: StorageError, step: int | None, path: Path, *, rank: int | None = None) -> None:
        """Report *storage_error* with the checkpoint of *step* at *path* (of *rank*, if not this one), unless the cause is known."""
        if storage_error in self._told:
            return
        self._told.add(storage_error)
        (self._line or link()).storage_error(storage_error.kind, step, path, storage_error.why, rank=rank)
        _log.warning("%s: %s: %s", storage_error.kind, path, storage_error.why)

    def forget(self) -> None:
        """Take every cause for news again: a save succeeded."""
        self._told.clear()
