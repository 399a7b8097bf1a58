"""Which notifications a job's life is worth to persons who do not look: one an incident, never a storm.

Pure: news and times in, notifications out. Who sends them, and where to, is the business of a Prefect automation (`holdfast notify`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from holdfast.history.models import ApprovalRequest
from holdfast.report import incident_text, wording
from holdfast.report.case import IncidentCase
from policies.node_health import NodeHealthState
from policies.node_states import NodeState
from policies.states import TERMINAL, State

PATIENCE: Final = 30.0
"""Seconds that an incident may take before anybody is told while it lasts: what is over by then is one notification, not two."""
SETTLE: Final = 3.0
"""Seconds that the notification of an incident waits for what belongs to it: a node that is quarantined for it, the end of the job."""
MOST: Final = 5
"""Notifications within `WINDOW` after which those that ask nobody for anything are gathered into one."""
WINDOW: Final = 600.0
"""Seconds."""
NEEDS_SOMEBODY: Final = frozenset({NodeHealthState.UNHEALTHY, NodeHealthState.UNREACHABLE, NodeState.QUARANTINED, NodeState.RETIRED})
"""States of nodes that are worth a notification: a person should know that the cluster has one node less."""
MOST_NODES: Final = 20
"""Nodes that one notification explains; of more it gives the number."""


class NotificationLevel(StrEnum):
    """Whom a notification is for."""

    ATTENTION = "attention"
    """A person should act."""
    RESOLVED = "resolved"
    """It replaces one that asked for attention: nobody need act any more."""
    INFO = "info"
    """It needs nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One notification. A later one with the same *id* replaces the earlier one."""

    id: str
    state: str
    """``open``, ``asked``, ``over`` or ``ended``; ``many`` for several in one."""
    level: NotificationLevel
    subject: str
    text: str
    job: str = ""
    cluster: str = ""
    host: str = ""
    nodes: tuple[str, ...] = ()
    link: str = ""
    """Page of the flow run in the Prefect UI."""


def nowhere(_number: int) -> str:
    """Link an incident nowhere."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationSource:
    """The controller that notifications come from."""

    job: str
    cluster: str = ""
    host: str = ""
    link: str = ""
    """Page of its flow run."""
    page: str = ""
    """The job page."""
    incident_page: Callable[[int], str] = nowhere

    @property
    def name(self) -> str:
        """Return the job with its cluster."""
        return f"{self.cluster}/{self.job}" if self.cluster else self.job

    def sign(self, draft: Notification, page: str = "") -> Notification:
        """Return *draft* with the job in its subject, and under its text who sends it and where to look; *page* is that of an incident."""
        on = f" on cluster {self.cluster}" if self.cluster else ""
        at = f", controller on {self.host}" if self.host else ""
        links = [f"{name}: {link}" for name, link in (("Run", self.link), ("Job page", self.page), ("Incident", page)) if link]
        return replace(
            draft,
            subject=f"[{self.name}] {draft.subject}",
            text="\n\n".join([draft.text, "\n".join([f"Job {self.job}{on}{at}", *links])]),
            job=self.job,
            cluster=self.cluster,
            host=self.host,
            link=self.link,
        )


def paragraphs(*parts: str) -> str:
    """Return the parts that say something, with an empty line between them."""
    return "\n\n".join(part for part in parts if part)


