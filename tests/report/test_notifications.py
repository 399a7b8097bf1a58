"""One notification an incident as a rule, news of the same thing under the same id, and never a storm."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.history.models import ApprovalRequest, DecisionRecord, FaultRecord, Incident
from holdfast.report.case import IncidentCase
from holdfast.report.notifications import (
    MOST,
    PATIENCE,
    SETTLE,
    WINDOW,
    Notification,
    NotificationLevel,
    Notifications,
    NotificationSource,
    of_nodes,
)
from holdfast.report.text import incident_text
from tests.mentions import mentions

LAB = NotificationSource(
    job="gpt", cluster="lab", host="head", link="http://ui/runs/flow-run/1", incident_page=lambda number: f"http://ui/{number}"
)
TRACEBACK = "RuntimeError: sizes do not fit in /home/ann/a/very/long/path/model.py:12"


def an_incident(number: int = 1, **facts: Any) -> IncidentCase:
    """Return an incident as the history has it: a rank that was killed."""
    known: dict[str, Any] = {
        "reason": "ended by signal 9",
        "id": f"i{number}",
        "kind": "worker-sigkill",
        "target": "rank 1 on node-1",
        "fault_at": 50_531.0,
        "detected_at": 50_531.1,
    }
    incident = Incident(job_id="j", number=number, generation_before=1, **{**known, **facts})
    fault = FaultRecord(
        job_id="j", at=0.0, kind=incident.kind, recommended_action="restart", target=incident.target, attributed_to="process",
        generation=1,
        root=True, node="node-1", evidence={"quote": TRACEBACK},
    )  # fmt: skip
    act = {"seats": [{"rank": 1, "node": "node-2", "hot_spare": 0}]}
    decision = DecisionRecord(
        job_id="j", incident_id=incident.id, at=0.0, action="replace-ranks", rule="ReplaceRanks", reason="it can", act=act
    )
    return IncidentCase(incident=incident, faults=[fault], decisions=[decision], phases=[])


def ended(number: int = 1, outcome: str = "recovered", **facts: Any) -> IncidentCase:
    """Return one that is over."""
    return an_incident(number, outcome=outcome, action="replace-ranks", downtime_s=0.26, steps_lost=0, **facts)


def test_what_is_over_soon_is_one_notification() -> None:
    """It says what happened, what was done, what it cost and what to do, where and by whom, with links and without paths."""
    desk = Notifications(LAB)
    assert desk.opened(an_incident(), 0.0) == []
    desk.closed(ended(), 1.0)
    assert desk.tick(1.0) == []
    (notification,) = desk.tick(1.0 + SETTLE)
    assert (notification.id, notification.state, notification.level) == ("incident i1", "over", NotificationLevel.INFO)
    assert mentions(notification.subject, "[lab/gpt]", "incident 1", "rank 1", "node-1", "SIGKILL", "260 ms")
    what, seen, action, everything, where = notification.text.split("\n\n")
    assert mentions(what, "14:02:11 UTC", "rank 1", "node-1", "SIGKILL", "hot spare", "node-2", "260 ms", "0 steps")
    assert mentions(seen, "RuntimeError: sizes do not fit in model.py:12")
    assert mentions(action, incident_text.NOTHING_TO_DO)
    assert mentions(everything, "`holdfast incidents show i1`")
    assert mentions(where, "gpt", "lab", "head", LAB.link, "http://ui/1")
    assert (notification.job, notification.cluster, notification.host, notification.nodes, notification.link) == (
        "gpt",
        "lab",
        "head",
        ("node-1",),
        LAB.link,
    )
    assert desk.tick(1e6) == []


def test_a_lasting_incident_is_reported_once_and_its_end_replaces_that() -> None:
    """Whatever was tried in between; who was asked to look learns that nobody need look any more."""
    desk = Notifications(LAB)
    desk.opened(an_incident(), 0.0)
    desk.moved("WAITING", "no node is free")
    (notification,) = desk.tick(PATIENCE)
    assert (notification.state, notification.level) == ("open", NotificationLevel.ATTENTION)
    assert "Now: no node is free" in notification.text
    assert desk.tick(1e5) == []
    desk.closed(ended(), 2e5)
    (over,) = desk.tick(2e5 + SETTLE)
    assert (over.id, over.state, over.level) == (notification.id, "over", NotificationLevel.RESOLVED)


def test_a_job_that_fails_by_an_incident_is_one_notification() -> None:
    """However the news of both come in."""
    desk = Notifications(LAB)
    desk.opened(an_incident(), 0.0)
    desk.moved("FAILED", "no action is left")
    desk.closed(ended(outcome="failed", reason="the same again"), 1.0)
    assert desk.tick(PATIENCE) == []
    (notification,) = desk.last(PATIENCE)
    assert (notification.id, notification.state, notification.level) == ("incident i1", "ended", NotificationLevel.ATTENTION)
    assert mentions(notification.subject, "[lab/gpt]", "failed", "rank 1", "node-1", "SIGKILL", "incident 1")
    assert "Why: the same again" in notification.text
    assert "`holdfast run gpt.yaml`" in notification.text


def test_the_end_of_a_job_is_sent_and_needs_a_person_only_when_it_failed() -> None:
    """An incident just before is a notification of its own where it recovered."""
    for state, level in (
        ("COMPLETED", NotificationLevel.INFO),
        ("CANCELLED", NotificationLevel.INFO),
        ("FAILED", NotificationLevel.ATTENTION),
    ):
        desk = Notifications(LAB)
        desk.opened(an_incident(), 0.0)
        desk.closed(ended(), 1.0)
        desk.moved(state, "so")
        incident, last = desk.last(1.0)
        assert (incident.state, last.state, last.level) == ("over", "ended", level)
        assert last.subject == f"[lab/gpt] {state.lower()}"


def test_a_quarantine_belongs_to_its_incident_and_needs_a_person() -> None:
    """Whether it comes before or just after the recovery; one without an incident is reported by itself."""
    for late in (False, True):
        desk = Notifications(LAB)
        desk.opened(an_incident(), 0.0)
        if not late:
            desk.quarantined("node-1", "Xid 79")
        desk.closed(ended(), 1.0)
        if late:
            desk.quarantined("node-1", "Xid 79")
        (notification,) = desk.tick(1.0 + SETTLE)
        assert notification.level is NotificationLevel.ATTENTION
        assert notification.subject.endswith("recovered in 260 ms; node-1 quarantined")
        assert "Action: node-1 is quarantined: Xid 79." in notification.text
        assert desk.tick(1e6) == []
    desk = Notifications(LAB)
    desk.quarantined("node-3", "suspect too often")
    (notification,) = desk.tick(0.0)
    assert (notification.level, notification.subject, notification.nodes) == (
        NotificationLevel.ATTENTION,
        "[lab/gpt] node-3 quarantined",
        ("node-3",),
    )


def test_a_question_is_sent_at_once_and_so_is_its_answer() -> None:
    """With how to answer."""
    desk = Notifications(LAB)
    question = ApprovalRequest(
        number=7, cluster="c", job_id="j", job="gpt", about="share", nodes={"n1": {}, "n2": {}}, reason="may they go?", otherwise="keep",
        at=0.0, until=60.0,
    )  # fmt: skip
    (notification,) = desk.asked(question, "`holdfast node approve 7`")
    assert notification.level is NotificationLevel.ATTENTION
    assert mentions(notification.subject, "[lab/gpt]", "approval 7", "n1, n2")
    assert "`holdfast node approve 7`" in notification.text
    (answered,) = desk.answered(question, "keep n1, n2 by ann")
    assert (answered.id, answered.level) == (notification.id, NotificationLevel.RESOLVED)
    assert answered.text.startswith("Answered: keep n1, n2 by ann")


def test_many_nodes_share_one_notification() -> None:
    """A switch that fails is one thing; what needs nobody is left out."""
    changes = {f"n{number}": ("unreachable", "no answer") for number in range(30)} | {"n99": ("healthy", "passed")}
    notification = of_nodes("lab", changes, host="head", link="http://ui/1")
    assert notification is not None
    assert (notification.level, notification.cluster, len(notification.nodes)) == (NotificationLevel.ATTENTION, "lab", 30)
    assert notification.subject == "[lab] n0, n1, n2, n3, n4 and 25 more unreachable"
    assert "and 10 more" in notification.text
    assert of_nodes("lab", {"n99": ("healthy", "passed")}, host="head", link="") is None


@given(st.lists(st.floats(SETTLE + 0.1, 400.0), max_size=60))
def test_no_storm_and_nothing_lost(gaps: list[float]) -> None:
    """However many incidents come and go, few notifications are sent in any window, and every incident is in one."""
    desk, now, sent = Notifications(LAB), 0.0, list[tuple[float, Notification]]()
    for number, gap in enumerate(gaps, 1):
        sent += [(now, one) for one in desk.opened(an_incident(number), now)]
        desk.closed(ended(number), now)
        now += gap
        sent += [(now, one) for one in desk.tick(now)]
    desk.moved("COMPLETED", "done")
    sent += [(now, one) for one in desk.last(now)]
    assert sent[-1][1].state == "ended"
    news = sent[:-1]
    for at, _ in news[:-1]:
        assert sum(at <= other < at + WINDOW for other, _ in news[:-1]) <= MOST + 1
    words = "\n".join(one.subject + "\n" + one.text for _, one in news)
    assert all(f"incident {number}: rank 1 on node-1" in words for number in range(1, len(gaps) + 1))
