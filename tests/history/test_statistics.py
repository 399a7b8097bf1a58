"""What the history says was measured: of the fleet, and of a job's own work."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from holdfast.history import Checkpoint, Generation, History, Lease, Phase, statistics
from tests.history.rows import a_fault, a_job, a_move, a_step, an_incident

HOUR = 3600.0


def write(history: History, *rows: Any) -> None:
    """Write rows."""
    with history.session() as session:
        session.add_all(rows)


def a_generation(job: str, number: int, begin: float, end: float | None, nodes: int) -> Generation:
    """Return a generation that lasted from *begin* to *end*, in hours."""
    ranks = {f"n{node}": [node] for node in range(nodes)}
    return Generation(
        job_id=job, number=number, at=begin * HOUR, ended_at=None if end is None else end * HOUR, world_size=nodes, ranks=ranks
    )


def saved(job: str, step: int, seconds: float | None, **more: Any) -> Checkpoint:
    """Return a checkpoint."""
    return Checkpoint(**{"job_id": job, "at": float(step), "step": step, "generation": 1, "path": f"/c/{step}", "seconds": seconds, **more})


def recovered(job: str, number: int, action: str, phases: dict[str, float], **fields: Any) -> list[Any]:
    """Return an incident that ended well, with its phases."""
    one = an_incident(job, number, action=action, outcome="recovered", closed_at=2.0, **fields)
    rows = [Phase(job_id=job, incident_id=one.id, position=place, name=name, seconds=phases[name]) for place, name in enumerate(phases)]
    return [one, *rows]


def test_an_empty_history_has_measured_nothing(history: History) -> None:
    """Zeros and blanks, no error."""
    assert statistics.fleet(history) == statistics.FleetStatistics()
    assert statistics.work(history, "nobody") == statistics.StepStatistics()


def test_node_hours_are_those_in_which_nodes_belonged_to_a_generation(history: History) -> None:
    """Of jobs that ended, of one that a controller runs now, and of one whose controller died: that lasts until its newest step."""
    write(history, a_job(id="ended"), a_move("ended", "COMPLETED", at=9 * HOUR))
    write(history, a_generation("ended", 1, 0, 2, 3), a_generation("ended", 2, 2, None, 3), a_generation("ended", 3, 5, None, 2))
    write(history, a_job(id="live"), a_generation("live", 1, 90, None, 4))
    write(history, Lease(job_id="live", epoch=1, holder="a flow", host="h", pid=1, pid_started=0.0, expires_at=101 * HOUR))
    write(history, a_job(id="dead"), a_generation("dead", 1, 10, None, 1), a_generation("dead", 2, 14, None, 5))
    write(history, a_step("dead", 1, at=11 * HOUR), *(a_step("dead", step, generation=2, at=(14 + step) * HOUR) for step in (1, 2)))
    write(history, a_job(id="never"), a_generation("never", 1, 50, None, 8))
    found = statistics.fleet(history, now=100 * HOUR)
    assert found.node_hours == pytest.approx(3 * 2 + 3 * 3 + 4 * 2 + 10 * 4 + 1 * 4 + 5 * 2)
    assert found.jobs == 4


def test_faults_are_the_interruptions_that_were_nobodys_wish_and_not_the_scripts(history: History) -> None:
    """Recovered, failed, or still open; one that passed, a stop, and an error of the user's count for nothing."""
    write(history, *(an_incident("j", number, outcome=outcome) for number, outcome in enumerate(["recovered", "failed", None])))
    write(history, *(an_incident("j", number, outcome=outcome) for number, outcome in ((4, "passed"), (5, "stopped"))))
    mine, echo = an_incident("j", 6, outcome="failed"), an_incident("j", 7, outcome="recovered")
    write(history, mine, a_fault("j", incident_id=mine.id, recommended_action="user-error", root=True))
    write(history, echo, a_fault("j", incident_id=echo.id, recommended_action="user-error"), a_fault("j", recommended_action="record"))
    assert statistics.fleet(history).faults == 4


def test_recoveries_are_counted_by_rung_and_by_whether_they_went_back(history: History) -> None:
    """A replacement of ranks goes back only when no living rank held the state, a restart only when the memory of nodes did not."""
    rows = [
        *recovered("j", 1, "replace-ranks", {}, facts={"source": "live"}),
        *recovered("j", 2, "replace-ranks", {}, facts={"source": "checkpoint"}),
        *recovered("j", 3, "replace-ranks", {}),
        *recovered("k", 1, "restart-workers", {}),
        *recovered("k", 3, "restart-workers", {}, facts={"source": "memory"}),
        an_incident("k", 2, action="replace-node"),
    ]
    write(history, *rows)
    found = statistics.fleet(history)
    assert found.actions == {"replace-ranks": 3, "restart-workers": 2}
    assert list(found.actions) == ["replace-ranks", "restart-workers"]
    assert (found.recoveries, found.back) == (5, 2)


