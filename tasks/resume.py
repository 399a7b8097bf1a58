"""Resume: start the workers of the new generation and see them to their first step."""

from __future__ import annotations

import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from detectors.evidence import Overrun, StartTrouble
from holdfast.control import runs
from holdfast.control.fleet import failures
from holdfast.control.plan import rank_environments
from holdfast.control.run import Run
from policies.ladder import Rung
from policies.states import Event
from tasks import takeover
from tasks.monitor import watch
from tasks.turn import Turn


@task(task_run_name="resume {job}", cache_policy=NO_CACHE)
def resume(job: str) -> Turn:
    """Start the workers and wait for the first new step, within the deadline of the rung."""
    run = runs.of(job)
    incident = run.incident
    assert incident is not None
    assert incident.decision is not None
    rung = incident.decision.rung
    if not run.board.all_started():  # a flow that adopted the job in this state finds them started
        if rung is Rung.TAKE_OVER:
            takeover.regroup(run, incident.decision)
        else:
            start_workers(run)
    limit = run.deadline(rung)
    begin = time.time()
    turn = watch(run, seconds=limit, until=run.begun)
    if turn is None:
        reached = {view.rank: view.reached() for view in run.board.ranks.values()}
        now = time.time()
        run.board.overrun = Overrun(at=now, rung=rung, seconds=now - begin + 1e-6, limit=limit, reached=reached)
        incident.tried.append(rung)
        return Turn(Event.FAULTED, f"{rung} brought no step within {limit:.0f} s")
    if turn.event in (Event.STARTED, Event.FINISHED):
        run.close_incident("recovered")
    return turn


def start_workers(run: Run) -> None:
    """Order every node to start its workers, all at once; a node that does not is evidence."""
    environments = rank_environments(run.board.membership, generation=run.generation, lineup=run.lineup, job=run.job.name)
    for worker in (worker for workers in environments.values() for worker in workers):
        worker["environment"] |= run.replicas.environment()
    answers = run.fleet.each(
        run.members,
        lambda node: run.fleet.channel(node).order(
            "start", generation=run.generation, workers=environments[node], membership=run.board.membership, seconds=30.0
        ),
    )
    run.held |= dict.fromkeys(answers.keys() - failures(answers).keys(), run.generation)
    for node, error in failures(answers).items():
        run.board.evidence.append(StartTrouble(node=node, at=time.time(), why=str(error)))
