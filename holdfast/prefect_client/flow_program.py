"""The flow as a program: ``python -m holdfast.flows.training_job SPEC.json`` runs one job to its end and exits with how that was."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from prefect.client.schemas.objects import State as FlowState
from prefect.exceptions import CancelledRun, FailedRun, Pause

from holdfast import exit_codes
from holdfast.control.supervisor import early_launch
from holdfast.control.supervisor.detach import has_left, present, sigusr1_blocked, was_detached
from holdfast.errors import HistoryError, HoldfastError, LeaseLost, OperatorError
from holdfast.history import History, queries
from holdfast.history.errors import is_transient
from holdfast.history.saves import failed_save, lost_end, newest_complete
from holdfast.log import line
from holdfast.prefect import server
from holdfast.prefect.output import prepare_output
from holdfast.security.redaction import shown
from holdfast.spec import TrainingJob, cluster_of

FINAL_CHECKPOINT_SECONDS: Final = 15.0
"""How long Prefect may take to note the end of a flow run: for a server that is away it would wait minutes, and the history has all."""


def main(arguments: list[str], steer: Callable[..., FlowState]) -> int:
    """Run the job described by the file in *arguments*; the last line says what could not be done."""
    prepare_output()  # before the flow does: what keeps it from beginning is written too
    status = None
    try:
        status = _run(arguments, steer)
    finally:
        # a launcher that is left: the flow ended before it took control of the job
        early_launch.abandon(early_launch.DETACH if present().why else early_launch.STOP, failed=status == exit_codes.OPERATOR_ERROR)
    return status


def _run(arguments: list[str], steer: Callable[..., FlowState]) -> int:
    try:
        described = json.loads(Path(arguments[0]).read_text())
        job = TrainingJob.model_validate(described["job"])
        cluster, standby = cluster_of(described["cluster"]), bool(described.get("standby"))
    except (IndexError, OSError, ValueError, KeyError) as error:
        return _refuse(f"no usable description of a job: {error}")
    if why := _no_server():
        if early_launch.go_on_alone():
            return _try_again(why, arguments, job.name)
        return _refuse(f"{why} If job '{job.name}' runs already, it goes on.")
    threading.Thread(target=_leave_in_time, args=(job.name,), name="final_checkpoint", daemon=True).start()
    try:
        return _steer(lambda: steer(job, cluster, standby=standby), job.name, again=arguments if standby else None)
    except Late as error:
        return _try_again(f"the flow could not start: {error}", arguments, job.name)


class Late(Exception):
    """Prefect, or the history, did not answer in time, and a launcher controls the job meanwhile."""


def _try_again(why: str, arguments: list[str], job: str) -> int:
    """Have the launcher control the job for now, and begin anew after a while; once the launcher has ended the job, return how."""
    text = f"{why} The job goes on without Prefect; the next attempt follows in {early_launch.RETRY_SECONDS:.0f} s."
    print(line("prefect.late", text, level="warning"), flush=True)  # noqa: T201
    detach = present()
    signal.signal(signal.SIGUSR1, detach.on_signal)  # of this program, or of the flow, which has given it back
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if early_launch.wait_to_try_again(detach):
        return _begin_anew(arguments)
    return exit_codes.DETACHED if detach.why else _exit_status(job)


def _no_server() -> str:
    """Say why no flow can begin with the Prefect server that was named; nothing when it can."""
    known = server.configured()
    away = server.unreachable_reason(known) if known else ""
    cure = "Start it and its database, or unset PREFECT_API_URL: `holdfast run` then brings a server of its own."
    return f"the Prefect server at {shown(known)} cannot be used: {away}. {cure}" if away else ""


def _steer(steer: Callable[[], object], job: str, *, again: list[str] | None) -> int:
    """Run the flow to its end; with *again*, begin anew as a fresh process when another one took the job over.

    Raise `Late` where the flow could not start for now and a launcher controls the job.
    """
    try:
        steer()
    except OperatorError as error:
        return _refused(error, standby=again is not None)
    except (FailedRun, CancelledRun, Pause):
        pass  # the end of the job, reported below
    except LeaseLost as error:
        print(f"holdfast: {error}", file=sys.stderr, flush=True)  # noqa: T201
        if again is not None:
            return _begin_anew(again)
    except HoldfastError as error:
        print(line("flow.failed", f"holdfast: {error}", level="error"), file=sys.stderr)  # noqa: T201
    except BaseException as error:
        print(line("flow.failed", traceback.format_exc().rstrip(), level="error"), file=sys.stderr)  # noqa: T201
        if isinstance(error, Exception) and early_launch.go_on_alone():  # the flow run was not created, for example; it is no signal
            raise Late(f"{type(error).__name__}: {error}") from error
    return _exit_status(job)


def _refused(error: OperatorError, *, standby: bool) -> int:
    """Say why the flow could not start; return the exit status, with which a standby is started again where that helps."""
    is_away = isinstance(error, HistoryError) and is_transient(error)
    if is_away and early_launch.go_on_alone():
        raise Late(str(error)) from error
    if is_away and standby:  # between two polls
        print(line("flow.failed", f"holdfast: {error}", level="error"), file=sys.stderr)  # noqa: T201
        return exit_codes.CONTROLLER_DIED
    return _refuse(str(error))


def _begin_anew(arguments: list[str]) -> int:
    """Become a fresh process that begins with the flow again, unless this one had to detach."""
    with sigusr1_blocked():
        if present().why:
            return exit_codes.DETACHED
        return os.execv(sys.executable, [sys.executable, "-P", "-m", "holdfast.flows.training_job", *arguments])  # noqa: S606 (this very program)


def _refuse(why: str) -> int:
    print(line("refused", f"holdfast: {why}", level="error"), file=sys.stderr)  # noqa: T201
    return exit_codes.OPERATOR_ERROR


def _exit_status(job: str) -> int:
    """Return the exit status that the history has for the job's end, unless this flow detached from it."""
    if was_detached(job):
        return exit_codes.DETACHED
    try:
        with closing(History.open()) as history:
            row = queries.newest_job(history, job)
            checkpoints = queries.checkpoints(history, row.id)
            lost = lost_end(newest_complete(checkpoints), failed_save(checkpoints), queries.last_step(history, row.id))
            return exit_codes.status_of(queries.state_of(history, row.id), lost_end=lost)
    except OperatorError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
        return exit_codes.CONTROLLER_DIED


def _leave_in_time(job: str) -> None:
    """Once the job is no longer steered, give Prefect a while to note the end of its run, then leave without it."""
    while not has_left(job):
        time.sleep(0.5)
    time.sleep(FINAL_CHECKPOINT_SECONDS)
    words = "holdfast: the Prefect server did not take the end of this flow run; the history has it"
    print(line("flow.left", words, level="warning"), file=sys.stderr, flush=True)  # noqa: T201
    os._exit(_exit_status(job))