def test_phases_are_medians_over_the_recoveries_that_were_timed(history: History) -> None:
    """One that a recovery did not have took no time in it; the same phase twice in one counts together."""
    write(history, *recovered("j", 1, "restart-workers", {"detect": 1.0, "load": 4.0}))
    write(history, *recovered("j", 2, "restart-workers", {"detect": 3.0, "load": 2.0}))
    write(history, *recovered("k", 1, "replace-ranks", {"detect": 2.0}), *recovered("k", 2, "replace-ranks", {}))
    twice = recovered("k", 3, "replace-node", {"detect": 9.0, "load": 5.0})
    write(history, *twice, Phase(job_id="k", incident_id=twice[0].id, position=7, name="load", seconds=5.0))
    failed = an_incident("k", 4, outcome="failed")
    write(history, failed, Phase(job_id="k", incident_id=failed.id, position=0, name="detect", seconds=99.0))
    assert statistics.fleet(history).phases == {"detect": 2.5, "load": 3.0}


def test_the_work_of_a_job_is_that_of_its_newest_runs(history: History) -> None:
    """Saves that stand and steps, whichever generation made them; another job's and old ones say nothing."""
    write(history, *(a_job("gpt", id=f"run{number}") for number in range(statistics.RUNS + 1)), a_job("other", id="run9"))
    write(history, saved("run0", 1, 50.0), saved("run9", 1, 60.0), a_step("run0", 1, seconds=50.0), a_step("run9", 1, seconds=60.0))
    write(history, saved("run1", 1, 3.0), saved("run5", 1, 1.0), saved("run5", 2, 2.0))
    write(history, saved("run5", 3, 90.0, problem="checkpoint-corrupt"), saved("run5", 4, None))
    write(history, *(a_step("run5", step, seconds=float(step)) for step in (1, 2, 3)), a_step("run4", 1, seconds=9.0))
    found = statistics.work(history, "gpt")
    assert (found.saves, found.save_s) == (3, 2.0)
    assert (found.steps, found.step_s) == (4, 2.5)


def test_saves_written_beside_training_speak_for_themselves(history: History) -> None:
    """The first and the last of a job are written while it stands: they say nothing about those in between."""
    write(history, a_job("gpt", id="r"), saved("r", 1, 9.0), saved("r", 4, 7.0))
    write(history, saved("r", 2, 0.2, overlapped_s=30.0), saved("r", 3, 0.4, overlapped_s=50.0))
    found = statistics.work(history, "gpt")
    assert (found.saves, found.overlapped_s) == (2, 40.0)
    assert found.save_s == pytest.approx(0.3)


def test_the_spacing_of_saves_is_what_the_newest_generation_did(history: History) -> None:
    """Whatever the job file says: a script may have its own mind."""
    write(history, a_job("gpt", id="r"), *(saved("r", step, 1.0) for step in (100, 200)))
    assert statistics.work(history, "gpt").spacing == 100
    write(history, saved("r", 207, 1.0, generation=2))
    assert statistics.work(history, "gpt").spacing == 100
    write(history, *(saved("r", step, 1.0, generation=2) for step in (214, 221, 300)))
    assert statistics.work(history, "gpt").spacing == 7


def test_of_a_long_job_only_the_newest_steps_are_read(history: History) -> None:
    """Ten thousand are there, one thousand come; the fleet's figures read one."""
    write(history, a_job("gpt", id="r"), a_generation("r", 1, 0, None, 1))
    write(history, *(a_step("r", step, seconds=1.0 if step <= 9500 else 3.0) for step in range(1, 10_001)))
    read: list[str] = []
    event.listen(history.engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: read.append(" ".join(statement.split())))
    found = statistics.work(history, "gpt")
    assert (found.steps, found.step_s) == (statistics.STEPS, 2.0)
    assert statistics.fleet(history).node_hours == pytest.approx(10_000 / HOUR)
    of_steps = [statement for statement in read if "FROM step" in statement]
    assert len(of_steps) == 2
    assert all("LIMIT" in statement and "ORDER BY" in statement for statement in of_steps)
