"""The bill of a written history: sums that are known, and who is to blame for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.accounting.bill import NO_INCIDENT, bill
from holdfast.accounting.ledger import HOUR, TimeCategory
from holdfast.accounting.losses import losses
from holdfast.history import Checkpoint, Generation, History, Lease, NodeStatusChange, Phase, Snapshots, queries
from holdfast.report.pages.job_history import read_history
from tests.history.rows import a_fault, a_job, a_move, a_step, an_incident
from tests.report import filled

PLACES = {"n0": [0, 1], "n1": [2, 3]}


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """Give an empty history in a file of its own."""
    opened = filled.open_history(tmp_path)
    yield opened
    opened.close()


def write(history: History, *rows: Any) -> None:
    """Write rows."""
    with history.session() as session:
        session.add_all(rows)


def a_generation(job: str, number: int, at: float, **more: Any) -> Generation:
    """Return a generation of four ranks on two nodes."""
    return Generation(**{"job_id": job, "number": number, "at": at, "world_size": 4, "ranks": PLACES, **more})


def recovered(job: str, number: int, begin: float, seconds: float, **fields: Any) -> list[Any]:
    """Return an incident that cost so many seconds, half of them in finding it; with its root on n0."""
    attributed_to, recommended_action = fields.pop("attributed_to", "process"), fields.pop("recommended_action", "restart")
    known = {"fault_at": begin, "downtime_s": seconds, "closed_at": begin + seconds, "outcome": "recovered", "generation_after": number + 1}
    one = an_incident(job, number, **{**known, "kind": "worker-sigkill", **fields})
    phases = [("detect", seconds / 2), ("load", seconds / 2), ("rollback", 77.0)]
    root = a_fault(
        job,
        incident_id=one.id,
        at=begin,
        node="n0",
        root=True,
        attributed_to=attributed_to,
        recommended_action=recommended_action,
        kind=one.kind,
    )
    rows = [Phase(job_id=job, incident_id=one.id, position=place, name=name, seconds=spent) for place, (name, spent) in enumerate(phases)]
    return [one, root, a_fault(job, incident_id=one.id, at=begin, node="n1"), *rows]


def trained(job: str, generation: int, first: int, last: int, begin: float) -> list[Any]:
    """Return the steps from *first* to *last*, a second each."""
    return [a_step(job, step, generation=generation, at=begin + step - first + 1) for step in range(first, last + 1)]


def hours(seconds: float) -> Any:
    """Return *seconds* of devices as the bill has them."""
    return pytest.approx(seconds / 3600, rel=1e-12)


def test_an_empty_history_costs_nothing(history: History) -> None:
    """Zeros and blanks, no error; and no lonely numbers."""
    found = bill(history)
    assert (found.total_hours, found.ettr, found.phases, found.losses, found.bad_nodes) == (0.0, None, {}, [], [])
    assert (found.mttf.seconds, found.mttf.n, found.mttr.seconds) == (None, 0, None)


def test_the_bill_of_a_job_adds_up_to_what_it_held(history: History) -> None:
    """Four ranks for 40 seconds, two idle places for 35: by use, by phase, by fault, by node, and by job."""
    write(history, a_job("gpt", id="j", at=0.0, spec={"nproc_per_node": 2}), a_move("j", "COMPLETED", at=40.0))
    write(
        history,
        *(NodeStatusChange(cluster="c", node=node, at=5.0, status="healthy", reason="", job_id="j") for node in ("n0", "n1", "n2")),
    )
    write(history, a_generation("j", 1, 5.0), a_generation("j", 2, 18.0, resumed_step=6), a_generation("j", 3, 32.0, resumed_step=12))
    write(history, *trained("j", 1, 1, 8, 8.0), *trained("j", 2, 7, 12, 19.0), *trained("j", 3, 13, 18, 33.0))
    write(
        history,
        *recovered("j", 1, 16.0, 4.0),
        *recovered("j", 2, 25.0, 9.0, kind="gpu-off-bus", attributed_to="gpu", recommended_action="evict"),
    )
    found = bill(history, queries.newest_job(history, "gpt"))
    assert found.total_hours == hours(4 * 40 + 2 * 35)
    assert found.hours(TimeCategory.PRODUCTIVE) == hours(4 * (6 + 6 + 6))
    assert found.hours(TimeCategory.SPARE) == hours(2 * 35)
    assert found.phases == {
        "detect": hours(4 * (2 + 4.5)),
        "load": hours(4 * (1 + 3.5)),  # the first new step of each recovery is a step
        "rollback": hours(4 * 2),
    }
    assert sum(found.hours(use) for use in TimeCategory) == pytest.approx(found.total_hours)
    assert sum(amount.devices for amount in found.ledger.booked.values()) == round(found.total_hours * HOUR)
    assert [(one.kind, one.incidents) for one in found.losses] == [("gpu-off-bus", 1), ("worker-sigkill", 1)]
    assert sum(one.hours for one in found.losses) == pytest.approx(found.hours(TimeCategory.LOST))
    bad_node, other = found.bad_nodes
    assert (bad_node.node, bad_node.faults, bad_node.incidents, bad_node.attributed, bad_node.worst, bad_node.to_quarantine) == (
        "n0",
        2,
        2,
        1,
        "gpu-off-bus",
        True,
    )
    assert bad_node.hours == pytest.approx(found.hours(TimeCategory.LOST))
    assert (other.node, other.faults, other.incidents, other.hours, other.to_quarantine) == ("n1", 2, 0, 0.0, False)
    assert found.ettr == pytest.approx(18 / 40)
    assert (found.mttr.seconds, found.mttr.n) == (6.5, 2)
    assert found.mttf.seconds == pytest.approx((40 - 11) / 2)


def test_ranks_that_are_missing_are_put_down_to_the_fault_that_took_them_and_are_in_no_sum(history: History) -> None:
    """Four of six ranks for 30 s, then five for 20 s: those that come back first are those that were lost last."""
    wide = {"n0": [0, 1], "n1": [2, 3], "n2": [4, 5]}
    write(history, a_job("gpt", id="j", at=0.0, spec={"nnodes": 3, "nproc_per_node": 2}), a_move("j", "COMPLETED", at=100.0))
    write(
        history,
        a_generation("j", 1, 0.0, world_size=6, ranks=wide, first_step_at=1.0),
        a_generation("j", 2, 20.0, world_size=5, ranks={"n0": [0, 1], "n1": [2, 3], "n2": [4]}, resumed_step=10),
        a_generation("j", 3, 30.0, world_size=4, ranks=PLACES, resumed_step=20),
        a_generation("j", 4, 60.0, world_size=5, ranks={"n0": [0, 1], "n1": [2, 3], "n2": [4]}, resumed_step=50),
        a_generation("j", 5, 80.0, world_size=6, ranks=wide, resumed_step=70),
        *recovered("j", 1, 18.0, 2.0, kind="worker-sigkill"),
        *recovered("j", 2, 28.0, 2.0, kind="node-lost"),
    )
    found = bill(history)
    without = {one.kind: one.lost_capacity for one in found.losses}
    assert without == {"worker-sigkill": hours(60.0), "node-lost": hours(30.0)}
    assert found.lost_capacity == hours(90.0)
    held = 6 * 20 + 5 * 10 + 4 * 30 + 5 * 20 + 6 * 20
    assert found.total_hours == hours(held + 30.0), "and the idle place on n2 while it holds one rank"
    assert {one.kind: one.lost_capacity for one in bill(history, since=70.0).losses if one.lost_capacity} == {"worker-sigkill": hours(10.0)}


def test_one_failure_gives_no_mean(history: History) -> None:
    """Their number is shown, and no mean."""
    write(history, a_job(id="j", at=0.0), a_move("j", "COMPLETED", at=40.0), a_generation("j", 1, 0.0), *recovered("j", 1, 16.0, 4.0))
    found = bill(history)
    assert (found.mttf.seconds, found.mttf.n, found.mttr.seconds, found.mttr.n) == (None, 1, None, 1)
    assert found.ettr is None


def test_a_users_error_is_no_failure_of_the_fleet_and_blames_no_node(history: History) -> None:
    """What it cost is shown all the same; an incident that passed is no failure either."""
    write(history, a_job(id="j", at=0.0), a_move("j", "FAILED", at=40.0), a_generation("j", 1, 0.0))
    write(history, *recovered("j", 1, 10.0, 4.0), *recovered("j", 2, 20.0, 4.0))
    write(history, *recovered("j", 3, 26.0, 4.0, outcome="passed", downtime_s=None))
    write(history, *recovered("j", 4, 32.0, 8.0, kind="user-error", recommended_action="user-error", outcome="failed", downtime_s=None))
    found = bill(history)
    assert (found.mttf.n, found.mttr.n, found.user_errors) == (2, 2, 1)
    assert next(one for one in found.losses if one.kind == "user-error").hours == hours(4 * 8)
    assert next(one for one in found.bad_nodes if one.node == "n0").incidents == 3


def test_a_node_that_is_blamed_often_is_a_case_for_quarantine(history: History) -> None:
    """Three times, whatever was asked for; twice is not often."""
    write(history, a_job(id="j", at=0.0), a_move("j", "COMPLETED", at=90.0), a_generation("j", 1, 0.0))
    write(history, *recovered("j", 1, 10.0, 4.0, attributed_to="node"), *recovered("j", 2, 20.0, 4.0, attributed_to="gpu"))
    assert not bill(history).bad_nodes[0].to_quarantine
    write(history, *recovered("j", 3, 30.0, 4.0, attributed_to="node"))
    assert bill(history).bad_nodes[0].to_quarantine


def test_a_node_that_merely_ended_is_none(history: History) -> None:
    """Power and maintenance are held against no node, however often."""
    write(history, a_job(id="j", at=0.0), a_move("j", "COMPLETED", at=90.0), a_generation("j", 1, 0.0))
    for number in range(1, 5):
        write(history, *recovered("j", number, 10.0 * number, 4.0, kind="node-lost", recommended_action="evict", attributed_to="node"))
    bad_node = bill(history).bad_nodes[0]
    assert (bad_node.node, bad_node.attributed, bad_node.to_quarantine) == ("n0", 4, False)


def test_jobs_are_added_up_and_live_ones_count_until_now(history: History) -> None:
    """One ended, one has a controller now, one lost its flow and counts until its last step; each with what it held."""
    for name, end in (("ended", 10.0), ("live", None), ("left", None)):
        write(history, a_job(name, id=name, at=0.0), a_generation(name, 1, 0.0), *trained(name, 1, 1, 8, 0.0))
        write(history, *([a_move(name, "COMPLETED", at=end)] if end else [a_move(name, "RUNNING", at=1.0)]))
    write(history, Lease(job_id="live", epoch=1, holder="a flow", host="h", pid=1, pid_started=0.0, expires_at=101.0))
    found = bill(history, now=20.0)
    assert {one.job.id: one.ledger.sum().hours for one in found.jobs} == {"ended": hours(40), "live": hours(80), "left": hours(32)}
    assert found.total_hours == hours(152)
    assert found.ettr == pytest.approx(24 / 38)
    assert [one.job.id for one in bill(history, now=20.0, since=8.0).jobs] == ["live", "ended"]


def test_an_open_incident_follows_from_the_jobs_states(history: History) -> None:
    """Its phases are written when it closes; until then the moves say what it waits for."""
    write(history, a_job(id="j", at=0.0), a_generation("j", 1, 0.0), *trained("j", 1, 1, 10, 0.0))
    write(history, an_incident("j", 1, fault_at=10.0, detected_at=11.0), Lease(**LEASE))
    for at, state in ((11.0, "DIAGNOSING"), (12.0, "ISOLATING"), (14.0, "WAITING")):
        write(history, a_move("j", state, at=at))
    assert bill(history, now=20.0).phases == {"wait": hours(24), "isolate": hours(8), "detect": hours(4), "diagnose": hours(4)}


LEASE: Any = {"job_id": "j", "epoch": 1, "holder": "a flow", "host": "h", "pid": 1, "pid_started": 0.0, "expires_at": 1e12}


def test_saves_and_snapshots_are_separate(history: History) -> None:
    """Of two ranks' ten steps snapshots took a tenth; one save stood for a second, a broken one counts for nothing."""
    write(history, a_job(id="j", at=0.0), a_move("j", "COMPLETED", at=12.0), a_generation("j", 1, 0.0, world_size=2, ranks={"n0": [0, 1]}))
    write(history, *trained("j", 1, 1, 5, 0.0), *trained("j", 1, 6, 10, 7.0))
    write(history, Snapshots(job_id="j", generation=1, at=9.0, cost_s=2.0, trained_s=20.0))
    for problem in (None, "checkpoint-corrupt"):
        write(history, Checkpoint(job_id="j", at=6.5, step=5, generation=1, path="/c", seconds=1.0, problem=problem))
    found = bill(history)
    by_use = {use: found.hours(use) for use in TimeCategory if found.hours(use)}
    assert by_use == {
        TimeCategory.PRODUCTIVE: hours(18),
        TimeCategory.SNAPSHOTS: hours(2),
        TimeCategory.CHECKPOINTS: hours(2),
        TimeCategory.BETWEEN_STEPS: hours(2),
    }


