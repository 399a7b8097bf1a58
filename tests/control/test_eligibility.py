"""Nodes that the job may not use: what it found itself counts at once, what the history holds soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.control.nodes.approvals import Approvals
from holdfast.control.nodes.eligibility import NodeEligibility
from holdfast.control.nodes.preflight import Preflight
from holdfast.history import History, approvals, cordons
from holdfast.history.approvals import ISOLATE, KEEP, WITHDRAWN, ApprovalAnswer
from holdfast.history.cordons import CordonTable
from holdfast.history.models import ApprovalRequest, Job
from holdfast.policies.nodes.cordons import OperatorRequest, Owner, Rules
from holdfast.policies.nodes.node_faults import NodeFault
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import cancel_drain, cordon, drain, return_to_service, uncordon
from holdfast.spec import LocalCluster
from holdfast.spec.cluster_settings import Maintenance
from tests.mentions import mentions
from tests.waiting import wait_until

CLUSTER = LocalCluster(name="c", nodes=4)
PLACE = CordonTable(cluster="c", names=CLUSTER.names, rules=Rules())
ANN = Owner(name="ann@desk", person=True)


Begin = Callable[..., tuple[NodeEligibility, list[str]]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Return a maker of eligibilities that follow a history, with their recorded events; all are closed at the end."""
    made: list[NodeEligibility] = []

    def make(history: History, seconds: float = 3600.0, cluster: LocalCluster = CLUSTER) -> tuple[NodeEligibility, list[str]]:
        job_events: list[str] = []
        job = Job(name="gpt", spec={}, cluster={"name": "c"}, directory="", at=0.0)
        asking = Approvals(history, job, seconds, job_events.append, lambda _event, _facts: None)
        made.append(NodeEligibility(cluster, history, lambda: cluster.names, Owner(name="job gpt"), job_events.append, asking))
        asking.begin()
        made[-1].begin()
        return made[-1], job_events

    yield make
    for eligibility in made:
        eligibility.close()
        eligibility.approvals.close(ended=True)


def found(node: str, *, severe: bool = True, reason: str = "gpu-off-bus: Xid 79") -> NodeFault:
    """Return a fault of a node."""
    return NodeFault(node=node, severe=severe, reason=reason, evidence=(reason,), seen=time.time())


def state(history: History, node: str) -> NodeState | None:
    """Return the recorded state of a node; nothing for one without any."""
    known = cordons.nodes(history, PLACE, now=time.time()).get(node)
    return known.state if known else None


def request() -> OperatorRequest:
    """Return a person's request of now."""
    return OperatorRequest(owner=ANN, reason="looked at it", at=time.time())


def test_a_fault_bars_a_node_at_once_and_for_all_jobs_soon(history: History, begin: Begin) -> None:
    """A person returns it to service for all, this job included."""
    eligibility, job_events = begin(history)
    assert eligibility.usable(CLUSTER.names) == CLUSTER.names
    eligibility.record_faults([found("node-1")])
    assert eligibility.usable(CLUSTER.names) == ["node-0", "node-2", "node-3"]
    assert "job gpt" in eligibility.why_ineligible("node-1")
    wait_until(lambda: state(history, "node-1") is NodeState.QUARANTINED, seconds=60)
    wait_until(lambda: "(cordon 1)" in eligibility.why_ineligible("node-1"), seconds=60)
    wait_until(lambda: job_events, seconds=60)
    assert len(job_events) == 1
    assert mentions(job_events[0], "node-1", "healthy -> quarantined", "gpu-off-bus", "Xid 79")
    (left_out,) = eligibility.left_out()
    assert mentions(left_out, "node-1", NodeState.QUARANTINED, "job gpt", "cordon 1")
    assert len(eligibility.news(CLUSTER.names)) == 1
    assert eligibility.news(CLUSTER.names) == [], "reported once"
    cordons.apply(history, PLACE, "node-1", lambda node, _: return_to_service(node, request()), now=time.time())
    wait_until(lambda: eligibility.usable(CLUSTER.names) == CLUSTER.names, seconds=60)