@dataclass(slots=True)
class Notifications:
    """The notifications of one job."""

    sender: NotificationSource
    _open: tuple[IncidentCase, float] | None = None
    """The incident in work that nobody was told of, and from when on somebody is."""
    _told: str = ""
    """The incident that somebody was told of while it lasted."""
    _reason: str = ""
    _closed: tuple[IncidentCase, float] | None = None
    """The incident that is over, and until when its notification waits for what belongs to it."""
    _quarantined: dict[str, str] = field(default_factory=dict)
    """Nodes that were quarantined since the last notification, and why."""
    _end: tuple[State, str] | None = None
    """How the job ended, while nobody was told."""
    _sent: deque[float] = field(default_factory=deque)
    _held: list[Notification] = field(default_factory=list)

    # -- news ---------------------------------------------------------------------------------------------------------

    def opened(self, case: IncidentCase, now: float) -> list[Notification]:
        """Learn of an incident."""
        due = self._over(now) if self._closed is not None else []
        self._open, self._reason = (case, now + PATIENCE), case.incident.reason
        return due

    def moved(self, after: str, reason: str) -> None:
        """Learn where the job is now."""
        self._reason = reason
        if after in TERMINAL:
            self._end = State(after), reason

    def closed(self, case: IncidentCase, now: float) -> None:
        """Learn how an incident ended."""
        self._open, self._closed = None, (case, now + SETTLE)

    def quarantined(self, node: str, reason: str) -> None:
        """Learn that a node of the job was quarantined."""
        self._quarantined[node] = reason

    def asked(self, question: ApprovalRequest, how: str) -> list[Notification]:
        """Learn that a person is asked; *how* says how to answer."""
        return [self._of_question(question, "asked", NotificationLevel.ATTENTION, paragraphs(question.reason, f"Answer: {how}"))]

    def answered(self, question: ApprovalRequest, words: str) -> list[Notification]:
        """Learn that a question needs no answer any more."""
        return [self._of_question(question, "over", NotificationLevel.RESOLVED, f"Answered: {words}")]

    def _of_question(self, question: ApprovalRequest, state: str, level: NotificationLevel, text: str) -> Notification:
        nodes = tuple(question.nodes)
        subject = f"question {question.number}: may {wording.some(nodes)} be isolated?"
        ident = f"question {question.number}"
        return self.sender.sign(Notification(id=ident, state=state, level=level, subject=subject, text=text, nodes=nodes))

    # -- what is due --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Notification]:
        """Return what is due by *now*."""
        found = []
        if self._closed is not None and self._end is None and self._closed[1] <= now:
            found += self._over(now)
        if self._open is not None and self._open[1] <= now and self._end is None:
            found.append(self._lasting())
        if self._quarantined and self._open is None and self._closed is None and self._end is None:
            found.append(self._of_quarantine())
        if self._held and (not self._sent or now - self._sent[-1] >= WINDOW):
            found += self._gathered(now)
        return found

    def last(self, now: float) -> list[Notification]:
        """Return what is left when the controller ends; an incident that failed the job and the job's end are one notification."""
        over = self._closed[0] if self._closed is not None else None
        if self._end is None:
            return [*(self._over(now) if over is not None else []), *self._gathered(now), *self._rest()]
        (state, reason), self._end = self._end, None
        if state is State.FAILED and over is not None and over.incident.outcome == "gave-up":
            self._closed = None
            return [*self._gathered(now), self._of_incident(over, "ended", NotificationLevel.ATTENTION)]
        found = [*(self._over(now) if over is not None else []), *self._gathered(now), *self._rest()]
        level = NotificationLevel.ATTENTION if state is State.FAILED else NotificationLevel.INFO
        ident, text = f"job {self.sender.name}", incident_text.brief(reason, 1000)
        return [*found, self.sender.sign(Notification(id=ident, state="ended", level=level, subject=state.lower(), text=text))]

    def _rest(self) -> list[Notification]:
        return [self._of_quarantine()] if self._quarantined else []

    def _over(self, now: float) -> list[Notification]:
        """Return the notification of the incident that is over, unless there were too many of late."""
        assert self._closed is not None
        case, self._closed = self._closed[0], None
        told, self._told = self._told == case.incident.id, ""
        bad = case.incident.outcome == "gave-up" or bool(self._quarantined)
        level = NotificationLevel.ATTENTION if bad else NotificationLevel.RESOLVED if told else NotificationLevel.INFO
        notification = self._of_incident(case, "over", level)
        if level is not NotificationLevel.INFO or self._room(now):
            return [notification]
        self._held.append(notification)
        return []

    def _of_incident(self, case: IncidentCase, state: str, level: NotificationLevel) -> Notification:
        quarantined, self._quarantined = self._quarantined, {}
        incident, job = case.incident, self.sender.job
        subject = f"incident {incident.number}: {incident_text.short(case)}" if state == "over" else _failed(case)
        subject += "".join(f"; {node} quarantined" for node in quarantined)
        quote = incident_text.root_quote(case)
        draft = Notification(
            id=f"incident {incident.id}",
            state=state,
            level=level,
            subject=subject,
            text=paragraphs(
                f"{incident_text.with_time(case, ' UTC:')}.",
                f"Seen: {quote}" if quote else "",
                f"Why: {why}" if (why := incident_text.why_failed(case)) else "",
                f"Action: {incident_text.to_do(case, job, quarantined)}.",
                f"All of it: `holdfast show {incident.number} --job {job}`",
            ),
            nodes=tuple(dict.fromkeys([*incident_text.all_nodes(case), *quarantined])),
        )
        return self.sender.sign(draft, self.sender.incident_page(incident.number))

    def _lasting(self) -> Notification:
        assert self._open is not None
        case, self._open = self._open[0], None
        self._told = case.incident.id
        subject = f"incident {case.incident.number}: {incident_text.what(case)}, not recovered after {wording.duration(PATIENCE)}"
        quarantined, self._quarantined = self._quarantined, {}
        draft = Notification(
            id=f"incident {case.incident.id}",
            state="open",
            level=NotificationLevel.ATTENTION,
            subject=incident_text.brief(subject, 200),
            text=paragraphs(
                f"{incident_text.with_time(case, ' UTC:')}.",
                f"Now: {incident_text.brief(self._reason, 500)}",
                ". ".join(incident_text.of_quarantine(node, reason) for node, reason in quarantined.items()),
            ),
            nodes=tuple(dict.fromkeys([*incident_text.all_nodes(case), *quarantined])),
        )
        return self.sender.sign(draft, self.sender.incident_page(case.incident.number))

    def _of_quarantine(self) -> Notification:
        nodes, self._quarantined = self._quarantined, {}
        draft = Notification(
            id=f"quarantine {self.sender.cluster} {' '.join(nodes)}",
            state="over",
            level=NotificationLevel.ATTENTION,
            subject=f"{wording.some(nodes)} quarantined",
            text="\n".join(f"{incident_text.of_quarantine(node, reason)}." for node, reason in nodes.items()),
            nodes=tuple(nodes),
        )
        return self.sender.sign(draft)

    def _room(self, now: float) -> bool:
        """Tell whether one more notification is no storm yet, and count it."""
        while self._sent and now - self._sent[0] >= WINDOW:
            self._sent.popleft()
        if len(self._sent) >= MOST or self._held:
            return False
        self._sent.append(now)
        return True

    def _gathered(self, now: float) -> list[Notification]:
        """Return what was held back as one notification."""
        held, self._held = self._held, []
        if not held:
            return []
        self._sent.append(now)
        name = self.sender.name
        words = "\n".join(one.subject.removeprefix(f"[{name}] ") for one in held)
        ident, subject = f"job {name} since {now:.0f}", f"{len(held)} more incidents"
        return [self.sender.sign(Notification(id=ident, state="many", level=NotificationLevel.INFO, subject=subject, text=words))]


