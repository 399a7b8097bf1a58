"""Classify errors of checkpoint storage, and report each cause once."""

from __future__ import annotations

import errno
import logging
import re
import shutil
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
_FULL_BYTES: Final = 1 << 20
"""Less free space than this counts as a full disk, where an error does not say what was wrong."""


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
    def of_save(cls, error: BaseException, folder: Path) -> StorageError | None:
        """Return the fault for an *error* of a framework's save into *folder*; None where it has another cause than the storage."""
        if isinstance(error, OSError):
            return cls.of(error)
        if type(error).__name__ == "SafetensorError":
            number = re.search(r"\(os error (\d+)\)", str(error))
            return cls.of(OSError(int(number[1]) if number else 0, str(error).removeprefix("Error while serializing: ")))
        writing = "inline_container.cc" in str(error) or "PytorchStreamWriter" in str(error) or "cannot be opened" in str(error)
        if not (isinstance(error, RuntimeError) and writing):  # torch.save says no more of why a file cannot be written
            return None
        full = folder.exists() and shutil.disk_usage(folder).free < _FULL_BYTES
        return cls.of(OSError(errno.ENOSPC if full else 0, "torch.save could not write: the disk is full" if full else str(error)))

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
