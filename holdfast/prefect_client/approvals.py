"""Approvals in the Prefect UI: each open approval is a paused flow run of its own with a form.

The job's own flow run is not paused: it keeps monitoring and, where possible, training. No process runs behind the paused run, so it
outlives the controller that asked; the next controller finds run and answer by the approval request in the history.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final, Literal, Self, cast
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput, keyset_from_paused_state
from prefect.states import Cancelled, Completed, Paused, Running
from pydantic import Field, create_model

from holdfast.control.nodes.approvals import how_to_answer
from holdfast.errors import OperatorError
from holdfast.history import History, approvals
from holdfast.history.approvals import ISOLATE, KEEP, ApprovalAnswer
from holdfast.history.models import ApprovalRequest
from holdfast.log import note

log = logging.getLogger("holdfast.publish")

POLL_SECONDS: Final = 2.0
"""Seconds between two polls of history and Prefect server."""
PAUSE_TIMEOUT: Final = 10 * 365 * 86400
"""Seconds for which the paused run stays paused; the request itself has its own deadline."""
LAST_SECONDS: Final = 5.0
"""How long the end of a flow waits for the last poll."""
NODES: Final = "Which of them to isolate; the others stay."


class Approval(RunInput):
    """The form in the UI."""

    answer: Literal["approve", "deny"] = Field("deny", description="Approve: the nodes below are isolated. Deny: all of them stay.")
    nodes: list[str] = Field(default=[], description=NODES)
    by: str = Field("", description="Who you are.")
    reason: str = Field("", description="Why.")


@flow(name="approval", retries=0)
def approval(number: int, job: str, words: str) -> None:
    """Hold the form of one approval request; the controller reads the answer."""


class ApprovalRuns:
    """A thread that shows a job's open approval requests in the Prefect UI and stores the answers in the history."""

    def __init__(self) -> None:
        self._history = History.open()
        self._job_id = ""
        self._stopping = threading.Event()
        self._open: dict[int, ApprovalRequest] = {}
        self._failing = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Poll once more: the end of the job withdraws open requests."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def follow(self, job_id: str) -> None:
        """Start with the requests of this job; do nothing if it is followed already."""
        if self._thread is not None:  # a suspended job was resumed
            return
        self._job_id = job_id
        self._thread = threading.Thread(target=self._serve, name="approvals", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        last = False
        while not last:
            last = self._stopping.wait(POLL_SECONDS)
            try:
                self._poll()
                self._failing = False
            except Exception as error:  # noqa: BLE001 (UI or history may be unreachable for hours; the command line can answer as well)
                if not self._failing:
                    note(log, "prefect.approval-not-shown", level=logging.WARNING, why=error)
                self._failing = True
        self._history.close()

    def _poll(self) -> None:
        rows = {one.number: one for one in approvals.of_job(self._history, self._job_id)}
        pending = [one for one in rows.values() if one.answered_at is None]
        closed = [rows[number] for number in self._open if rows[number].answered_at is not None]
        if not pending and not closed:
            return
        with get_client(sync_client=True) as client:
            for one in closed:
                _close(client, one)
                del self._open[one.number]
            for one in pending:
                self._open[one.number] = one
                if one.flow_run is None:
                    approvals.set_flow_run(self._history, one.number, _create(client, one))
                else:
                    self._read_answer(client, one)

    def _read_answer(self, client: SyncPrefectClient, one: ApprovalRequest) -> None:
        """Store the answer that was given in the UI, if any. A cancelled run is no answer."""
        state = client.read_flow_run(UUID(one.flow_run)).state
        if state is None or state.is_paused() or state.is_final():
            return
        form = cast("Approval", _form(one).load(_keyset(one), UUID(one.flow_run)))
        answer = ApprovalAnswer(
            answer=ISOLATE if form.answer == "approve" and form.nodes else KEEP,
            picked=tuple(form.nodes) if form.answer == "approve" else (),
            by=form.by.strip() or "the Prefect UI",
            comment=form.reason.strip(),
        )
        try:
            _close(client, approvals.answer(self._history, one.number, answer, now=time.time()))
        except OperatorError as error:  # another answer came first
            note(log, "prefect.answer-too-late", why=error)


def _form(one: ApprovalRequest) -> type[Approval]:
    names = list(one.nodes)
    faults = "\n".join(f"- **{node}**: {facts['reason']}" for node, facts in one.nodes.items())
    description = f"**Job {one.job}, approval {one.number}**\n\n{one.reason}\n\n{faults}\n\n{how_to_answer(one)}"
    form = create_model("Approval", __base__=Approval, nodes=(list[Literal[*names]], Field(names, description=NODES)))  # type: ignore[valid-type]
    return form.with_initial_data(description=description)


def _paused(one: ApprovalRequest) -> Any:  # noqa: ANN401 (Prefect's state, generic over results)
    return Paused(timeout_seconds=PAUSE_TIMEOUT, pause_key=f"approval-{one.number}")


def _keyset(one: ApprovalRequest) -> Any:  # noqa: ANN401 (a dictionary with literal keys that Prefect does not export)
    return keyset_from_paused_state(_paused(one))


def _create(client: SyncPrefectClient, one: ApprovalRequest) -> str:
    """Create the paused run of a request; return its id."""
    name = f"{one.job}: may {', '.join(one.nodes)} be isolated?"
    parameters = {"number": one.number, "job": one.job, "words": one.reason}
    run = client.create_flow_run(approval, name=name, parameters=parameters, tags=["holdfast"], state=Running())
    _form(one).save(_keyset(one), run.id)
    paused = _paused(one)
    paused.state_details.run_input_keyset = _keyset(one)
    client.set_flow_run_state(run.id, paused, force=True)
    return str(run.id)


def _close(client: SyncPrefectClient, one: ApprovalRequest) -> None:
    """End the run of a request that is answered or withdrawn."""
    if one.flow_run is None:
        return
    message = approvals.describe(one)
    state: Any = Completed(message=message) if one.answer in {ISOLATE, KEEP} else Cancelled(message=message)
    try:
        client.set_flow_run_state(UUID(one.flow_run), state, force=True)
    except ObjectNotFound:
        note(log, "prefect.run-missing", approval=one.number)
