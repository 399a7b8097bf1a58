"""How a flow run ends when it cannot do its work: with a state that says why, and without a traceback in the log or the UI."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Failed

from holdfast.errors import HoldfastError
from holdfast.history import History, queries
from holdfast.log import note
from holdfast.policies.states import State as JobState
from holdfast.prefect.output import prepare_output

log = logging.getLogger("holdfast.publish")

FLOW_RUN_ID: Final = "PREFECT__FLOW_RUN_ID"
"""Environment variable that Prefect sets for a flow run that a worker started."""


def run_or_fail(work: Callable[[], State]) -> State:
    """Do the *work* of a flow; if it raises a `HoldfastError`, return a failed state with the error's message.

    Outside a worker, in a program that calls the flow itself, the error is raised.
    """
    hide_tracebacks()
    try:
        return work()
    except HoldfastError as error:
        return failed_state(error)


def failed_state(error: HoldfastError) -> State:
    """Return the failed state with the message of *error*; raise the error outside a worker."""
    if FLOW_RUN_ID not in os.environ:
        raise error
    return Failed(message=str(error))


def hide_tracebacks() -> None:
    """Log a failed flow run as one message without Prefect's traceback, and a cancelled one not as an error."""
    prepare_output()
    logging.getLogger("prefect.flow_runs").addFilter(_shorten)


def _shorten(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, FailedRun):
        record.msg, record.args, record.exc_info, record.exc_text = str(error), (), None, None
    return not isinstance(error, CancelledRun)


def explain_crash(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Write into a crashed flow run's state whether training continues, and how to reattach to it. Runs in the Prefect worker."""
    job = flow_run.parameters.get("job")
    name = job.get("name") if isinstance(job, dict) else flow_run.parameters.get("name")  # the run form has the name alone
    if not name:
        return
    try:
        message = f"{job_after_crash(str(name))} ({(state.message or 'no reason is known').rstrip('.')})"
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, State(type=StateType.CRASHED, name=state.name, message=message), force=True)
    except Exception as error:  # noqa: BLE001 (a hook that fails must not hide the crash)
        note(log, "prefect.crash-not-explained", level=logging.WARNING, flow=flow.name, why=error)


def job_after_crash(name: str) -> str:
    """Say in one sentence what became of the job called *name* after its controller died."""
    with closing(History.open()) as history:
        live = queries.live_job(history, name)
        move = queries.state_of(history, (live or queries.newest_job(history, name)).id)
    if live is None:
        return f"The job has ended: {move.after}, {move.reason}" if move is not None else "The job had not started"
    if move is not None and move.after == JobState.SUSPENDED:
        return "The job is suspended; run it again to resume it"
    return (
        f"Training of job '{name}' continues under its agents, but no fault would be handled: the controller's process died. "
        "Press Retry, or start the job again, to reattach"
    )
