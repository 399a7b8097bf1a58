"""Requests for a running job, read by a thread of its own: an unreachable or slow database must not delay a recovery."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from holdfast.control.supervisor.detach import Detach
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.history import History, Recorder, models, queries
from holdfast.history.errors import RetryingHistory

EVERY: Final = 0.5
"""Seconds between two polls."""
DETACH: Final = "detach"
"""Asks the controller that holds the lease of the epoch in its facts to detach from the job; no other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """A requested live migration: of a node's ranks, or of one rank."""

    id: str
    by: str
    source: str | None = None
    rank: int | None = None
    target: str | None = None
    kind: str = ""
    """The fault for which a detector requested it; empty where a person did."""
    quote: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """All that is on record of it."""

    @classmethod
    def of(cls, row: models.Request) -> Self:
        """Return the request in *row*."""
        facts = row.facts or {}
        return cls(
            id=row.id,
            by=row.by,
            source=facts.get("from"),
            rank=facts.get("rank"),
            target=facts.get("to"),
            kind=facts.get("kind", ""),
            quote=facts.get("quote", ""),
            facts=facts,
        )

    @property
    def origin(self) -> str | None:
        """Return the node that the ranks are to leave, as far as the request has it."""
        return self.source or self.facts.get("node")

    def describe(self) -> str:
        """Describe what is to move."""
        what = f"rank {self.rank}" if self.rank is not None else f"the ranks of {self.source}"
        return f"{self.by} asked to move {what}" + (f" to {self.target}" if self.target else "")


def request_detach(history: History, lease: models.Lease, by: str) -> None:
    """Request that the controller which holds *lease* detaches from its job; once, whoever requests it."""
    facts = {"epoch": lease.epoch}
    if any(one.kind == DETACH and one.facts == facts for one in queries.pending_requests(history, lease.job_id)):
        return
    with history.session() as session:
        session.add(models.Request(job_id=lease.job_id, at=time.time(), kind=DETACH, by=by, facts=facts))


class Requests:
    """Whether the job is to stop or to be suspended, ranks are to move, or its controller is to detach."""

    def __init__(self, history: History, recorder: Recorder, lease: models.Lease, detach: Detach, flow_run: FlowRun) -> None:
        self._stop = ""
        self._flow_run = flow_run
        self.migrations: deque[MigrationRequest] = deque()
        """Migrations that are still to be carried out; their rows stay open until then."""
        self.outcomes: dict[str, str] = {}
        """Node to why the last migration of its ranks failed; empty where it succeeded."""
        self._seen: set[str] = set()
        self._history, self._recorder, self._job_id = history, recorder, lease.job_id
        self.epoch, self._detach = lease.epoch, detach
        self._over = threading.Event()
        self._try = RetryingHistory("requests")
        self._thread = threading.Thread(target=self._follow, name=f"requests of {self._job_id}", daemon=True)

    def begin(self) -> None:
        """Start to read requests from the history."""
        self._thread.start()

    @property
    def stop_reason(self) -> str:
        """Return why the job is to stop; empty where nobody requested it."""
        return self._stop or self._flow_run.cancelled

    @property
    def suspend_reason(self) -> str:
        """Return why the job is to be suspended; empty where nobody requested it."""
        return self._flow_run.suspended

    def stop(self, reason: str) -> None:
        """Have the job stopped for *reason*; the first one counts."""
        self._stop = self._stop or reason

    def close(self) -> None:
        """Stop reading requests."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=EVERY)  # it may hang in the database: it is a daemon and has nothing to save

    def ask(self, row: models.Request) -> None:
        """Request a migration from within the controller: it counts at once, and is on record for the next controller."""
        self._seen.add(row.id)
        self._recorder.add(row)
        self.migrations.append(MigrationRequest.of(row))

    def asked_for(self, node: str) -> bool:
        """Return whether a migration of ranks of *node* is requested or in progress."""
        return any(one.origin == node for one in self.migrations)

    def answer(self, request: MigrationRequest, outcome: str, *, done: bool, pause: float | None = None) -> models.Request:
        """Record the outcome of a migration and how many seconds it paused training; return its row as it is then."""
        with suppress(ValueError):
            self.migrations.remove(request)
        if request.origin is not None:
            self.outcomes[request.origin] = "" if done else outcome
        facts = {**request.facts, **({} if pause is None else {"pause": pause})}
        fields: dict[str, Any] = {"handled_at": time.time(), "done": done, "outcome": outcome, "facts": facts}
        self._recorder.amend(models.Request, request.id, **fields)
        return models.Request(id=request.id, job_id=self._job_id, at=time.time(), kind="migrate", by=request.by, **fields)

    def _follow(self) -> None:
        while not self._over.wait(EVERY):
            self._try(self._look)

    def _look(self) -> None:
        for request in queries.pending_requests(self._history, self._job_id):
            if request.kind == "migrate":
                if request.id not in self._seen:
                    self._seen.add(request.id)
                    self.migrations.append(MigrationRequest.of(request))
                continue
            if request.kind == "stop":
                self.stop(f"{request.by} asked the job to stop")
            meant = (
                request.kind == DETACH and (request.facts or {}).get("epoch") == self.epoch
            )  # else for a controller that has the job no more
            self._recorder.amend(models.Request, request.id, handled_at=time.time(), **({"done": meant} if request.kind == DETACH else {}))
            if meant:
                self._detach.request(f"{request.by} asked it to")