def _failed(case: IncidentCase) -> str:
    """Return the subject of a job that an incident ended."""
    return f"job failed: {incident_text.brief(incident_text.what(case), 120)} (incident {case.incident.number})"


def without_controller(sender: NotificationSource, *, state: str, step: int | None, at: float) -> Notification:
    """Return the alert that the server sends by itself when no heartbeat of the controller follows the one of the time *at*."""
    reached = "" if step is None else f" at step {step:,}"
    draft = Notification(
        id=controller_id(sender),
        state="open",
        level=NotificationLevel.ATTENTION,
        subject=f"no controller since {incident_text.time_of_day(at)} UTC; training continues",
        text=paragraphs(
            f"The controller on {sender.host or 'its host'} sent its last heartbeat when the job was {state}{reached}. "
            "Training continues under the agents on the nodes, but nobody would answer the next fault.",
            f"Action: reattach a controller. Run `holdfast run {sender.job}.yaml` again, or press Retry on the flow run in the Prefect UI. "
            "No step is lost and no worker restarts.",
        ),
    )
    return sender.sign(draft)


def with_controller_again(sender: NotificationSource) -> Notification:
    """Return what withdraws that alert."""
    words = f"A controller on {sender.host} has reattached: the next fault will be answered."
    draft = Notification(
        id=controller_id(sender), state="over", level=NotificationLevel.RESOLVED, subject="has a controller again", text=words
    )
    return sender.sign(draft)


def controller_id(sender: NotificationSource) -> str:
    """Return the id of what is told about a job's controller."""
    return f"controller {sender.name}"


def of_nodes(cluster: str, changes: Mapping[str, tuple[str, str]], *, host: str, link: str) -> Notification | None:
    """Return one notification for all *changes* of nodes (state and reason) that a person should know of; nothing when there is none."""
    found = {node: change for node, change in changes.items() if change[0] in NEEDS_SOMEBODY}
    if not found:
        return None
    states = list(dict.fromkeys(state for state, _ in found.values()))
    counted = ", ".join(f"{wording.some([node for node, (now, _) in found.items() if now == state], 5)} {state}" for state in states)
    lines = [f"{node} is {state}: {incident_text.brief(reason, 400)}" for node, (state, reason) in list(found.items())[:MOST_NODES]]
    left = len(found) - len(lines)
    lines += [f"and {wording.count(left)} more"] if left else []
    lines += ["", f"Cluster {cluster}, seen from {host}", *([f"Run: {link}"] if link else [])]
    return Notification(
        id=f"nodes {cluster} {' '.join(found)}"[:200],
        state="open",
        level=NotificationLevel.ATTENTION,
        subject=f"[{cluster}] {counted}",
        text="\n".join(lines),
        cluster=cluster,
        host=host,
        nodes=tuple(found),
        link=link,
    )
