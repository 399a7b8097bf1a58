"""Publish a job to the Prefect UI: job page, incidents, progress, events, heartbeats. An unreachable server never delays a recovery."""

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
from holdfast.policies.states import TERMINAL
from holdfast.prefect.event_kinds import CLUSTER, HEARTBEAT, HEARTBEAT_SECONDS, INCIDENT, JOB, NODE
from holdfast.prefect.links import incident_key, job_key, progress_key, ui_link
from holdfast.prefect_client import events, heartbeat_alerts
from holdfast.prefect_client.events import Resource
from holdfast.report import notifications
from holdfast.report.case import IncidentCase, newest_cases
from holdfast.report.job_page import MOST_INCIDENTS, JobFacts, description, job_page, progress_text
from holdfast.report.notifications import NEEDS_ATTENTION, Notification, Notifications, NotificationSource
from holdfast.report.text import incident_text as words
from holdfast.report.text.markdown import incident_markdown

log = logging.getLogger("holdfast.publish")

PAGE_SECONDS: Final = 30.0
"""Seconds between two updates of the job page and the progress bar while only steps are new."""
EVENT_SECONDS: Final = 2.0
"""Seconds between two updates of the job page after an event: a short recovery is one update."""
OPEN_SECONDS: Final = 2.0
"""Seconds after which an open incident gets its page; one that closes earlier gets it at once."""
FAULT_SECONDS: Final = 3600.0
"""Seconds within which a fault of the same kind on the same target is sent once, unless another incident opens."""
ALERT_UPDATE_SECONDS: Final = 60.0
"""Seconds between two updates of the automations that send an alert when the job has no controller."""
ALERT_SECONDS: Final = 20.0
"""How long a new controller searches for an alert that was sent before: the server records its own events after a few seconds."""
TICK: Final = 1.0
"""Seconds between two checks of what is due."""
LAST_SECONDS: Final = 5.0
"""How long the end of a flow waits until everything is published."""
SMOOTHING: Final = 0.1
"""Weight of the newest step in the moving average of the step time."""
HEARTBEAT_VARIABLE: Final = "HOLDFAST_CONTROLLER_HEARTBEAT"
"""Environment variable: seconds between two heartbeats of a controller."""

Facts = Mapping[str, Any]
Work = tuple[Callable[[Any], None], Any]
_NOTHING: Final[Work] = (lambda _: None, None)


