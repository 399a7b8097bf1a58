"""A job that a benchmark drives, as its history shows it."""

from __future__ import annotations

from holdfast.history import History, models, queries


class Watched:
    """What is on record of one job; whoever drives it says which."""

    history: History
    name: str

    @property
    def row(self) -> models.Job:
        """Return the job's row."""
        return queries.newest_job(self.history, self.name)

    def state(self) -> str:
        """Return the job's state; empty before it has one."""
        rows = queries.jobs(self.history, self.name, limit=1)
        move = queries.state_of(self.history, rows[0].id) if rows else None
        return move.after if move else ""

    def incidents(self) -> list[models.Incident]:
        """Return the job's incidents, the oldest first."""
        return queries.incidents(self.history, self.row.id)
