"""Orders to put a snapshot on disk: each a small file in the vault beside the snapshot, for as long as that must stay as it is.

Whoever wants a checkpoint (a rank that has just sealed a snapshot, or an agent whose node is about to go) writes one; the node's flusher
carries it out, beside training, and removes it. Until then nobody takes the snapshot's slot for another one.
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

ORDER: Final = ".flush"
CLOSED: Final = "no-flusher"
"""A file in a vault whose flushers have died too often."""


class BadWriteRequest(Exception):
    """A file that is no order of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """One rank's part of a checkpoint that is to be written out of a snapshot."""

    snapshot: str
    """Name of the snapshot's file in the vault."""
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
        """Return what the orders of one checkpoint have in common."""
        return self.generation, self.step, self.lineage, self.directory

    def write(self, vault: Path) -> None:
        """Leave the order in *vault*, whole or not at all; raise ``OSError`` when that cannot be."""
        path = place_of(vault / self.snapshot)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(path)

    def remove(self, vault: Path) -> None:
        """Let go of the snapshot."""
        drop(vault / self.snapshot)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the order that *values* are; raise `BadWriteRequest` when they are none."""
        try:
            order = cls(**values)
        except TypeError as error:
            raise BadWriteRequest(str(error)) from error
        numbers = [values[name] for name in ("step", "lineage", "rank", "world", "generation", "keep")]
        sound = all(isinstance(one, int) and one >= 0 for one in numbers) and isinstance(order.directory, str)
        if not sound or order.rank >= order.world or "/" in str(order.snapshot) or not str(order.snapshot).endswith(SUFFIX):
            raise BadWriteRequest("its fields cannot be")
        return order


def place_of(snapshot: Path) -> Path:
    """Return where the order for the snapshot at that path lies."""
    return snapshot.with_suffix(ORDER)


def drop(snapshot: Path) -> None:
    """Take back the order for the snapshot at that path, if there is one."""
    with suppress(OSError):
        place_of(snapshot).unlink(missing_ok=True)


def close(vault: Path) -> None:
    """Take no more orders for *vault*, and none of those that lie there: nobody is left who carries them out."""
    with suppress(OSError):
        (vault / CLOSED).touch(0o600)
    for order in orders(vault):
        order.remove(vault)


def reopen(vault: Path) -> None:
    """Take orders again: another agent has come, with flushers of its own."""
    with suppress(OSError):
        (vault / CLOSED).unlink(missing_ok=True)


def is_closed(vault: Path) -> bool:
    """Tell whether nobody carries orders out in *vault*: ranks then write checkpoints themselves."""
    return (vault / CLOSED).exists()


def is_wanted(snapshot: Path) -> bool:
    """Tell whether the snapshot at that path is still to be put on disk."""
    return place_of(snapshot).exists()


def orders(vault: Path) -> list[WriteRequest]:
    """Return the orders in *vault*, the newest checkpoint first; what is none is removed."""
    found = []
    with suppress(OSError):
        for path in vault.glob(f"*{ORDER}"):
            try:
                found.append(WriteRequest.of(json.loads(path.read_text())))
            except (ValueError, TypeError, BadWriteRequest):
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
    return sorted(found, key=lambda order: (*order.whole[:3], -order.rank), reverse=True)