def test_beyond_the_share_a_node_is_left_out_of_this_job_and_an_approval_is_requested(history: History, begin: Begin) -> None:
    """For other jobs it is suspect: of four nodes a program isolates one."""
    eligibility, job_events = begin(history)
    eligibility.record_faults([found("node-1"), found("node-2")])
    wait_until(lambda: state(history, "node-2") is NodeState.SUSPECT, seconds=60)
    wait_until(lambda: any(mentions(one, "node-2", "gpu-off-bus", "Xid 79", 1, 4) for one in job_events), seconds=60)
    other, _ = begin(history)
    assert other.why_ineligible("node-2") == ""
    assert mentions(other.why_suspect("node-2"), NodeState.SUSPECT, "gpu-off-bus", "Xid 79")
    assert eligibility.usable(CLUSTER.names) == ["node-0", "node-3"]
    assert mentions(eligibility.why_ineligible("node-2"), "job gpt")
    cordons.apply(history, PLACE, "node-2", lambda node, _: return_to_service(node, request()), now=time.time())
    wait_until(lambda: not eligibility.why_ineligible("node-2"), seconds=60)


def the_request(history: History) -> ApprovalRequest:
    """Wait for the one open approval request, and return it."""
    wait_until(lambda: approvals.pending_approvals(history), seconds=60)
    (found,) = approvals.pending_approvals(history)
    return found


def test_with_approval_more_than_the_share_is_isolated(history: History, begin: Begin) -> None:
    """Of the two nodes of the request a person picks one; both are quarantined or kept by that answer, and its author is recorded."""
    eligibility, job_events = begin(history)
    eligibility.record_faults([found("node-1")])
    wait_until(lambda: state(history, "node-1") is NodeState.QUARANTINED, seconds=60)
    eligibility.record_faults([found("node-2"), found("node-3")])
    asked = the_request(history)
    assert (asked.about, list(asked.nodes), asked.otherwise, asked.job) == ("share", ["node-2", "node-3"], KEEP, "gpt")
    assert mentions(asked.reason, "node-2", "gpu-off-bus", "Xid 79")
    wait_until(lambda: any(f"`holdfast node approve {asked.number}`" in one for one in job_events), seconds=60)
    assert eligibility.usable(CLUSTER.names) == ["node-0"], "what is asked about is not used meanwhile"
    approvals.answer(
        history, asked.number, ApprovalAnswer(answer=ISOLATE, picked=("node-3",), by="ann@desk", comment="as I saw"), now=time.time()
    )
    wait_until(lambda: state(history, "node-3") is NodeState.QUARANTINED, seconds=60)
    (opened,) = [one for one in cordons.history_of(history, "c", "node-3") if one.ended_at is None]
    assert (opened.owner, opened.person) == ("job gpt", False)
    assert mentions(opened.reason, "gpu-off-bus", "Xid 79", "ann@desk")
    wait_until(lambda: not eligibility.why_ineligible("node-2"), seconds=60)
    assert state(history, "node-2") is NodeState.SUSPECT
    with pytest.raises(approvals.AlreadyAnswered) as late:
        approvals.answer(history, asked.number, ApprovalAnswer(answer=KEEP), now=time.time())
    assert late.value.number == asked.number
    assert mentions(late.value.answer, "isolate node-3", "ann@desk", "as I saw")


def test_without_an_answer_programs_isolate_no_more(history: History, begin: Begin) -> None:
    """For other jobs the node is suspect; this job still does not use it."""
    eligibility, job_events = begin(history, seconds=0.5)
    eligibility.record_faults([found("node-1"), found("node-2")])
    wait_until(lambda: any("nobody answered in time" in one for one in job_events), seconds=60)
    assert state(history, "node-2") is NodeState.SUSPECT
    assert mentions(eligibility.why_ineligible("node-2"), "job gpt")
    (asked,) = approvals.of_job(history, eligibility.approvals.job.id)
    assert (asked.answer, asked.picked, asked.by) == (KEEP, [], "")


