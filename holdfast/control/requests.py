"""What people ask of a running job, read by a thread of its own: a database that is away or slow must not hold a recovery up."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from holdfast.history import History, Recorder, models, queries
from holdfast.log import note

log = logging.getLogger("holdfast.control")

EVERY: Final = 0.5
"""Seconds between two looks."""


class Requests:
    """Whether somebody asked the job to stop."""

    def __init__(self, history: History, recorder: Recorder, job_id: str) -> None:
        self.stop_asked = False
        self._history, self._recorder, self._job_id = history, recorder, job_id
        self._over = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._follow, name=f"requests of {job_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(timeout=EVERY)  # it may hang in the database: it is a daemon and has nothing to save

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
            self.stop_asked = self.stop_asked or request.kind == "stop"
            self._recorder.amend(models.Request, request.id, handled_at=time.time())
