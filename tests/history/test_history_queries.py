"""What readers get: orders, and newest ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import UnknownIncident, UnknownJob
from holdfast.history import Generation, History, JobEvent, JobTransition, NodeStatusChange, Phase, Request, queries
from tests.history.rows import a_decision, a_fault, a_job, a_move, a_step, an_incident


def write(history: History, *rows: Any) -> None:
    """Write rows."""
    with history.session() as session:
        session.add_all(rows)


def test_jobs_come_newest_first(history: History) -> None:
    """And only so many."""
    write(history, *(a_job(name, id=f"{number}") for number, name in enumerate(["a", "b", "a", "c"])))
    assert [job.id for job in queries.jobs(history)] == ["3", "2", "1", "0"]
    assert [job.id for job in queries.jobs(history, "a")] == ["2", "0"]
    assert [job.id for job in queries.jobs(history, limit=2)] == ["3", "2"]
    assert queries.newest_job(history, "a").id == "2"


def test_an_unknown_job_is_answered_with_names_that_come_close(history: History) -> None:
    """Or with the newest ones."""
    write(history, *(a_job(name) for name in ["gpt-small", "gpt-large", "resnet"]))
    with pytest.raises(UnknownJob) as caught:
        queries.newest_job(history, "gpt-smal")
    assert caught.value.known[0] == "gpt-small"
    with pytest.raises(UnknownJob) as caught:
        queries.newest_job(history, "zzzz")
    assert set(caught.value.known) == {"gpt-small", "gpt-large", "resnet"}


@pytest.mark.parametrize(
    ("states", "live"), [([], True), (["LAUNCHING"], True), (["RUNNING", "FAILED"], False), (["FAILED", "SOMETHING"], True)]
)
def test_a_job_is_live_until_its_newest_transition_is_terminal(history: History, states: list[str], live: bool) -> None:  # noqa: FBT001
    """A word that we do not know is never an end."""
    write(history, a_job("gpt", id="j1"))
    for state in states:
        write(history, a_move("j1", state))
    found = queries.live_job(history, "gpt")
    assert (found is not None) == live
    newest = queries.state_of(history, "j1")
    assert (newest.after if newest else None) == (states[-1] if states else None)
    assert [move.after for move in queries.transitions(history, "j1")] == states


def test_a_dead_newer_submission_does_not_hide_a_live_one(history: History) -> None:
    """The newest of that name that has not ended."""
    write(history, a_job("gpt", id="1"), a_job("gpt", id="2"), a_move("2", "CANCELLED"))
    found = queries.live_job(history, "gpt")
    assert found is not None
    assert found.id == "1"
    assert queries.live_job(history, "other") is None


def test_an_incident_is_found_by_number_id_and_beginning(history: History) -> None:
    """A number means the newest job's unless a job is named."""
    write(history, a_job("old", id="1"), a_job("new", id="2"))
    write(
        history,
        an_incident("1", 1, id="aa11"),
        an_incident("1", 2, id="aa22"),
        an_incident("2", 1, id="12ab"),
        an_incident("2", 2, id="34ab"),
    )
    found = {ref: queries.incident(history, ref).id for ref in ("1", 2, "aa11", "AA2", "12", "34a")}
    assert found == {"1": "12ab", 2: "34ab", "aa11": "aa11", "AA2": "aa22", "12": "12ab", "34a": "34ab"}
    assert queries.incident(history, 1, "old").id == "aa11"
    for ref, job in [("aa", None), ("9", None), ("", None), ("%", None), ("_a11", None), ("aa11", "new"), ("²", None), ("3", "old")]:
        with pytest.raises(UnknownIncident):
            queries.incident(history, ref, job)
    with pytest.raises(UnknownJob):
        queries.incident(history, "1", "nobody")


def test_the_open_incident_is_the_one_not_closed(history: History) -> None:
    """There is one or none."""
    write(history, an_incident("1", 1, closed_at=2.0))
    assert queries.open_incident(history, "1") is None
    write(history, an_incident("1", 2), an_incident("2", 1))
    found = queries.open_incident(history, "1")
    assert found is not None
    assert found.number == 2
    assert [one.number for one in queries.incidents(history, "1")] == [1, 2]


def test_faults_decisions_and_phases_are_found_by_job_or_incident(history: History) -> None:
    """In the order they were recorded."""
    write(history, a_fault("1", incident_id="x", kind="a"), a_fault("1", incident_id="y", kind="b"), a_fault("2", kind="c"))
    write(history, a_decision("1", "x", action="a"), a_decision("1", "y", action="b"))
    write(history, *(Phase(job_id="1", incident_id="x", position=-n, name=str(n), seconds=1.0) for n in range(3)))
    assert [fault.kind for fault in queries.faults(history, "1")] == ["a", "b"]
    assert [fault.kind for fault in queries.faults(history, incident_id="y")] == ["b"]
    assert [decision.action for decision in queries.decisions(history, "1")] == ["a", "b"]
    assert [decision.action for decision in queries.decisions(history, incident_id="x")] == ["a"]
    assert [phase.name for phase in queries.phases(history, "x")] == ["2", "1", "0"]
    assert len(queries.phases(history, job_id="1")) == 3


