"""Who may write: a flow whose lease went to another one adds nothing to the history any more, however late its rows come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, select, text

from holdfast.history.models import Lease

STOPPED: Final = 2000
"""Milliseconds after which PostgreSQL ends a transaction that has a lease locked and in which its process stands still: less than a lease
lasts, so that a stopped flow cannot keep its job from the next one."""


def lock_briefly(connection: Connection) -> None:
    """Have this transaction, which is about to lock a lease, ended by the database if this process stands still in it."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {STOPPED}"))


class FenceLost(Exception):
    """A newer flow steers the job."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self.epoch = epoch

    def __str__(self) -> str:
        return f"a newer flow (epoch {self.epoch}) steers the job"


@dataclass(frozen=True, slots=True)
class Fence:
    """The lease in whose name rows are written."""

    job_id: str
    epoch: int

    def hold(self, connection: Connection) -> None:
        """Keep the lease from changing hands until the transaction ends; raise `FenceLost` if it has changed already.

        A lease that is not on record, as after a restored backup, is nobody's claim.
        """
        lock_briefly(connection)
        query = select(Lease.epoch).where(Lease.job_id == self.job_id)  # type: ignore[call-overload]
        present = connection.scalar(query.with_for_update(read=True))
        if present is not None and present > self.epoch:
            raise FenceLost(int(present))

    def as_record(self) -> dict[str, Any]:
        """Return the fence as JSON."""
        return {"job": self.job_id, "epoch": self.epoch}

    @classmethod
    def from_record(cls, record: Any) -> Fence | None:  # noqa: ANN401 (whatever JSON a file holds)
        """Return the fence that *record* describes; nothing for anything else, such as what an older Holdfast left."""
        match record:
            case {"job": str(job), "epoch": int(epoch)}:
                return cls(job, epoch)
        return None
