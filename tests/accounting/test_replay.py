"""Another policy is asked what was asked then: what differs, what that would have won, and what is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import select

from holdfast.accounting.replay import NOT_KEPT, replay
from holdfast.detectors.codec import packed
from holdfast.errors import UnknownOptionValue
from holdfast.history import DecidedCase, DecisionRecord, Generation, History, Incident, Phase
from holdfast.history.models import StragglerDecision
from holdfast.policies.recovery.case_codec import VERSION, act_of, to_record
from holdfast.policies.recovery.escalation import POLICIES, Case, RecoveryAction, decide
from holdfast.policies.recovery.policy import NAMED
from holdfast.policies.slowness import StragglerCase
from tests.history.rows import a_job, an_incident
from tests.mentions import mentions
from tests.policies.cases import a_case
from tests.report import filled


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """Give a history with a job of four ranks."""
    opened = filled.open_history(tmp_path)
    write(opened, a_job("gpt", id="j", at=0.0), Generation(job_id="j", number=1, at=0.0, world_size=4, ranks={"a": [0, 1], "b": [2, 3]}))
    yield opened
    opened.close()


def write(history: History, *rows: Any) -> None:
    """Write rows."""
    with history.session() as session:
        session.add_all(rows)


def decided(number: int, case: Case, policy: str = "balanced", seconds: float | None = None, **more: Any) -> list[Any]:
    """Return an incident in which *policy* decided *case*, and a recovery that took so many seconds, if it came to one."""
    outcome = "recovered" if seconds is not None else None
    rows, incident = list[Any](), more.pop("incident", None)
    answer = decide(POLICIES[policy], case)
    if incident is None:
        incident = an_incident("j", number, action=str(answer.decision.action), outcome=outcome, kind=case.diagnosis.root.kind)
        rows.append(incident)
    made = DecisionRecord(
        job_id="j",
        incident_id=incident.id,
        at=float(number),
        action=answer.decision.action,
        rule=answer.rule,
        reason=answer.decision.reason,
        act=act_of(answer.decision),
    )
    rows += [made, *([DecidedCase(decision_id=made.id, job_id="j", record=to_record(case))] if more.get("kept", True) else [])]
    if seconds is not None:
        parts = {"detect": seconds / 4, "load": seconds / 2, "rollback": seconds / 4}
        rows += [
            Phase(job_id="j", incident_id=incident.id, position=place, name=name, seconds=spent)
            for place, (name, spent) in enumerate(parts.items())
        ]
    return rows


KILLED = a_case("worker-sigkill", "a", spares=("d",))
"""Balanced restarts in place; aggressive lets the spare take the node's place."""
LOST = a_case("node-lost", "a", lost=("a",), spares=("d",))
"""Every policy takes the spare."""
SHORT = a_case("node-lost", "a", lost=("a",), least=2)
"""Balanced shrinks; patient waits."""


def test_the_same_policy_would_have_done_the_same(history: History) -> None:
    """Whatever it was asked."""
    for number, case in enumerate((KILLED, LOST, SHORT), 1):
        write(history, *decided(number, case, seconds=8.0))
    found = replay(history, "balanced")
    assert (found.incidents, found.decisions, found.same, found.differences, found.saved) == (3, 3, 3, [], 0.0)


def test_another_policy_is_priced_by_what_recoveries_of_its_kind_took(history: History) -> None:
    """The median of three replacements is 6 s; two restarts that took 8 and 2 s would have cost 2 s less, and 4 s more, of four ranks."""
    write(history, *decided(1, KILLED, seconds=8.0), *decided(2, KILLED, seconds=2.0))
    for number, seconds in ((3, 5.0), (4, 6.0), (5, 60.0)):
        write(history, *decided(number, LOST, seconds=seconds))
    found = replay(history, "aggressive")
    assert found.same == 3
    assert [(one.incident, one.decided, one.would.action) for one in found.differences] == [
        (number, "restart-workers", RecoveryAction.REPLACE_NODE) for number in (1, 2)
    ]
    assert [one.hours for one in found.differences] == [pytest.approx(2 * 4 / 3600), pytest.approx(-4 * 4 / 3600)]
    assert found.saved == pytest.approx(-2 * 4 / 3600)
    assert found.costs == {"restart-workers": (5.0, 2), "replace-node": (6.0, 3)}


