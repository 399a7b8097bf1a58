"""What the Prefect UI shows of a job: the job page, incidents, progress, events. A server that is away never holds a recovery up."""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Final
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from holdfast.control.nodes.approvals import how_to_answer
from holdfast.control.state.incidents import IncidentInWork
from holdfast.errors import BadSetting
from holdfast.history.approvals import describe
from holdfast.history.models import ApprovalRequest, FaultRecord
from holdfast.log import note
from holdfast.prefect.event_kinds import CLUSTER, HEARTBEAT, HEARTBEAT_SECONDS, INCIDENT, JOB, NODE
from holdfast.prefect.links import incident_key, job_key, progress_key, ui_link
from holdfast.prefect_client import events, heartbeat_alerts
from holdfast.prefect_client.events import Resource
from holdfast.report import incident_text as words
from holdfast.report import notifications as told
from holdfast.report.case import IncidentCase, newest_cases
from holdfast.report.job_page import MOST_INCIDENTS, JobFacts, description, job_page, progress_text
from holdfast.report.markdown import incident_markdown
from holdfast.report.notifications import NEEDS_ATTENTION, Notification, Notifications, NotificationSource
from policies.states import TERMINAL

log = logging.getLogger("holdfast.publish")

PAGE_SECONDS: Final = 30.0
"""Seconds between two updates of the job page and the progress bar while nothing but steps is new."""
EVENT_SECONDS: Final = 2.0
"""Seconds between two updates of the job page when something happened: a recovery of a moment is one update."""
OPEN_SECONDS: Final = 2.0
"""Seconds after which the page of an incident that still lasts is made; one that is over by then has its page at once."""
FAULT_SECONDS: Final = 3600.0
"""Seconds within which a fault of the same kind on the same target is sent once, unless another incident began."""
WATCH_SECONDS: Final = 60.0
"""Seconds between two looks at who wants an alert when the job has no controller."""
ALERT_SECONDS: Final = 20.0
"""How long a new controller looks for an alert that was sent before: the server records its own events after a few seconds."""
TICK: Final = 1.0
"""Seconds between two looks at what is due."""
LAST_SECONDS: Final = 5.0
"""How long the end of a flow waits for the server to take what is left."""
SMOOTHING: Final = 0.1
"""Weight of the newest step in the average time of a step."""
BEAT: Final = "HOLDFAST_CONTROLLER_HEARTBEAT"
"""Variable: seconds between two heartbeats of a controller."""

Facts = Mapping[str, Any]
Work = tuple[Callable[[Any], None], Any]
_NOTHING: Final[Work] = (lambda _: None, None)


