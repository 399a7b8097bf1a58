"""Accounts are settled, and decisions made again, out of both databases alike."""

from __future__ import annotations

from holdfast.accounting.bill import bill
from holdfast.accounting.ledger import TimeCategory
from holdfast.accounting.replay import replay
from holdfast.history import DecidedCase, DecisionRecord, History, queries
from holdfast.policies.recovery.case_codec import act_of, to_record
from holdfast.policies.recovery.escalation import POLICIES, decide
from tests.policies.cases import a_case
from tests.report import filled


def test_bill_and_replay_read_either_database(history: History) -> None:
    """The same job gives the same numbers, and a case comes back as it was."""
    job = filled.three_incidents(history)
    case = a_case("gpu-off-bus", "a", ("worker-sigkill", "b"), lost=("a",), spares=("d",))
    answer, incident = decide(POLICIES["balanced"], case), queries.incidents(history, job.id)[0]
    row = DecisionRecord(
        job_id=job.id,
        incident_id=incident.id,
        at=1.0,
        action=answer.decision.action,
        rule=answer.rule,
        reason=answer.decision.reason,
        act=act_of(answer.decision),
    )
    with history.session() as session:
        session.add_all([row, DecidedCase(decision_id=row.id, job_id=job.id, record=to_record(case))])
    for found in (bill(history), bill(history, job)):
        assert (round(found.ettr or 0.0, 3), found.mttr.n, len(found.bad_nodes)) == (0.783, 3, 2)
        assert found.ledger.sum().wall == sum(found.ledger.sum(use).wall for use in TimeCategory)
    assert bill(history, since=filled.BEGAN + 30.0).total_hours < bill(history).total_hours
    assert replay(history, "balanced", job=job).same == 1
    assert replay(history, "aggressive").costs.keys() == {"restart-workers", "replace-node"}
