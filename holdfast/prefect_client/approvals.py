"""What a flow asks a person in the Prefect UI: a paused flow run of its own with a typed form, made beside the job's.

The job's own run is not paused: it goes on watching and, where it can, training. No process stands behind the paused run, so nothing
ends with the flow that asked; whoever steers the job next finds run and answer by the question in the history.
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

EVERY: Final = 2.0
"""Seconds between two looks at the Prefect server, while a question is open."""
FOREVER: Final = 10 * 365 * 86400
"""Seconds for which the run itself stays paused: it is the question that has an end."""
LAST_SECONDS: Final = 5.0


NODES: Final = "Which of them; the others stay."


class Approval(RunInput):
    """The form that a person fills in."""

    answer: Literal["approve", "refuse"] = Field("refuse", description="Approve: the nodes below are isolated. Refuse: all of them stay.")
    nodes: list[str] = Field(default=[], description=NODES)
    by: str = Field("", description="Who you are.")
    reason: str = Field("", description="Why.")


@flow(name="approval", retries=0)
def approval(question: int, job: str, words: str) -> None:
    """Stand for a question that a person is asked; the answer is read by who asked."""


class ApprovalRuns:
    """One thread that puts a job's open questions into the Prefect UI, and brings the answers back."""

    def __init__(self) -> None:
        self._history = History.open()
        self._job_id = ""
        self._over = threading.Event()
        self._known: dict[int, ApprovalRequest] = {}
        self._failing = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Look once more, as the job's end has withdrawn what was open."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def follow(self, job_id: str) -> None:
        """Begin with the questions of this job."""
        if self._thread is not None:  # a suspended job that goes on
            return
        self._job_id = job_id
        self._thread = threading.Thread(target=self._serve, name="asker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        last = False
        while not last:
            last = self._over.wait(EVERY)
            try:
                self._look()
                self._failing = False
            except Exception as error:  # noqa: BLE001 (the UI or the history may be away for hours; the command line answers as well)
                if not self._failing:
                    note(log, "prefect.approval-not-shown", level=logging.WARNING, why=error)
                self._failing = True
        self._history.close()

    def _look(self) -> None:
        rows = {one.number: one for one in approvals.of_job(self._history, self._job_id)}
        present = [one for one in rows.values() if one.answered_at is None]
        closed = [rows[number] for number in self._known if rows[number].answered_at is not None]
        if not present and not closed:
            return
        with get_client(sync_client=True) as client:
            for one in closed:
                _close(client, one)
                del self._known[one.number]
            for one in present:
                self._known[one.number] = one
                if one.flow_run is None:
                    approvals.set_flow_run(self._history, one.number, _put(client, one))
                else:
                    self._take(client, one)

    def _take(self, client: SyncPrefectClient, one: ApprovalRequest) -> None:
        """Take the answer from the run, if somebody gave one there."""
        state = client.read_flow_run(UUID(one.flow_run)).state
        if state is None or state.is_paused():
            return
        if state.is_final():  # somebody cancelled it: that is no answer
            return
        form = cast("Approval", _form(one).load(_keyset(one), UUID(one.flow_run)))
        said = ApprovalAnswer(
            answer=ISOLATE if form.answer == "approve" and form.nodes else KEEP,
            picked=tuple(form.nodes) if form.answer == "approve" else (),
            by=form.by.strip() or "the Prefect UI",
            comment=form.reason.strip(),
        )
        try:
            _close(client, approvals.answer(self._history, one.number, said, now=time.time()))
        except OperatorError as error:  # somebody was first
            note(log, "prefect.answer-too-late", why=error)


def _form(one: ApprovalRequest) -> type[Approval]:
    names = list(one.nodes)
    against = "\n".join(f"- **{node}**: {told['reason']}" for node, told in one.nodes.items())
    description = f"**Job {one.job}, question {one.number}**\n\n{one.reason}\n\n{against}\n\n{how_to_answer(one)}"
    picked = create_model("Approval", __base__=Approval, nodes=(list[Literal[*names]], Field(names, description=NODES)))  # type: ignore[valid-type]
    return picked.with_initial_data(description=description)


def _paused(one: ApprovalRequest) -> Any:  # noqa: ANN401 (Prefect's state, generic over results)
    return Paused(timeout_seconds=FOREVER, pause_key=f"question-{one.number}")


def _keyset(one: ApprovalRequest) -> Any:  # noqa: ANN401 (a dictionary with literal keys that Prefect does not export)
    return keyset_from_paused_state(_paused(one))


def _put(client: SyncPrefectClient, one: ApprovalRequest) -> str:
    """Make the paused run of a question; return its id."""
    words = f"may {', '.join(one.nodes)} be isolated?"
    parameters = {"question": one.number, "job": one.job, "words": one.reason}
    run = client.create_flow_run(approval, name=f"{one.job}: {words}", parameters=parameters, tags=["holdfast"], state=Running())
    _form(one).save(_keyset(one), run.id)
    paused = _paused(one)
    paused.state_details.run_input_keyset = _keyset(one)
    client.set_flow_run_state(run.id, paused, force=True)
    return str(run.id)


def _close(client: SyncPrefectClient, one: ApprovalRequest) -> None:
    """End the run of a question that is answered."""
    if one.flow_run is None:
        return
    words = approvals.describe(one)
    state: Any = Completed(message=words) if one.answer in {ISOLATE, KEEP} else Cancelled(message=words)
    try:
        client.set_flow_run_state(UUID(one.flow_run), state, force=True)
    except ObjectNotFound:
        note(log, "prefect.run-missing", question=one.number)
