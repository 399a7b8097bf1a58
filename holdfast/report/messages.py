"""Which messages a job's life is worth to persons who do not look: one an incident as a rule, never a storm.

Pure: news and times in, messages out. Who sends them, and to whom, is a Prefect automation's business (`holdfast notify`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from holdfast.history.models import Incident, Question
from holdfast.report import wording
from policies.states import State

PATIENCE: Final = 30.0
"""Seconds that an incident may take before anybody is told while it lasts: what is over by then is one message, not two."""
MOST: Final = 5
"""Messages within `WINDOW` after which those that ask nobody for anything are gathered into one."""
WINDOW: Final = 600.0
"""Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. A later one of the same *id* is news of the same thing and takes the place of the earlier one."""

    id: str
    state: str
    """``open``, ``asked``, ``over`` or ``ended``; ``many`` where several were gathered."""
    attention: bool
    """A person should look."""
    subject: str
    text: str


@dataclass(slots=True)
class Desk:
    """The messages of one job."""

    job: str
    _open: tuple[Incident, float] | None = None
    """The incident in work that nobody was told of, and from when on somebody is."""
    _told: str = ""
    """The incident that somebody was told of while it lasted."""
    _because: str = ""
    _sent: deque[float] = field(default_factory=deque)
    _held: list[Message] = field(default_factory=list)

    def opened(self, incident: Incident, now: float) -> None:
        """Learn of an incident."""
        self._open, self._because = (incident, now + PATIENCE), incident.because

    def moved(self, after: str, because: str, now: float) -> list[Message]:
        """Learn where the job is now."""
        self._because = because
        if after not in {State.COMPLETED, State.FAILED, State.CANCELLED}:
            return []
        subject = f"[{self.job}] {after.lower()}"
        attention = after == State.FAILED
        last = Message(id=f"job {self.job}", state="ended", attention=attention, subject=subject, text=because)
        return [*self._gathered(now), last]

    def asked(self, question: Question, how: str) -> list[Message]:
        """Learn that a person is asked; *how* says how to answer."""
        subject = f"[{self.job}] question {question.number}: may {', '.join(question.nodes)} be isolated?"
        return [
            Message(id=f"question {question.number}", state="asked", attention=True, subject=subject, text=f"{question.because}\n\n{how}")
        ]

    def answered(self, question: Question, words: str) -> list[Message]:
        """Learn that a question needs no answer any more."""
        subject = f"[{self.job}] question {question.number}: may {', '.join(question.nodes)} be isolated?"
        return [Message(id=f"question {question.number}", state="over", attention=False, subject=subject, text=f"Answered: {words}")]

    def closed(self, incident: Incident, now: float) -> list[Message]:
        """Learn how an incident ended."""
        told, self._open, self._told = self._told == incident.id, None, ""
        message = Message(
            id=f"incident {incident.id}",
            state="over",
            attention=incident.outcome == "gave-up",
            subject=f"{self._subject(incident)}: {incident.outcome}",
            text=_summary(self.job, incident),
        )
        if told or message.attention or self._room(now):
            return [message]
        self._held.append(message)
        return []

    def tick(self, now: float) -> list[Message]:
        """Return what is due by *now*: an incident that lasts, and what was gathered."""
        found = []
        if self._open is not None and self._open[1] <= now:
            incident, self._open = self._open[0], None
            self._told = incident.id
            subject = f"{self._subject(incident)}: not over after {wording.duration(PATIENCE)}"
            text = f"{incident.because}\n\nNow: {self._because}"
            found.append(Message(id=f"incident {incident.id}", state="open", attention=True, subject=subject, text=text))
        if self._held and (not self._sent or now - self._sent[-1] >= WINDOW):
            found += self._gathered(now)
        return found

    def _subject(self, incident: Incident) -> str:
        return f"[{self.job}] incident {incident.number}, {incident.kind} of {incident.subject}"

    def _room(self, now: float) -> bool:
        """Tell whether one more message is no storm yet, and count it."""
        while self._sent and now - self._sent[0] >= WINDOW:
            self._sent.popleft()
        if len(self._sent) >= MOST or self._held:
            return False
        self._sent.append(now)
        return True

    def _gathered(self, now: float) -> list[Message]:
        """Return what was held back as one message."""
        held, self._held = self._held, []
        if not held:
            return []
        self._sent.append(now)
        subject = f"[{self.job}] {len(held)} more incidents"
        text = "\n".join(one.subject.removeprefix(f"[{self.job}] ") for one in held)
        return [Message(id=f"job {self.job} since {now:.0f}", state="many", attention=False, subject=subject, text=text)]


def _summary(job: str, incident: Incident) -> str:
    """Return what was the matter, what was done and what it cost."""
    facts = [f"training again after {wording.duration(incident.downtime_s)}"] if incident.downtime_s is not None else []
    if incident.steps_lost is not None:
        facts.append(f"{wording.plural(incident.steps_lost, 'step')} computed again")
    done = f"{incident.rung or 'nothing'}: {', '.join(facts)}" if facts else f"{incident.rung or 'nothing was done'}"
    return f"{incident.because}\n\n{done}\n\n`holdfast show {incident.number} --job {job}` tells all of it."