class Publisher:
    """A thread that talks to the Prefect server for the flow run.

    `publish` may be called from any thread and copies what may change; everything else belongs to the thread.
    """

    def __init__(self, job: str) -> None:
        self._run = events.flow_run_id()
        self._facts = JobFacts(job=job, run_link=ui_link("flow-run", self._run) if self._run else "", incident_link=self._incident_link)
        self._notifications = Notifications(NotificationSource(job=job))
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._heartbeat_seconds = heartbeat_seconds()
        self._next_heartbeat: float | None = None
        """When the next heartbeat is due; None while this flow does not control the job."""
        self._search_alert = False
        """An alert that the job has no controller may have been sent."""
        self._heartbeat_before = ""
        """Id of the last heartbeat before this controller's first one, while an alert for it is searched; else empty."""
        self._alert_until = self._next_search = 0.0
        self._next_page = self._next_event = 0.0
        self._changed = False
        self._shown: tuple[int | None, str] | None = None
        """Step and state on the job page."""
        self._artifacts: dict[str, UUID] = {}
        """Artifact key to the version that this flow run created."""
        self._open: tuple[IncidentCase, float] | None = None
        """The open incident, and when its page is due."""
        self._quarantined: dict[str, str] = {}
        """Nodes quarantined since the newest incident opened, with the reason."""
        self._last_case: IncidentCase | None = None
        self._faults: dict[tuple[str, str], float] = {}
        """Kind and target of the faults that were sent, with the time."""
        self._next_alert_update = 0.0
        """When the alert automations are updated next."""
        self._alerts_deleted = False
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
            "asked": (lambda facts: facts["approval"].model_copy(), self._asked),
            "answered": (lambda facts: facts["approval"].model_copy(), self._answered),
        }
        self._handlers = handlers
        """Event of the controller to the function that copies its facts, and to the function that handles them."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._serve), name="publisher", daemon=True)
        self._thread.start()

    def publish(self, event: str, facts: Facts) -> None:
        """Publish an event of the controller; never block, never raise."""
        if event == "progress":  # once a step: only the newest counts
            page, seconds = self._facts, facts["seconds"]
            page.step_time = seconds if page.step_time is None else (1 - SMOOTHING) * page.step_time + SMOOTHING * seconds
            page.step, page.until, page.loss = facts["step"], facts["until"], facts["loss"]
        elif event in self._handlers:
            copy, handler = self._handlers[event]
            self._work.put((handler, copy(facts)))

    def close(self) -> None:
        """Wait a few seconds until everything is published."""
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
            handler, facts = work
            self._guarded(partial(handler, facts))
            if time.monotonic() >= due:
                due = time.monotonic() + TICK
                for act in (
                    self._send_heartbeat,
                    self._withdraw_alert,
                    self._send_notifications,
                    self._show_open_incident,
                    self._update_page,
                ):
                    self._guarded(act)
        self._guarded(self._last)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call *act*; log once that the server is unreachable, which may last for hours: the history has everything."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (as above)
            if not self._failing:
                note(log, "prefect.unreachable", level=logging.WARNING, why=repr(error))
            self._failing = True

    def _last(self) -> None:
        if self._facts.over and self._facts.cluster:
            self._guarded(self._delete_alerts)
        for notification in self._notifications.last(time.time()):
            self._notify(notification)
        self._show_page()

    # -- events of the controller ---------------------------------------------------------------------------------------------------------

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
        self._next_heartbeat, self._search_alert, self._changed = 0.0, bool(facts["reattached"]), True
        if not facts["reattached"]:
            self._emit("holdfast.job.launching", before="", event="submitted", after=page.state, reason="submitted")
            for case in newest_cases(facts["history"], job.id, MOST_INCIDENTS):  # those that its launcher handled
                self._earlier(case)
        else:
            self._emit("holdfast.job.reattached", state=page.state, host=page.host)
            page.cases = list(newest_cases(facts["history"], job.id, MOST_INCIDENTS))
            page.incidents = page.cases[-1].incident.number if page.cases else 0

    def _earlier(self, case: IncidentCase) -> None:
        """Publish an incident from before this flow began."""
        for fault in case.faults:
            self._fault(fault)
        self._opened(case)
        if case.incident.closed_at is not None:
            self._closed(case)

    def _released(self, _facts: Facts) -> None:
        self._next_heartbeat = None

    def _moved(self, facts: Facts) -> None:
        self._facts.state, self._facts.reason, self._changed = facts["after"], facts["reason"], True
        moved = {name: facts[name] for name in ("before", "event", "after")}
        self._emit(f"holdfast.job.{facts['after'].lower()}", **moved, reason=facts["reason"])
        self._notifications.moved(facts["after"], facts["reason"])
        if facts["after"] in TERMINAL:
            self._next_heartbeat = None
            self._guarded(self._delete_alerts)

    def _delete_alerts(self) -> None:
        """Stop expecting heartbeats, as the job has ended."""
        if not self._alerts_deleted:
            heartbeat_alerts.unwatch(self._facts.job)
            self._alerts_deleted = True

    def _nodes(self, facts: Facts) -> None:
        before = (self._facts.ranks, self._facts.spares, self._facts.hot_spares, self._facts.isolated)
        found = (facts["ranks"], facts["spares"], facts["hot_spares"], facts["isolated"])
        if found != before:
            self._facts.ranks, self._facts.spares, self._facts.hot_spares, self._facts.isolated = found
            self._changed = True

    def _node_moved(self, facts: Facts) -> None:
        node, move = facts["node"], facts["move"]
        related = [*self._context(), Resource(role=JOB, names=(self._facts.job,))]
        events.emit_node(self._facts.cluster, node, move, related, {"cordon": facts["cordon"]})
        if move.after in NEEDS_ATTENTION:
            self._quarantined[node] = move.reason
            self._notifications.quarantined(node, move.reason)
            if self._open is None and self._last_case is not None:
                self._show_incident(self._last_case)

    def _fault(self, fault: FaultRecord) -> None:
        now, name = time.monotonic(), (fault.kind, fault.target)
        if now - self._faults.get(name, -FAULT_SECONDS) < FAULT_SECONDS:
            return
        self._faults[name] = now
        self._emit(
            "holdfast.fault.seen",
            *self._of_nodes([fault.node] if fault.node else []),
            kind=fault.kind,
            target=fault.target,
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
        row, about = case.incident, self._of_incident(case)
        self._emit("holdfast.incident.opened", *about, number=row.number, kind=row.kind, target=row.target, summary=words.sentence(case))
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
            target=row.target,
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
        page.incidents, self._changed = max(page.incidents, case.incident.number), True

    def _asked(self, request: ApprovalRequest) -> None:
        self._facts.approval, self._changed = request, True
        self._emit("holdfast.approval.asked", number=request.number, nodes=list(request.nodes), reason=request.reason)
        for notification in self._notifications.asked(request, how_to_answer(request)):
            self._notify(notification)

    def _answered(self, request: ApprovalRequest) -> None:
        self._facts.approval, self._changed = None, True
        summary, nodes = describe(request), list(request.nodes)
        answer = {"answer": request.answer, "by": request.by, "summary": summary}
        self._emit("holdfast.approval.answered", number=request.number, nodes=nodes, reason=request.reason, **answer)
        for notification in self._notifications.answered(request, summary):
            self._notify(notification)

    # -- what is due --------------------------------------------------------------------------------------------------

    def _send_heartbeat(self) -> None:
        """Send a heartbeat; before the first one, and after the server was unreachable, find the last one before it."""
        if self._next_heartbeat is None or time.monotonic() < self._next_heartbeat:
            return
        if self._search_alert:
            self._heartbeat_before = events.last_heartbeat(self._facts.job)  # raises while the server is unreachable, and is repeated then
            self._search_alert, self._alert_until = False, time.monotonic() + ALERT_SECONDS
        if time.monotonic() >= self._next_alert_update:
            self._next_alert_update = time.monotonic() + ALERT_UPDATE_SECONDS
            self._guarded(lambda: heartbeat_alerts.watch(self._facts.job))
        self._next_heartbeat = time.monotonic() + self._heartbeat_seconds
        page = self._facts
        alert = notifications.without_controller(self._notifications.sender, state=page.state, step=page.step, at=time.time())
        self._emit(HEARTBEAT, state=page.state, host=page.host, step=page.step, alert=asdict(alert))

    def _withdraw_alert(self) -> None:
        """Withdraw an alert that the server sent before this controller started."""
        if self._heartbeat_before and time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + ALERT_SECONDS / 4
            if events.alerted(self._heartbeat_before):
                self._heartbeat_before = ""
                self._notify(notifications.with_controller_again(self._notifications.sender))
            elif time.monotonic() > self._alert_until:
                self._heartbeat_before = ""

    def _send_notifications(self) -> None:
        for notification in self._notifications.tick(time.time()):
            self._notify(notification)

    def _show_open_incident(self) -> None:
        if self._open is not None and time.monotonic() >= self._open[1]:
            case, self._open = self._open[0], (self._open[0], float("inf"))
            self._show_incident(case)

    def _update_page(self) -> None:
        now, page = time.monotonic(), self._facts
        if not page.cluster or (self._shown == (page.step, page.state) and not self._changed):
            return
        if now < (self._next_event if self._changed else self._next_page):
            return
        self._next_event, self._next_page = now + EVENT_SECONDS, now + PAGE_SECONDS
        self._show_page()
        self._changed = False

    # -- showing ------------------------------------------------------------------------------------------------------

    def _show_page(self) -> None:
        page = self._facts
        if not page.cluster:  # this flow never controlled the job
            return
        self._shown = page.step, page.state
        self._put(job_key(page.job), job_page(page, time.time()), description(page))
        if page.step is not None:
            self._show_progress(round(100.0 * page.share, 2), progress_text(page))
        if self._failing:
            self._failing, self._search_alert = False, True

    def _show_incident(self, case: IncidentCase) -> None:
        page, key = self._facts, incident_key(self._facts.job, case.incident.number)
        page_link = self._link(job_key(page.job))
        text = incident_markdown(case, page.job, quarantined=self._quarantined, run_link=page.run_link, page_link=page_link)
        self._put(key, text, words.headline(case))

    def _put(self, key: str, markdown: str, summary: str) -> None:
        """Create or update an artifact: one version per flow run."""
        if key in self._artifacts:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._artifacts[key], ArtifactUpdate(data=markdown, description=summary))
        else:
            created = create_markdown_artifact(markdown=markdown, key=key, description=summary)
            if isinstance(created, UUID):
                self._artifacts[key] = created

    def _show_progress(self, percent: float, summary: str) -> None:
        key = progress_key(self._facts.job)
        if key in self._artifacts:
            update_progress_artifact(self._artifacts[key], progress=percent, description=summary)
        else:
            created = create_progress_artifact(progress=percent, key=key, description=summary)
            if isinstance(created, UUID):
                self._artifacts[key] = created

    def _incident_link(self, number: int) -> str:
        return self._link(incident_key(self._facts.job, number))

    def _link(self, key: str) -> str:
        """Return the link to this flow run's version of an artifact, or to all of its versions."""
        version = self._artifacts.get(key)
        return ui_link("artifact", key) if version is None else ui_link("artifact-version", version)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _emit(self, name: str, *related: Resource, **fields: object) -> None:
        events.emit(name, Resource(role=JOB, names=(self._facts.job,)), [*self._context(), *related], **fields)

    def _notify(self, notification: Notification) -> None:
        related = [*self._context(), *self._of_nodes(notification.nodes)]
        events.notify(notification, Resource(role=JOB, names=(self._facts.job,)), related)

    def _context(self) -> list[Resource]:
        """Return flow run and cluster as related resources."""
        cluster = [Resource(role=CLUSTER, names=(self._facts.cluster,))] if self._facts.cluster else []
        return [*events.of_flow_run(self._run), *cluster]

    def _of_incident(self, case: IncidentCase) -> list[Resource]:
        incident = Resource(role=INCIDENT, names=(self._facts.job, str(case.incident.number)))
        return [incident, *self._of_nodes(words.all_nodes(case))]

    def _of_nodes(self, nodes: Iterable[str]) -> list[Resource]:
        return [Resource(role=NODE, names=(self._facts.cluster, node)) for node in list(nodes)[: notifications.MOST_NODES]]


def heartbeat_seconds() -> float:
    """Return the seconds between two heartbeats, from the environment or the default."""
    given = os.environ.get(HEARTBEAT_VARIABLE, "")
    with suppress(ValueError):
        if (seconds := float(given or HEARTBEAT_SECONDS)) > 0:
            return seconds
    raise BadSetting(HEARTBEAT_VARIABLE, given, ("a number of seconds above 0",))


def _texts(facts: Facts) -> dict[str, str]:
    """Copy facts that are all text."""
    return {name: str(value) for name, value in facts.items()}


def _case_of(facts: Facts) -> IncidentCase:
    """Copy an open incident."""
    incident: IncidentInWork = facts["incident"]
    return IncidentCase(
        incident=incident.row.model_copy(),
        faults=list(incident.fault_rows),
        decisions=list(incident.decisions),
        phases=incident.rows(),
        diagnoses=[incident.diagnosis_row] if incident.diagnosis_row is not None else [],
    )
