"""Which notifications people get about a job: one per incident, never a storm.

Pure: events and times in, notifications out. A Prefect automation (`holdfast admin notify`) decides where they are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from holdfast.history.models import ApprovalRequest
from holdfast.policies.nodes.node_health import NodeHealthState
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.states import TERMINAL, State
from holdfast.report.case import IncidentCase
from holdfast.report.job_page import no_link
from holdfast.report.text import incident_text, wording

PATIENCE: Final = 30.0
"""Seconds after which an open incident is notified; one that closes before gets a single notification."""
SETTLE: Final = 3.0
"""Seconds that the notification of a closed incident waits for what belongs to it: a quarantined node, the end of the job."""
MOST: Final = 5
"""Notifications within `WINDOW` after which further ones that need no action are combined into one."""
WINDOW: Final = 600.0
"""Seconds."""
NEEDS_ATTENTION: Final = frozenset(
    {NodeHealthState.UNHEALTHY, NodeHealthState.UNREACHABLE, NodeState.QUARANTINED, NodeState.DECOMMISSIONED}
)
"""States of nodes that are notified: the cluster has one node less."""
MOST_NODES: Final = 20
"""Nodes that one notification describes; of the others it gives the number."""


class NotificationLevel(StrEnum):
    """Whom a notification is for."""

    ATTENTION = "attention"
    """A person should act."""
    RESOLVED = "resolved"
    """It replaces one that needed attention: no action is needed any more."""
    INFO = "info"
    """No action is needed."""


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
    incident_page: Callable[[int], str] = no_link

    @property
    def name(self) -> str:
        """Return the job with its cluster."""
        return f"{self.cluster}/{self.job}" if self.cluster else self.job

    def sign(self, draft: Notification, page: str = "") -> Notification:
        """Return *draft* with the job in its subject, and sender and links below its text; *page* is that of an incident."""
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
    """Return the parts that are not empty, separated by empty lines."""
    return "\n\n".join(part for part in parts if part)


@dataclass(slots=True)
class Notifications:
    """The notifications of one job."""

    sender: NotificationSource
    _open: tuple[IncidentCase, float] | None = None
    """The open incident without a notification, and when it gets one."""
    _notified: str = ""
    """Id of the incident that was notified while it was open."""
    _reason: str = ""
    _closed: tuple[IncidentCase, float] | None = None
    """The closed incident, and until when its notification waits."""
    _quarantined: dict[str, str] = field(default_factory=dict)
    """Nodes that were quarantined since the last notification, and why."""
    _end: tuple[State, str] | None = None
    """How the job ended, until that is notified."""
    _sent: deque[float] = field(default_factory=deque)
    _combined: list[Notification] = field(default_factory=list)

    # -- events -------------------------------------------------------------------------------------------------------

    def opened(self, case: IncidentCase, now: float) -> list[Notification]:
        """Take in that an incident has opened."""
        due = self._of_closed(now) if self._closed is not None else []
        self._open, self._reason = (case, now + PATIENCE), case.incident.reason
        return due

    def moved(self, after: str, reason: str) -> None:
        """Take in the state of the job."""
        self._reason = reason
        if after in TERMINAL:
            self._end = State(after), reason

    def closed(self, case: IncidentCase, now: float) -> None:
        """Take in how an incident ended."""
        self._open, self._closed = None, (case, now + SETTLE)

    def quarantined(self, node: str, reason: str) -> None:
        """Take in that a node of the job was quarantined."""
        self._quarantined[node] = reason

    def asked(self, approval: ApprovalRequest, how: str) -> list[Notification]:
        """Take in that an approval is requested; *how* is how to answer."""
        return [self._of_approval(approval, "asked", NotificationLevel.ATTENTION, paragraphs(approval.reason, f"Answer: {how}"))]

    def answered(self, approval: ApprovalRequest, answer: str) -> list[Notification]:
        """Take in that an approval is answered or not needed any more."""
        return [self._of_approval(approval, "over", NotificationLevel.RESOLVED, f"Answered: {answer}")]

    def _of_approval(self, approval: ApprovalRequest, state: str, level: NotificationLevel, text: str) -> Notification:
        nodes = tuple(approval.nodes)
        subject = f"approval {approval.number}: may {wording.listing(nodes)} be isolated?"
        ident = f"approval {approval.number}"
        return self.sender.sign(Notification(id=ident, state=state, level=level, subject=subject, text=text, nodes=nodes))

    # -- what is due --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Notification]:
        """Return what is due by *now*."""
        found = []
        if self._closed is not None and self._end is None and self._closed[1] <= now:
            found += self._of_closed(now)
        if self._open is not None and self._open[1] <= now and self._end is None:
            found.append(self._of_open())
        if self._quarantined and self._open is None and self._closed is None and self._end is None:
            found.append(self._of_quarantine())
        if self._combined and (not self._sent or now - self._sent[-1] >= WINDOW):
            found += self._of_combined(now)
        return found

    def last(self, now: float) -> list[Notification]:
        """Return the remaining ones when the controller ends; an incident that failed the job and the job's end are one notification."""
        closed = self._closed[0] if self._closed is not None else None
        end, self._end = self._end, None
        if end is not None and end[0] is State.FAILED and closed is not None and closed.incident.outcome == "failed":
            self._closed = None
            return [*self._of_combined(now), self._of_incident(closed, "ended", NotificationLevel.ATTENTION)]
        found = self._of_closed(now) if closed is not None else []
        found += self._of_combined(now)
        found += [self._of_quarantine()] if self._quarantined else []
        if end is None:
            return found
        state, reason = end
        level = NotificationLevel.ATTENTION if state is State.FAILED else NotificationLevel.INFO
        ident, text = f"job {self.sender.name}", incident_text.brief(reason, 1000)
        return [*found, self.sender.sign(Notification(id=ident, state="ended", level=level, subject=state.lower(), text=text))]

    def _of_closed(self, now: float) -> list[Notification]:
        """Return the notification of the closed incident, unless there were too many recently."""
        assert self._closed is not None
        case, self._closed = self._closed[0], None
        notified, self._notified = self._notified == case.incident.id, ""
        bad = case.incident.outcome == "failed" or bool(self._quarantined)
        level = NotificationLevel.ATTENTION if bad else NotificationLevel.RESOLVED if notified else NotificationLevel.INFO
        notification = self._of_incident(case, "over", level)
        if level is not NotificationLevel.INFO or self._may_send(now):
            return [notification]
        self._combined.append(notification)
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
                f"All of it: `holdfast incidents show {incident.id}`",
            ),
            nodes=tuple(dict.fromkeys([*incident_text.all_nodes(case), *quarantined])),
        )
        return self.sender.sign(draft, self.sender.incident_page(incident.number))

    def _of_open(self) -> Notification:
        assert self._open is not None
        case, self._open = self._open[0], None
        self._notified = case.incident.id
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
            subject=f"{wording.listing(nodes)} quarantined",
            text="\n".join(f"{incident_text.of_quarantine(node, reason)}." for node, reason in nodes.items()),
            nodes=tuple(nodes),
        )
        return self.sender.sign(draft)

    def _may_send(self, now: float) -> bool:
        """Return whether one more notification is no storm yet, and count it."""
        while self._sent and now - self._sent[0] >= WINDOW:
            self._sent.popleft()
        if len(self._sent) >= MOST or self._combined:
            return False
        self._sent.append(now)
        return True

    def _of_combined(self, now: float) -> list[Notification]:
        """Return the notifications that were held back as a single one."""
        combined, self._combined = self._combined, []
        if not combined:
            return []
        self._sent.append(now)
        name = self.sender.name
        text = "\n".join(one.subject.removeprefix(f"[{name}] ") for one in combined)
        ident, subject = f"job {name} since {now:.0f}", f"{len(combined)} more incidents"
        return [self.sender.sign(Notification(id=ident, state="many", level=NotificationLevel.INFO, subject=subject, text=text))]


