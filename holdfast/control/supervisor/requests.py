"""What people ask of a running job, read by a thread of its own: a database that is away or slow must not hold a recovery up."""

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
from holdfast.history.retry import RetryingHistory

EVERY: Final = 0.5
"""Seconds between two looks."""
HAND_OVER: Final = "hand-over"
"""Asks the flow that holds the lease of the epoch in its facts to let go of the job; no other flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """A planned move that somebody asked for: of a node's ranks, or of one rank."""

    id: str
    by: str
    source: str | None = None
    rank: int | None = None
    target: str | None = None
    kind: str = ""
    """The fault for which a detector asked; empty where a person did."""
    quote: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """All that is on record of it."""

    @classmethod
    def of(cls, row: models.Request) -> Self:
        """Return what the row asks for."""
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
    def home(self) -> str | None:
        """Return the node that the ranks are to leave, as far as who asked knew it."""
        return self.source or self.facts.get("node")

    def describe(self) -> str:
        """Say what is to move."""
        what = f"rank {self.rank}" if self.rank is not None else f"the ranks of {self.source}"
        return f"{self.by} asked to move {what}" + (f" to {self.target}" if self.target else "")


def ask_to_let_go(history: History, lease: models.Lease, by: str) -> None:
    """Ask the very flow that holds *lease* to let go of its job; once is enough, whoever asked."""
    facts = {"epoch": lease.epoch}
    if any(one.kind == HAND_OVER and one.facts == facts for one in queries.pending_requests(history, lease.job_id)):
        return
    with history.session() as session:
        session.add(models.Request(job_id=lease.job_id, at=time.time(), kind=HAND_OVER, by=by, facts=facts))


class Requests:
    """Whether somebody asked the job to stop or to be suspended, ranks of it to move, or its flow to let go of it."""

    def __init__(self, history: History, recorder: Recorder, lease: models.Lease, handover: Detach, flow_run: FlowRun) -> None:
        self._stop = ""
        self._flow_run = flow_run
        self.moves: deque[MigrationRequest] = deque()
        """Moves that are still to be carried out; their rows stay open until then."""
        self.outcomes: dict[str, str] = {}
        """Node to why the last planned move of ranks of it came to nothing; empty where it did not."""
        self._seen: set[str] = set()
        self._history, self._recorder, self._job_id = history, recorder, lease.job_id
        self.epoch, self._handover = lease.epoch, handover
        self._over = threading.Event()
        self._try = RetryingHistory("requests")
        self._thread = threading.Thread(target=self._follow, name=f"requests of {self._job_id}", daemon=True)

    def begin(self) -> None:
        """Start to read requests from the history."""
        self._thread.start()

    @property
    def stop_reason(self) -> str:
        """Return why the job is to stop; empty where nobody asked for it."""
        return self._stop or self._flow_run.cancelled

    @property
    def suspend_reason(self) -> str:
        """Return why the job is to be suspended; empty where nobody asked for it."""
        return self._flow_run.suspended

    def stop(self, reason: str) -> None:
        """Have the job stopped for *reason*; the first one counts."""
        self._stop = self._stop or reason

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=EVERY)  # it may hang in the database: it is a daemon and has nothing to save

    def ask(self, row: models.Request) -> None:
        """Ask for a move from within the flow: it counts at once, and is on record for a flow to come."""
        self._seen.add(row.id)
        self._recorder.add(row)
        self.moves.append(MigrationRequest.of(row))

    def asked_for(self, node: str) -> bool:
        """Tell whether a move of ranks of *node* is asked for, or in work."""
        return any(one.home == node for one in self.moves)

    def answer(self, asked: MigrationRequest, outcome: str, *, done: bool, pause: float | None = None) -> models.Request:
        """Tell what came of a move that was asked for, and for how many seconds it held training up; return its row as it is then."""
        with suppress(ValueError):
            self.moves.remove(asked)
        if asked.home is not None:
            self.outcomes[asked.home] = "" if done else outcome
        facts = {**asked.facts, **({} if pause is None else {"pause": pause})}
        fields: dict[str, Any] = {"handled_at": time.time(), "done": done, "outcome": outcome, "facts": facts}
        self._recorder.amend(models.Request, asked.id, **fields)
        return models.Request(id=asked.id, job_id=self._job_id, at=time.time(), kind="migrate", by=asked.by, **fields)

    def _follow(self) -> None:
        while not self._over.wait(EVERY):
            self._try(self._look)

    def _look(self) -> None:
        for request in queries.pending_requests(self._history, self._job_id):
            if request.kind == "migrate":
                if request.id not in self._seen:
                    self._seen.add(request.id)
                    self.moves.append(MigrationRequest.of(request))
                continue
            if request.kind == "stop":
                self.stop(f"{request.by} asked the job to stop")
            meant = request.kind == HAND_OVER and (request.facts or {}).get("epoch") == self.epoch  # else of a flow that is gone
            self._recorder.amend(
                models.Request, request.id, handled_at=time.time(), **({"done": meant} if request.kind == HAND_OVER else {})
            )
            if meant:
                self._handover.ask(f"{request.by} asked it to")