def test_generations_requests_events_and_checkpoints_are_the_jobs_own(history: History) -> None:
    """Another job's are not seen."""
    for job in ("1", "2"):
        write(history, *(Generation(job_id=job, number=n, at=1.0, world_size=2) for n in (2, 1)))
        write(history, JobEvent(job_id=job, at=1.0, text=job))
        write(history, Request(job_id=job, at=1.0, kind="stop", by="me"), Request(job_id=job, at=1.0, kind="old", by="me", handled_at=1.0))
    assert [one.number for one in queries.generations(history, "1")] == [1, 2]
    newest = queries.newest_generation(history, "1")
    assert newest is not None
    assert newest.number == 2
    assert queries.newest_generation(history, "3") is None
    assert [one.text for one in queries.job_events(history, "1")] == ["1"]
    assert [one.kind for one in queries.pending_requests(history, "1")] == ["stop"]
    assert queries.checkpoints(history, "1") == []


def test_the_status_of_a_node_is_its_newest_change(history: History) -> None:
    """One row a node, of that cluster alone."""
    said = [("c", "n0", "healthy"), ("c", "n1", "healthy"), ("c", "n0", "lost"), ("d", "n0", "excluded")]
    for cluster, node, status in said:
        write(history, NodeStatusChange(cluster=cluster, node=node, at=1.0, status=status, reason=""))
    assert {node: move.status for node, move in queries.node_statuses(history, "c").items()} == {"n0": "lost", "n1": "healthy"}


reports = st.dictionaries(st.tuples(st.integers(1, 4), st.integers(1, 8)), st.floats(0.001, 10), max_size=20)


@given(reports)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_curve_has_each_step_once_from_its_newest_generation(history: History, reported: dict[tuple[int, int], float]) -> None:
    """Against the same in Python: curve and last step."""
    with history.session() as session:
        session.add_all(a_step("j", step, generation=generation, seconds=seconds) for (generation, step), seconds in reported.items())
        session.add_all(a_step("other", step, generation=9) for step in range(1, 9))
    try:
        newest = {step: max(g for g, s in reported if s == step) for _, step in reported}
        assert [(one.step, one.generation) for one in queries.curve(history, "j")] == sorted(newest.items())
        last = queries.last_step(history, "j")
        assert ((last.generation, last.step) if last else None) == max(reported, default=None)
        assert [(one.generation, one.step) for one in queries.steps(history, "j")] == sorted(reported)
        assert [one.step for one in queries.steps(history, "j", after=4.0)] == [s for _, s in sorted(reported) if s > 4]
        assert [one.step for one in queries.steps(history, "j", generation=2)] == [s for g, s in sorted(reported) if g == 2]
    finally:
        with history.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM step")


def test_queries_of_many_jobs_find_what_those_of_one_find(history: History) -> None:
    """On both databases; a job that has nothing has nothing, and others are left out."""
    write(history, *(a_job(name, id=name) for name in ("a", "b", "empty", "other")))
    reported = [("a", 1, 7), ("a", 2, 5), ("a", 2, 6), ("b", 1, 3), ("other", 9, 9)]
    write(history, *(a_step(job, step, generation=generation) for job, generation, step in reported))
    for job, after in (("a", "RUNNING"), ("b", "LAUNCHING"), ("a", "RESUMING"), ("other", "RUNNING")):
        write(history, a_move(job, after))
    jobs = ["a", "b", "empty"]
    last = {job: one for job in jobs if (one := queries.last_step(history, job)) is not None}
    assert queries.last_steps(history, jobs) == last
    assert {job: (one.generation, one.step) for job, one in last.items()} == {"a": (2, 6), "b": (1, 3)}
    assert queries.states_of(history, jobs) == {job: queries.state_of(history, job) for job in ("a", "b")}
    assert queries.by_job(history, JobTransition, jobs) == {job: queries.transitions(history, job) for job in jobs}
    times = {"a": last["a"].at - 1.5, "b": last["b"].at}
    assert queries.steps_after(history, times) == {"a": queries.steps(history, "a", after=times["a"])}
    assert not queries.last_steps(history, [])
    assert not queries.states_of(history, [])
    assert not queries.steps_after(history, {})


def test_the_terminal_states_are_those_of_the_policies() -> None:
    """The history may not import the policies; the words must agree."""
    from holdfast.policies import states  # noqa: PLC0415 (only a test may look at both)

    assert {str(state) for state in states.TERMINAL} == queries.TERMINAL
