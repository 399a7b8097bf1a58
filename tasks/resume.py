"""Resume: start the workers of the new generation and see them to their first step."""

from __future__ import annotations

import time
from typing import Final

from detectors.evidence import Overrun, StartTrouble
from holdfast.control.agents.pool import failures
from holdfast.control.config.worker_env import rank_environments, told_of
from holdfast.control.supervisor.controller import JobController
from policies.case import IN_PROCESS
from policies.states import Event
from tasks import takeover, titles
from tasks.monitor import see_begun
from tasks.turn import Transition, step

START_SECONDS: Final = 30.0
"""How long an agent may take to answer the order to start workers, where the deadline of the action leaves it so long."""


@step("resume", titles.resume)
def resume(run: JobController) -> Transition:
    """Start the workers and wait for the first new step, within the deadline of the action."""
    incident = run.incident
    if incident is None:
        return Transition(Event.STARTED, "the flow before had seen the ranks at work, and died before it could say so")
    assert incident.decision is not None
    action = incident.decision.action
    limit = run.policy.deadlines.of(action)
    begin = time.time()
    if not run.board.all_started():  # a flow that adopted the job in this state finds them started
        if action in IN_PROCESS:
            takeover.regroup(run, incident.decision)
        else:
            start_workers(run, seconds=min(START_SECONDS, limit))
    turn = see_begun(run, seconds=begin + limit - time.time())
    if turn is None:
        reached = {view.rank: view.reached() for view in run.board.ranks.values()}
        now = time.time()
        run.board.overrun = Overrun(at=now, action=action, seconds=now - begin + 1e-6, limit=limit, reached=reached)
        incident.tried.append(action)
        return Transition(Event.FAULTED, f"{action} brought no step within {limit:.0f} s")
    if turn.event in (Event.STARTED, Event.FINISHED):
        run.close_incident("recovered")
    return turn


def start_workers(run: JobController, *, seconds: float = START_SECONDS) -> None:
    """Order every node to start its workers, all at once; a node that does not say within *seconds* that it has is evidence."""
    environments = rank_environments(run.board.membership, generation=run.generation, rank_table=run.rank_table, job=run.job.name)
    memory = run.replicas.environments(environments, environments)
    for node, workers in environments.items():
        for worker in workers:
            worker["environment"] |= memory[node]
    told = told_of(run.board.membership)
    orders = {node: {"generation": run.generation, "workers": environments[node], **told[node]} for node in run.members}
    answers = run.fleet.orders(orders, "start", seconds=seconds)
    run.held |= dict.fromkeys(answers.keys() - failures(answers).keys(), run.generation)
    for node, error in failures(answers).items():
        run.board.evidence.append(StartTrouble(node=node, at=time.time(), why=str(error)))