def test_nodes_are_counted_where_ranks_are_not_known(history: History) -> None:
    """Of all jobs then: hours of one kind are not added to hours of another."""
    write(history, a_job(id="j", at=0.0), a_move("j", "COMPLETED", at=10.0), a_generation("j", 1, 0.0, world_size=0))
    write(history, a_job(id="k", at=0.0), a_move("k", "COMPLETED", at=10.0), a_generation("k", 1, 0.0))
    found = bill(history)
    assert (found.unit.name, found.total_hours) == ("node-hours", hours(40))
    assert bill(history, queries.jobs(history)[0]).unit.name == "compute-hours"


def test_a_job_that_never_had_nodes_held_what_it_asked_for(history: History) -> None:
    """A job file of another version, or none, stands for one rank."""
    specs: dict[str, dict[str, Any]] = {"j": {"nnodes": 2, "nproc_per_node": 4}, "k": {"nnodes": "many"}, "l": {}}
    for name, spec in specs.items():
        write(history, a_job(id=name, at=0.0, spec=spec), a_move(name, "FAILED", at=10.0))
    found = {job.id: bill(history, job).hours(TimeCategory.STARTUP) for job in queries.jobs(history)}
    assert found == {"j": hours(80), "k": hours(10), "l": hours(10)}


def test_steps_thrown_away_for_no_known_reason_are_named_so(history: History) -> None:
    """A job that was reattached may have gone back."""
    write(history, a_job(id="j", at=0.0), a_move("j", "COMPLETED", at=10.0), a_generation("j", 1, 0.0), a_generation("j", 2, 5.0))
    write(history, *trained("j", 1, 1, 4, 0.0), *trained("j", 2, 3, 6, 5.0))
    assert [(one.kind, one.incidents, one.hours) for one in bill(history).losses] == [(NO_INCIDENT, 0, hours(8))]


def test_the_bill_agrees_with_what_the_report_says_of_the_job(history: History) -> None:
    """The same history by another way: from the rows of incidents and steps themselves."""
    job = filled.three_incidents(history)
    found, steps, incidents = bill(history, job), queries.steps(history, job.id), queries.incidents(history, job.id)
    newest = {one.step: one.seconds for one in steps}  # by generation: the last one counts
    assert found.hours(TimeCategory.PRODUCTIVE) + found.hours(TimeCategory.SNAPSHOTS) == pytest.approx(
        4 * sum(newest.values()) / 3600, rel=0.005
    )
    assert found.costs.rollback_s == pytest.approx(sum(one.seconds for one in steps) - sum(newest.values()), rel=0.005)
    assert found.costs.steps_lost == len(steps) - len(newest)
    assert found.costs.downtime_s == pytest.approx(sum(one.downtime_s or 0.0 for one in incidents))
    assert found.mttr.seconds == pytest.approx(found.costs.downtime_s / 3)
    assert found.costs == losses(history, job) == read_history(history, job, now=job.at).losses
