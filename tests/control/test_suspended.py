"""A suspended job waits for whoever resumes it: no standby controller does that by itself, and nobody forgets its past."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.control.backup.standby import BackupPrerequisites
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.leadership import Leadership, StandbyController
from holdfast.control.supervisor.supervise import control_job
from holdfast.history import History, models, queries
from holdfast.policies.states import Event, State
from holdfast.spec import LocalCluster, TrainingJob

SPEC = TrainingJob(name="put-aside", command=["true"], preflight=False)


def suspended(cluster: LocalCluster, flow_run: str = "first") -> str:
    """Have a job suspended before it was launched, by the controller in that flow run; return its id."""
    with control_job(SPEC, cluster, flow_run=FlowRun(id=flow_run)) as run:
        assert isinstance(run, JobController)
        run.move(Event.SUSPEND_ASKED, "suspended in Prefect")
        assert (run.live, run.ended, run.released) == (False, False, True)
        return run.job.id


def test_a_standby_controller_does_not_resume_a_suspended_job(holdfast_home: Path, tmp_path: Path) -> None:
    """But the standby that was suspended itself continues its job when it is resumed."""
    assert holdfast_home.is_dir()
    cluster = LocalCluster(name="c", nodes=1, directory=str(tmp_path / "nodes"))
    job = suspended(cluster, "first")
    own = History.open()
    try:
        other = StandbyController(own, SPEC, BackupPrerequisites(), wanted=cluster, flow_run=FlowRun(id="second"))
        other.prerequisites.prepare(cluster)
        assert other.poll() is None
        same = StandbyController(own, SPEC, BackupPrerequisites(), wanted=cluster, flow_run=FlowRun(id="first"))
        same.prerequisites.prepare(cluster)
        found = same.poll()
        assert isinstance(found, Leadership)
        assert (found.job.id, found.runs_already) == (job, True)
    finally:
        own.close()


def test_whoever_starts_a_suspended_job_again_gets_the_same_job_with_its_past(holdfast_home: Path, tmp_path: Path) -> None:
    """Its next generation has the next number, what it made is known, and it is launched anew."""
    assert holdfast_home.is_dir()
    cluster = LocalCluster(name="c", nodes=1, directory=str(tmp_path / "nodes"))
    job = suspended(cluster)
    history = History.open()
    with history.session() as session:
        session.add(models.Generation(job_id=job, number=4, at=time.time(), world_size=1, ranks={"node-0": [0]}))
        session.add(models.StepRecord(job_id=job, generation=4, step=17, at=time.time(), seconds=0.1))
    with control_job(SPEC, cluster, flow_run=FlowRun(id="second")) as run:
        assert isinstance(run, JobController)
        assert (run.job.id, run.state, run.generations.best, run.generations.newest, run.generations.members) == (
            job,
            State.SUSPENDED,
            17,
            4,
            (),
        )
        run.move(Event.RESUME_ASKED, "resumed")
        assert run.state is State.LAUNCHING
        run.move(Event.STOP_ASKED, "enough")
    assert run.flow_run.predecessor == "first"
    move = queries.state_of(history, job)
    history.close()
    assert move is not None
    assert move.after == "CANCELLED"