class Publisher:
    """One thread that talks to the Prefect server in the name of the flow run.

    `tell` may be called from any thread and copies what may change; all else belongs to the thread.
    """

    def __init__(self, job: str) -> None:
        self._run = events.flow_run_id()
        self._facts = JobFacts(job=job, run_link=ui_link("flow-run", self._run) if self._run else "", incident_link=self._incident_link)
        self._notifications = Notifications(NotificationSource(job=job))
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._beat_seconds = beat_seconds()
        self._next_beat: float | None = None
        """When the next heartbeat is due; nothing while this flow does not run the job."""
        self._look_for_alert = False
        """Somebody may have been told that the job has no controller."""
        self._heartbeat_before = ""
        """The last heartbeat before this controller's first one, while it is looked whether an alert was sent on it."""
        self._alert_until = self._next_look = 0.0
        self._next_page = self._next_event = 0.0
        self._is_news = False
        self._shown: tuple[int | None, str] | None = None
        """Step and state that the job page shows."""
        self._artifacts: dict[str, UUID] = {}
        """Key of an artifact to the version that this flow run made of it."""
        self._open: tuple[IncidentCase, float] | None = None
        """The incident in work, and when its page is due."""
        self._quarantined: dict[str, str] = {}
        """Nodes that were quarantined since the incident in work began, or the last one before."""
        self._last_case: IncidentCase | None = None
        self._faults: dict[tuple[str, str], float] = {}
        """Kind and target of the faults that were sent, and when."""
        self._next_watch = 0.0
        """When it is looked next who wants an alert when there is no controller."""
        self._is_unwatched = False
        self._failing = False
        handlers: dict[str, tuple[Callable[[Facts], Any], Callable[[Any], None]]] = {
            "began": (dict, self._began),
            "released": (dict, self._released),
            "moved": (_texts, self._moved),
            "nodes": (dict, self._nodes),
            "node-moved": (dict, self._node_moved),
            "fault": (lambda facts: facts["fault"].model_copy(), self._fault),
            "opened": (_case_of, self._opened),
            "incident": (_case_of, self._closed),
            "asked": (lambda facts: facts["question"].model_copy(), self._asked),
            "answered": (lambda facts: facts["question"].model_copy(), self._answered),
        }
        self._handlers = handlers
        """News to what copies its facts, and to what takes them in."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._serve), name="publisher", daemon=True)
        self._thread.start()

    def tell(self, event: str, facts: Facts) -> None:
        """Publish news of the run; never wait, never raise."""
        if event == "progress":  # once a step: the newest is all that counts
            page, seconds = self._facts, facts["seconds"]
            page.pace = seconds if page.pace is None else (1 - SMOOTHING) * page.pace + SMOOTHING * seconds
            page.step, page.until, page.loss = facts["step"], facts["until"], facts["loss"]
        elif event in self._handlers:
            copy, handler = self._handlers[event]
            self._work.put((handler, copy(facts)))

    def close(self) -> None:
        """Give what is left a few seconds to be published."""
        self._work.put(None)
        self._thread.join(LAST_SECONDS)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        due = 0.0
        while True:
            try:
                work = self._work.get(timeout=TICK)
            except queue.Empty:
                work = _NOTHING
            if work is None:
                break
            handler, news = work
            self._guarded(partial(handler, news))
            if time.monotonic() >= due:
                due = time.monotonic() + TICK
                for look in (self._beat, self._look_at_alert, self._look_at_notifications, self._look_at_incident, self._look_at_page):
                    self._guarded(look)
        self._guarded(self._last)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do one thing; that the UI is away, which it may be for hours, is noted once: the history has everything."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (as above)
            if not self._failing:
                note(log, "prefect.unreachable", level=logging.WARNING, why=repr(error))
            self._failing = True

    def _last(self) -> None:
        if self._facts.over and self._facts.cluster:
            self._guarded(self._unwatch)
        for notification in self._notifications.last(time.time()):
            self._notify(notification)
        self._show_page()

    # -- news ---------------------------------------------------------------------------------------------------------

    def _began(self, facts: Facts) -> None:
        page, job = self._facts, facts["job"]
        page.cluster, page.host, page.began, page.state = facts["cluster"], facts["host"], job.at, facts["state"]
        page.step = facts["step"] if page.step is None else page.step
        self._notifications.sender = NotificationSource(
            job=page.job,
            cluster=page.cluster,
            host=page.host,
            link=page.run_link,
            page=ui_link("artifact", job_key(page.job)),
            incident_page=self._incident_link,
        )
        self._nodes(facts)
        self._next_beat, self._look_for_alert, self._is_news = 0.0, bool(facts["reattached"]), True
        if not facts["reattached"]:
            self._emit("holdfast.job.launching", before="", event="submitted", after=page.state, reason="submitted")
        else:
            self._emit("holdfast.job.reattached", state=page.state, host=page.host)
            page.cases = list(newest_cases(facts["history"], job.id, MOST_INCIDENTS))
            page.incidents = page.cases[-1].incident.number if page.cases else 0

    def _released(self, _facts: Facts) -> None:
        self._next_beat = None

    def _moved(self, facts: Facts) -> None:
        self._facts.state, self._facts.reason, self._is_news = facts["after"], facts["reason"], True
        moved = {name: facts[name] for name in ("before", "event", "after")}
        self._emit(f"holdfast.job.{facts['after'].lower()}", **moved, reason=facts["reason"])
        self._notifications.moved(facts["after"], facts["reason"])
        if facts["after"] in TERMINAL:
            self._next_beat = None
            self._guarded(self._unwatch)

    def _unwatch(self) -> None:
        """Expect no heartbeat any more, as the job has ended."""
        if not self._is_unwatched:
            heartbeat_alerts.unwatch(self._facts.job)
            self._is_unwatched = True

    def _nodes(self, facts: Facts) -> None:
        before = (self._facts.ranks, self._facts.spares, self._facts.hot_spares, self._facts.isolated)
        found = (facts["ranks"], facts["spares"], facts["hot_spares"], facts["isolated"])
        if found != before:
            self._facts.ranks, self._facts.spares, self._facts.hot_spares, self._facts.isolated = found
            self._is_news = True

    def _node_moved(self, facts: Facts) -> None:
        node, move = facts["node"], facts["move"]
        around = [*self._around(), Resource(role=JOB, names=(self._facts.job,))]
        events.emit_node(self._facts.cluster, node, move, around, {"hold": facts["hold"]})
        if move.after in NEEDS_ATTENTION:
            self._quarantined[node] = move.reason
            self._notifications.quarantined(node, move.reason)
            if self._open is None and self._last_case is not None:
                self._show_incident(self._last_case)

    def _fault(self, fault: FaultRecord) -> None:
        now, name = time.monotonic(), (fault.kind, fault.subject)
        if now - self._faults.get(name, -FAULT_SECONDS) < FAULT_SECONDS:
            return
        self._faults[name] = now
        self._emit(
            "holdfast.fault.seen",
            *self._of_nodes([fault.node] if fault.node else []),
            kind=fault.kind,
            target=fault.subject,
            quote=str(fault.evidence.get("quote") or ""),
            recommended_action=str(fault.recommended_action),
            node=fault.node,
            rank=fault.rank,
        )

    def _opened(self, case: IncidentCase) -> None:
        self._faults.clear()
        self._quarantined, self._last_case = {}, None
        self._open = case, time.monotonic() + OPEN_SECONDS
        self._take_case(case)
        about = [*self._of_incident(case)]
        row = case.incident
        self._emit("holdfast.incident.opened", *about, number=row.number, kind=row.kind, target=row.subject, summary=words.sentence(case))
        for notification in self._notifications.opened(case, time.time()):
            self._notify(notification)

    def _closed(self, case: IncidentCase) -> None:
        self._open, self._last_case = None, case
        self._take_case(case)
        row = case.incident
        self._emit(
            "holdfast.incident.recovered" if row.outcome == "recovered" else "holdfast.incident.closed",
            *self._of_incident(case),
            number=row.number,
            kind=row.kind,
            target=row.subject,
            summary=words.sentence(case),
            outcome=row.outcome,
            action=row.action,
            downtime_s=row.downtime_s,
            steps_lost=row.steps_lost,
            reason=row.reason,
        )
        self._notifications.closed(case, time.time())
        self._show_incident(case)

    def _take_case(self, case: IncidentCase) -> None:
        page = self._facts
        before = [one for one in page.cases if one.incident.id != case.incident.id]
        page.cases = [*before[1 - MOST_INCIDENTS :], case]
        page.incidents, self._is_news = max(page.incidents, case.incident.number), True

    def _asked(self, question: ApprovalRequest) -> None:
        self._facts.approval, self._is_news = question, True
        self._emit("holdfast.approval.asked", number=question.number, nodes=list(question.nodes), reason=question.reason)
        for notification in self._notifications.asked(question, how_to_answer(question)):
            self._notify(notification)

    def _answered(self, question: ApprovalRequest) -> None:
        self._facts.approval, self._is_news = None, True
        summary, nodes = describe(question), list(question.nodes)
        answer = {"answer": question.answer, "by": question.by, "summary": summary}
        self._emit("holdfast.approval.answered", number=question.number, nodes=nodes, reason=question.reason, **answer)
        for notification in self._notifications.answered(question, summary):
            self._notify(notification)

    # -- what is due --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat; before the first one, and after the server was away, see which one was the last."""
        if self._next_beat is None or time.monotonic() < self._next_beat:
            return
        if self._look_for_alert:
            self._heartbeat_before = events.last_heartbeat(self._facts.job)  # raises while the server is away: so it is looked for again
            self._look_for_alert, self._alert_until = False, time.monotonic() + ALERT_SECONDS
        if time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + WATCH_SECONDS
            self._guarded(lambda: heartbeat_alerts.watch(self._facts.job))
        self._next_beat = time.monotonic() + self._beat_seconds
        page = self._facts
        alert = told.without_controller(self._notifications.sender, state=page.state, step=page.step, at=time.time())
        self._emit(HEARTBEAT, state=page.state, host=page.host, step=page.step, alert=asdict(alert))

    def _look_at_alert(self) -> None:
        """Withdraw an alert that the server sent before this controller was there."""
        if self._heartbeat_before and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + ALERT_SECONDS / 4
            if events.alerted(self._heartbeat_before):
                self._heartbeat_before = ""
                self._notify(told.with_controller_again(self._notifications.sender))
            elif time.monotonic() > self._alert_until:
                self._heartbeat_before = ""

    def _look_at_notifications(self) -> None:
        for notification in self._notifications.tick(time.time()):
            self._notify(notification)

    def _look_at_incident(self) -> None:
        if self._open is not None and time.monotonic() >= self._open[1]:
            case, self._open = self._open[0], (self._open[0], float("inf"))
            self._show_incident(case)

    def _look_at_page(self) -> None:
        now, page = time.monotonic(), self._facts
        if not page.cluster or (self._shown == (page.step, page.state) and not self._is_news):
            return
        if now < (self._next_event if self._is_news else self._next_page):
            return
        self._next_event, self._next_page = now + EVENT_SECONDS, now + PAGE_SECONDS
        self._show_page()
        self._is_news = False

    # -- showing ------------------------------------------------------------------------------------------------------

    def _show_page(self) -> None:
        page = self._facts
        if not page.cluster:  # this flow never had the job
            return
        self._shown = page.step, page.state
        self._put(job_key(page.job), job_page(page, time.time()), description(page))
        if page.step is not None:
            self._show_progress(round(100.0 * page.share, 2), progress_text(page))
        if self._failing:
            self._failing, self._look_for_alert = False, True

    def _show_incident(self, case: IncidentCase) -> None:
        page, key = self._facts, incident_key(self._facts.job, case.incident.number)
        page_link = self._link(job_key(page.job))
        text = incident_markdown(case, page.job, quarantined=self._quarantined, run_link=page.run_link, page_link=page_link)
        self._put(key, text, words.headline(case))

    def _put(self, key: str, markdown: str, summary: str) -> None:
        """Show an artifact: one version for this flow run, which is written anew in its place."""
        if key in self._artifacts:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._artifacts[key], ArtifactUpdate(data=markdown, description=summary))
        else:
            made = create_markdown_artifact(markdown=markdown, key=key, description=summary)
            if isinstance(made, UUID):
                self._artifacts[key] = made

    def _show_progress(self, percent: float, summary: str) -> None:
        key = progress_key(self._facts.job)
        if key in self._artifacts:
            _drop(update_progress_artifact(self._artifacts[key], progress=percent, description=summary))
        else:
            made = create_progress_artifact(progress=percent, key=key, description=summary)
            if isinstance(made, UUID):
                self._artifacts[key] = made

    def _incident_link(self, number: int) -> str:
        return self._link(incident_key(self._facts.job, number))

    def _link(self, key: str) -> str:
        """Link the version of an artifact that this flow run made, or all of its versions."""
        made = self._artifacts.get(key)
        return ui_link("artifact", key) if made is None else ui_link("artifact-version", made)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _emit(self, name: str, *related: Resource, **fields: object) -> None:
        events.emit(name, Resource(role=JOB, names=(self._facts.job,)), [*self._around(), *related], **fields)

    def _notify(self, notification: Notification) -> None:
        related = [*self._around(), *self._of_nodes(notification.nodes)]
        events.notify(notification, Resource(role=JOB, names=(self._facts.job,)), related)

    def _around(self) -> list[Resource]:
        """Return the flow run and the cluster."""
        cluster = [Resource(role=CLUSTER, names=(self._facts.cluster,))] if self._facts.cluster else []
        return [*events.of_flow_run(self._run), *cluster]

    def _of_incident(self, case: IncidentCase) -> list[Resource]:
        incident = Resource(role=INCIDENT, names=(self._facts.job, str(case.incident.number)))
        return [incident, *self._of_nodes(words.all_nodes(case))]

    def _of_nodes(self, nodes: Iterable[str]) -> list[Resource]:
        return [Resource(role=NODE, names=(self._facts.cluster, node)) for node in list(nodes)[: told.MOST_NODES]]


def beat_seconds() -> float:
    """Return the seconds between two heartbeats, as the environment or the default says."""
    given = os.environ.get(BEAT, "")
    with suppress(ValueError):
        if (seconds := float(given or HEARTBEAT_SECONDS)) > 0:
            return seconds
    raise BadSetting(BEAT, given, ("a number of seconds above 0",))


def _texts(facts: Facts) -> dict[str, str]:
    """Copy facts that are all words."""
    return {name: str(value) for name, value in facts.items()}


def _case_of(facts: Facts) -> IncidentCase:
    """Copy what is known of an incident in work."""
    incident: IncidentInWork = facts["incident"]
    return IncidentCase(
        incident=incident.row.model_copy(),
        faults=list(incident.fault_rows),
        decisions=list(incident.decisions),
        phases=incident.rows(),
        diagnoses=[incident.verdict] if incident.verdict is not None else [],
    )


def _drop(_answer: object) -> None:
    """Drop the server's answer."""
