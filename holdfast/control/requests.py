"""What people ask of a running job, read by a thread of its own: a database that is away or slow must not hold a recovery up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from holdfast.history import History, Recorder, models, queries
from holdfast.log import note

log = logging.getLogger("holdfast.control")

EVERY: Final = 0.5
"""Seconds between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAsked:
    """A planned move that somebody asked for: of a node's ranks, or of one rank."""

    id: str
    by: str
    source: str | None = None
    rank: int | None = None
    target: str | None = None

    @classmethod
    def of(cls, row: models.Request) -> Self:
        """Return what the row asks for."""
        facts = row.facts or {}
        return cls(id=row.id, by=row.by, source=facts.get("from"), rank=facts.get("rank"), target=facts.get("to"))

    def in_words(self) -> str:
        """Say what is to move."""
        what = f"rank {self.rank}" if self.rank is not None else f"the ranks of {self.source}"
        return f"{self.by} asked to move {what}" + (f" to {self.target}" if self.target else "")


class Requests:
    """Whether somebody asked the job to stop, or ranks of it to move."""

    def __init__(self, history: History, recorder: Recorder, job_id: str) -> None:
        self.stop_asked = False
        self.moves: deque[MoveAsked] = deque()
        """Moves that are still to be carried out; their rows stay open until then."""
        self._seen: set[str] = set()
        self._history, self._recorder, self._job_id = history, recorder, job_id
        self._over = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._follow, name=f"requests of {job_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(timeout=EVERY)  # it may hang in the database: it is a daemon and has nothing to save

    def answer(self, asked: MoveAsked, outcome: str, *, done: bool) -> None:
        """Tell what came of a move that was asked for."""
        with suppress(ValueError):
            self.moves.remove(asked)
        self._recorder.amend(models.Request, asked.id, handled_at=time.time(), done=done, outcome=outcome)

    def _follow(self) -> None:
        while not self._over.wait(EVERY):
            try:
                self._look()
                self._away = False
            except Exception as error:  # noqa: BLE001 (a history that is away for minutes is asked again)
                if not self._away:
                    note(log, "history.away", why=error)
                self._away = True

    def _look(self) -> None:
        for request in queries.pending_requests(self._history, self._job_id):
            if request.kind == "migrate":
                if request.id not in self._seen:
                    self._seen.add(request.id)
                    self.moves.append(MoveAsked.of(request))
                continue
            self.stop_asked = self.stop_asked or request.kind == "stop"
            self._recorder.amend(models.Request, request.id, handled_at=time.time())