def _failed(case: IncidentCase) -> str:
    """Return the subject for a job that failed with an incident."""
    return f"job failed: {incident_text.brief(incident_text.what(case), 120)} (incident {case.incident.number})"


def without_controller(sender: NotificationSource, *, state: str, step: int | None, at: float) -> Notification:
    """Return the alert that the server sends by itself when the controller's heartbeat of the time *at* is its last."""
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
    """Return the notification that resolves that alert."""
    text = f"A controller on {sender.host} has reattached: the next fault will be answered."
    draft = Notification(
        id=controller_id(sender), state="over", level=NotificationLevel.RESOLVED, subject="has a controller again", text=text
    )
    return sender.sign(draft)


def controller_id(sender: NotificationSource) -> str:
    """Return the id of notifications about a job's controller."""
    return f"controller {sender.name}"


def of_nodes(cluster: str, changes: Mapping[str, tuple[str, str]], *, host: str, link: str) -> Notification | None:
    """Return one notification for all *changes* of nodes (state and reason) that need attention; None without any."""
    found = {node: change for node, change in changes.items() if change[0] in NEEDS_ATTENTION}
    if not found:
        return None
    states = list(dict.fromkeys(state for state, _ in found.values()))
    counted = ", ".join(f"{wording.listing([node for node, (now, _) in found.items() if now == state], 5)} {state}" for state in states)
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
