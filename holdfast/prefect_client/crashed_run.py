"""What a crashed flow run says: a dead controller is not a dead job."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType

from holdfast.history import History, queries
from holdfast.log import note
from policies.states import State as JobState

log = logging.getLogger("holdfast.publish")


def explain_crash(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Say in a crashed flow run's state whether training continues, and how to have it controlled again. Runs in the worker."""
    job = flow_run.parameters.get("job")
    name = job.get("name") if isinstance(job, dict) else flow_run.parameters.get("name")  # by itself where the run form was filled in
    if not name:
        return
    try:
        words = f"{told(str(name))} ({(state.message or 'no reason is known').rstrip('.')})"
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, State(type=StateType.CRASHED, name=state.name, message=words), force=True)
    except Exception as error:  # noqa: BLE001 (a hook that fails must not hide the crash)
        note(log, "prefect.crash-not-explained", level=logging.WARNING, flow=flow.name, why=error)


def told(name: str) -> str:
    """Return what became of the job called *name* whose controller died, in a sentence."""
    with closing(History.open()) as history:
        live = queries.live_job(history, name)
        move = queries.state_of(history, (live or queries.newest_job(history, name)).id)
    if live is None:
        return f"The job has ended: {move.after}, {move.reason}" if move is not None else "The job had not begun"
    if move is not None and move.after == JobState.SUSPENDED:
        return "The job is suspended; run it again to resume it"
    return (
        f"Training of job '{name}' continues under its agents, but nobody would answer a fault: the controller's process died. "
        "Press Retry, or start the job again, to reattach"
    )
