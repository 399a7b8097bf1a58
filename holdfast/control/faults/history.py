"""What befell nodes before, as far as rules count it: kept in memory, as a recovery cannot wait for a database."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from holdfast.history import models
from policies.case import PastFault

MOST: Final = 5000
"""Faults that are remembered."""
COUNTED: Final = 500
"""Faults that one decision is given, the newest: far more than any threshold."""


class FaultHistory:
    """Faults of nodes, by the row that each has in the history."""

    def __init__(self) -> None:
        self._known: dict[str, PastFault] = {}

    def remember(self, rows: Iterable[models.FaultRecord]) -> None:
        """Take in *rows*, oldest first; one that is known already is taken as it is now."""
        for row in rows:
            if row.node:
                device = str((row.evidence or {}).get("device") or "")
                self._known[row.id] = PastFault(
                    kind=row.kind, at=row.at, node=row.node, device=device, incident=row.incident_id or "", root=row.root
                )
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]

    def of(self, kinds: Collection[str], *, but: Collection[str], incident: str) -> tuple[PastFault, ...]:
        """Return the faults of *kinds*, without the rows in *but* and without those of *incident*."""
        found = [
            one for row, one in self._known.items() if one.kind in kinds and row not in but and not (incident and one.incident == incident)
        ]
        return tuple(sorted(found, key=lambda one: one.at)[-COUNTED:])