def test_a_later_controller_takes_up_an_open_request_and_the_end_of_the_job_withdraws_it(history: History, begin: Begin) -> None:
    """The answer counts though the controller that requested it has died."""
    eligibility, _ = begin(history)
    eligibility.record_faults([found("node-1"), found("node-2")])
    number = the_request(history).number
    eligibility.close()
    eligibility.approvals.close(ended=False)
    assert the_request(history).number == number
    after = Approvals(history, eligibility.approvals.job, 3600.0, print, lambda _event, _facts: None)
    after.begin()
    wait_until(lambda: after.is_open("share"), seconds=60)
    heir = NodeEligibility(CLUSTER, history, lambda: CLUSTER.names, Owner(name="job gpt"), print, after)
    heir.begin()
    approvals.answer(history, number, ApprovalAnswer(answer=ISOLATE, by="ann@desk"), now=time.time())
    wait_until(lambda: state(history, "node-2") is NodeState.QUARANTINED, seconds=60)
    heir.record_faults([found("node-3")])
    again = the_request(history)
    heir.close()
    after.close(ended=True)
    assert [one.answer for one in approvals.of_job(history, after.job.id)] == [ISOLATE, WITHDRAWN]
    assert again.number == number + 1


def test_a_suspect_node_is_used_last(history: History, begin: Begin) -> None:
    """At once, and as long as it is suspect."""
    eligibility, _ = begin(history)
    preflight = Preflight(CLUSTER, history, on=False, why_suspect=eligibility.why_suspect)
    eligibility.record_faults([found("node-0", severe=False)])
    assert preflight.by_preference(CLUSTER.names)[-1] == "node-0"
    wait_until(lambda: state(history, "node-0") is NodeState.SUSPECT, seconds=60)
    wait_until(lambda: not eligibility._queue, seconds=60)
    assert preflight.by_preference(CLUSTER.names)[-1] == "node-0"
    assert mentions(preflight.objection("node-0"), NodeState.SUSPECT, "gpu-off-bus", "Xid 79")


def test_a_node_with_a_window_before_the_end_of_the_job_comes_later_and_an_unhealthy_one_last(history: History, begin: Begin) -> None:
    """Without a walltime the end is unknown, and no window speaks against a node before it begins."""
    now = time.time()
    begins = datetime.fromtimestamp(now + 7200, UTC)
    window = Maintenance(nodes=["node-0"], start=begins, duration=timedelta(hours=1), lead_time=timedelta(minutes=1), reason="new fan")
    cluster = CLUSTER.model_copy(update={"maintenance": [window]})
    eligibility, _ = begin(history, cluster=cluster)
    preflight = Preflight(cluster, history, on=False, why_suspect=eligibility.why_suspect, cut_short=eligibility.cut_short)
    assert preflight.by_preference(cluster.names) == cluster.names
    eligibility.ends = now + 7000
    assert preflight.by_preference(cluster.names) == cluster.names
    eligibility.ends = now + 7300
    eligibility.record_faults([found("node-1", severe=False)])
    assert preflight.by_preference(cluster.names) == ["node-2", "node-3", "node-0", "node-1"]
    assert preflight.objection("node-0").startswith("new fan from ")
    assert mentions(preflight.objection("node-0"), "new fan", "walltime")
    assert (preflight.is_healthy("node-0"), preflight.is_healthy("node-1")) == (True, False)
    assert not eligibility.why_ineligible("node-0")


def test_a_persons_cordon_is_seen_while_a_job_runs(history: History, begin: Begin) -> None:
    """And its end as well."""
    eligibility, _ = begin(history)
    cordons.apply(history, PLACE, "node-3", lambda node, _: cordon(node, request()), now=time.time())
    wait_until(lambda: "cordoned by ann@desk (cordon 1): looked at it" in eligibility.why_ineligible("node-3"), seconds=60)
    cordons.apply(history, PLACE, "node-3", lambda node, _: uncordon(node, request()), now=time.time())
    wait_until(lambda: not eligibility.why_ineligible("node-3"), seconds=60)