@pytest.mark.parametrize(
    ("rows", "policy", "why"),
    [
        (decided(1, KILLED, seconds=8.0), "aggressive", "no recovery by replace-node is recorded"),
        ([*decided(1, KILLED), *decided(2, LOST, seconds=6.0)], "aggressive", "the incident is open"),
        (decided(1, a_case("worker-sigkill", "a", tried=(RecoveryAction.RESTART_WORKERS,)), seconds=8.0), "aggressive", ""),
    ],
    ids=["never measured", "open", "no difference"],
)
def test_an_unknown_price_is_not_invented(rows: list[Any], policy: str, why: str, history: History) -> None:
    """The difference is shown, with the reason why it has no price."""
    write(history, *rows)
    assert [(one.hours, one.why_not) for one in replay(history, policy).differences] == ([(None, why)] if why else [])


def test_an_end_is_not_weighed_against_a_recovery(history: History) -> None:
    """One of the jobs is over: there is no time to compare."""
    write(history, *decided(1, KILLED, seconds=8.0), *decided(2, LOST, seconds=6.0))
    with history.session() as session:
        made = session.exec(select(DecisionRecord).where(DecisionRecord.at == 1.0)).one()
        made.action, made.act = "fail", {}
    (one,) = replay(history, "balanced").differences
    assert (one.decided, one.would.action, one.hours) == ("fail", RecoveryAction.RESTART_WORKERS, None)
    assert "ends the job" in one.why_not


def test_after_a_difference_the_rest_of_the_incident_is_not_asked(history: History) -> None:
    """It had never come to that."""
    first = decided(1, KILLED)
    incident = first[0]
    assert isinstance(incident, Incident)
    write(
        history,
        *first,
        *decided(2, a_case("worker-sigkill", "a", tried=(RecoveryAction.RESTART_WORKERS,), spares=("d",)), incident=incident),
    )
    found = replay(history, "aggressive")
    assert (found.decisions, len(found.differences), found.follow, found.same) == (2, 1, 1, 0)


def test_decisions_without_a_case_are_said_to_be_so(history: History) -> None:
    """Those from before cases were kept, and one that this version cannot read."""
    write(history, *decided(1, KILLED, kept=False), *decided(2, LOST, kept=False))
    newer = decided(3, LOST)
    next(row for row in newer if isinstance(row, DecidedCase)).record = {"version": VERSION + 1}
    write(history, *newer)
    found = replay(history, "aggressive")
    assert (found.decisions, found.same, found.differences) == (3, 0, [])
    assert found.unreadable[NOT_KEPT] == 2
    assert sum(found.unreadable.values()) == 3


def test_only_what_was_asked_for_is_replayed(history: History) -> None:
    """Since a time, or of one job; prices stand on the whole history."""
    write(history, *decided(1, KILLED, seconds=8.0), *decided(5, KILLED, seconds=8.0), *decided(6, LOST, seconds=6.0))
    other = a_job("other", id="k", at=0.0)
    write(history, other)
    assert replay(history, "aggressive", since=4.0).decisions == 2
    assert replay(history, "aggressive", job=other).decisions == 0
    assert replay(history, "aggressive", since=5.5).costs["restart-workers"].n == 2


def test_an_unknown_policy_is_refused_with_those_there_are(history: History) -> None:
    """By name; the sentence has the choice."""
    with pytest.raises(UnknownOptionValue, match="patient, balanced, aggressive"):
        replay(history, "bold")


def test_what_was_decided_about_slow_ranks_is_asked_again(history: History) -> None:
    """A move that pays for one policy does not for a more patient one; a record that nobody can read is said to be one."""
    slow = StragglerCase(now=5.0, kind="straggler-gpu", rank=1, node="a", step=0.4, lost=0.1, remaining=2_000, spares=("d",), pauses=(0.5,))
    weighed = NAMED["balanced"].stragglers(slow)
    facts: dict[str, Any] = {"job_id": "j", "kind": slow.kind, "rank": 1, "node": "a", "policy": "balanced", "reason": weighed.reason}
    write(
        history,
        StragglerDecision(at=5.0, act=weighed.act, record=packed(slow), **facts),
        StragglerDecision(at=6.0, act="move", record={}, **facts),
    )
    same = replay(history, "balanced")
    assert (same.straggler_decisions, same.slow, list(same.unreadable.values())) == (2, [], [1])
    (other,) = replay(history, "patient").slow
    assert (other.decided, other.would, other.rank, other.job) == ("move", "stay", 1, "gpt")
    assert mentions(other.reason, "migration")
    assert replay(history, "patient", since=5.5).slow == []
