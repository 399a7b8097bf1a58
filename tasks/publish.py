"""What the Prefect UI shows: artifacts and events. Made beside the work: a server that is away never holds a recovery up."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.events import emit_event

from holdfast.control.consent import how_to_answer
from holdfast.control.incident import IncidentInWork
from holdfast.history.models import Question
from holdfast.history.questions import in_words
from holdfast.log import note
from holdfast.report.markdown import incident_markdown
from holdfast.report.messages import Desk, Message

log = logging.getLogger("holdfast.publish")

PROGRESS_EVERY: Final = 3.0
"""Seconds between two updates of the progress artifact."""
TICK: Final = 1.0
"""Seconds between two looks at what is due to be told."""
LAST_SECONDS: Final = 5.0
"""How long the end of a flow waits for the server to take the last artifacts."""


class Publisher:
    """One thread that talks to the Prefect server in the name of the flow run."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._progress: UUID | None = None
        self._next_progress = 0.0
        self._pace: float | None = None
        self._failing = False
        self._desk = Desk(job)
        self._lock = threading.Lock()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._serve), name="publisher", daemon=True)
        self._thread.start()

    def tell(self, event: str, facts: dict[str, Any]) -> None:
        """Publish news of the run; never wait, never raise."""
        handler: Callable[[dict[str, Any]], None] | None = getattr(self, "_on_" + event, None)
        if handler is not None:
            handler(facts)

    def close(self) -> None:
        """Give what is left a few seconds to be published."""
        self._work.put(None)
        self._thread.join(LAST_SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=TICK)
            except queue.Empty:
                with self._lock:
                    due = self._desk.tick(time.time())
                self._notify(due)
                continue
            if work is None:
                return
            try:
                work()
                self._failing = False
            except Exception as error:  # noqa: BLE001 (the UI may be away for hours; the history has everything)
                if not self._failing:
                    note(log, "prefect.away", level=logging.WARNING, why=error)
                self._failing = True

    def _emit(self, name: str, **facts: object) -> None:
        resource = {"prefect.resource.id": f"holdfast.job.{self._job}", "prefect.resource.name": self._job}
        self._work.put(lambda: _sent(emit_event(event=f"holdfast.{name}", resource=resource, payload=facts)))

    def _notify(self, messages: list[Message]) -> None:
        for one in messages:
            self._emit(f"message.{'attention' if one.attention else 'info'}", **asdict(one))

    def _on_opened(self, facts: dict[str, Any]) -> None:
        with self._lock:
            self._desk.opened(facts["incident"].row.model_copy(), time.time())

    def _on_asked(self, facts: dict[str, Any]) -> None:
        question: Question = facts["question"]
        self._emit("approval.asked", number=question.number, nodes=list(question.nodes), because=question.because)
        self._notify(self._desk.asked(question, how_to_answer(question)))

    def _on_answered(self, facts: dict[str, Any]) -> None:
        question: Question = facts["question"]
        words = in_words(question)
        self._emit("approval.answered", number=question.number, answer=question.answer, picked=question.picked, by=question.by, words=words)
        self._notify(self._desk.answered(question, words))

    def _on_moved(self, facts: dict[str, Any]) -> None:
        with self._lock:
            due = self._desk.moved(str(facts["after"]), str(facts["because"]), time.time())
        self._notify(due)
        self._emit(f"job.{str(facts['after']).lower()}", **{name: str(value) for name, value in facts.items()})

    def _on_fault(self, facts: dict[str, Any]) -> None:
        self._emit("fault.seen", **{name: str(value) for name, value in facts.items()})

    def _on_incident(self, facts: dict[str, Any]) -> None:
        incident: IncidentInWork = facts["incident"]
        row = incident.row.model_copy()
        verdicts = [incident.verdict] if incident.verdict is not None else []
        text = incident_markdown(row, list(incident.fault_rows), list(incident.decisions), incident.rows(), verdicts)
        key = f"{self._job}-incident-{row.number}"
        self._work.put(lambda: _sent(create_markdown_artifact(markdown=text, key=key, description=f"Incident {row.number}: {row.kind}")))
        name = "incident.recovered" if row.outcome == "recovered" else "incident.closed"
        self._emit(
            name,
            number=row.number,
            kind=row.kind,
            subject=row.subject,
            outcome=row.outcome,
            rung=row.rung,
            downtime_s=row.downtime_s,
            steps_lost=row.steps_lost,
            because=row.because,
        )
        with self._lock:
            due = self._desk.closed(row, time.time())
        self._notify(due)
        if row.outcome == "recovered":
            self._emit("recovery.done", number=row.number, rung=row.rung, downtime_s=row.downtime_s)

    def _on_progress(self, facts: dict[str, Any]) -> None:
        now = time.monotonic()
        self._pace = facts["seconds"] if self._pace is None else 0.9 * self._pace + 0.1 * facts["seconds"]
        if now < self._next_progress and facts["step"] != facts["until"]:
            return
        self._next_progress = now + PROGRESS_EVERY
        share, words = progress_words(facts["step"], facts["until"], facts["loss"], self._pace)
        self._work.put(lambda: self._show(share, words))

    def _show(self, share: float, words: str) -> None:
        if self._progress is None:
            made = create_progress_artifact(progress=share, key=f"{self._job}-progress", description=words)
            self._progress = made if isinstance(made, UUID) else None
        else:
            _sent(update_progress_artifact(self._progress, progress=share, description=words))


def _sent(_answer: object) -> None:
    """Drop the server's answer."""


def progress_words(step: int, until: int | None, loss: float | None, pace: float | None) -> tuple[float, str]:
    """Return how far the job is in percent, and that in words: step of total, loss, time left."""
    words = [f"step {step} of {until}" if until else f"step {step}"]
    if loss is not None:
        words.append(f"loss {loss:.4f}")
    if until and pace is not None:
        words.append(f"about {max(0, until - step) * pace:.0f} s left")
    return (100.0 * step / until if until else 0.0), ", ".join(words)