def test_an_unreachable_history_changes_nothing_and_is_updated_later(
    history: History, begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller continues with what it knows, follows what it can still read, and logs the outage once, however often it tries."""
    caplog.set_level(logging.INFO, "holdfast")
    eligibility, _ = begin(history, cluster=LocalCluster(name="c", nodes=8))
    real, tries = cordons.apply, list[str]()

    def away(_history: History, _table: CordonTable, node: str, *_: object, **__: object) -> None:
        tries.append(node)
        raise OSError("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.history.cordons.apply", away)
        eligibility.record_faults([found("node-1"), found("node-2", severe=False)])
        real(history, PLACE, "node-3", lambda node, _: cordon(node, request()), now=time.time())
        wait_until(lambda: len(tries) >= 3 and "node-3" not in eligibility.usable(CLUSTER.names), seconds=60)
        assert tries == ["node-1"] * len(tries), "a fault that is not written is not skipped"
        assert eligibility.usable(CLUSTER.names) == ["node-0", "node-2"]
        assert eligibility.why_suspect("node-2")
        assert logged(caplog) == ["eligibility.history-unreachable"]
    wait_until(lambda: (state(history, "node-1"), state(history, "node-2")) == (NodeState.QUARANTINED, NodeState.SUSPECT), seconds=60)
    wait_until(lambda: len(logged(caplog)) > 1, seconds=60)
    assert logged(caplog) == ["eligibility.history-unreachable", "eligibility.history-reachable"]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events about the history's reachability that were logged."""
    return [name for one in caplog.records if (name := str(getattr(one, "event", ""))).startswith("eligibility.history-")]


def test_a_drained_node_is_left_and_a_cordoned_one_is_not(history: History, begin: Begin) -> None:
    """No job gets either; a cancelled drain leaves no trace."""
    eligibility, _ = begin(history)
    now = time.time()
    cordons.apply(history, PLACE, "node-1", lambda node, _: cordon(node, request()), now=now)
    cordons.apply(history, PLACE, "node-2", lambda node, _: drain(node, request(), leave_by=now + 60), now=now)
    wait_until(lambda: eligibility.usable(CLUSTER.names) == ["node-0", "node-3"], seconds=60)
    assert eligibility.drain_of("node-1") is None
    left = eligibility.drain_of("node-2")
    assert left is not None
    assert (left.node, left.by) == ("node-2", now + 60)
    assert mentions(left.reason, "ann@desk")
    cordons.apply(history, PLACE, "node-2", lambda node, _: cancel_drain(node, request()), now=time.time())
    wait_until(lambda: eligibility.drain_of("node-2") is None and not eligibility.why_ineligible("node-2"), seconds=60)


def test_a_node_is_left_before_its_window_and_returns_by_itself(history: History, begin: Begin) -> None:
    """The most urgent drain counts; a notice can be cancelled."""
    begins = datetime.now(tz=UTC) + timedelta(minutes=10)
    soon = Maintenance(nodes=["node-1"], start=begins, duration=timedelta(hours=1), reason="firmware")
    past = Maintenance(nodes=["node-2"], start=begins - timedelta(days=1), duration=timedelta(hours=1))
    later = Maintenance(nodes=["node-3"], start=begins + timedelta(hours=1), duration=timedelta(hours=1))
    cluster = LocalCluster(name="c", nodes=4, maintenance=[soon, past, later])
    eligibility, _ = begin(history, cluster=cluster)
    assert eligibility.usable(cluster.names) == ["node-0", "node-2", "node-3"]
    assert mentions(eligibility.why_ineligible("node-1"), "firmware")
    left = eligibility.drain_of("node-1")
    assert left is not None
    assert left.by == begins.timestamp()
    assert eligibility.drain_of("node-3") is None
    now = time.time()
    assert eligibility.notice("node-1", at=now, by=now + 30, why="preempted")
    assert not eligibility.notice("node-1", at=now, by=now + 30, why="preempted")
    left = eligibility.drain_of("node-1")
    assert left is not None
    assert left.by == now + 30
    eligibility.take_back("node-1")
    left = eligibility.drain_of("node-1")
    assert left is not None
    assert left.by == begins.timestamp()
