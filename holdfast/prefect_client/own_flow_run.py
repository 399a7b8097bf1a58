"""Poll the state of the controller's own flow run, to carry out a cancellation or a suspension made in Prefect.

A Prefect worker sends a flow's process SIGTERM for a cancellation, if the worker that started it is still alive. For a suspension nothing
is sent; Prefect raises `Pause` at the next task. Neither is enough for a process that runs for weeks, so it polls.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any, Final, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun as PrefectFlowRun
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, Pause
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.log import note
from holdfast.prefect.links import ui_link
from holdfast.prefect.server import is_temporary_server

log = logging.getLogger("holdfast.publish")

POLL_SECONDS: Final = 2.0
PREDECESSOR_SECONDS: Final = 30.0
"""How long the process of the previous flow run may take to end that run itself."""
LAST_SECONDS: Final = 5.0
"""How long the end of a flow waits for the thread."""
MESSAGE_SECONDS: Final = 20.0
"""How long a suspended flow run tries to write what was saved into its state, while the server does not answer."""


class OwnFlowRun:
    """A thread that polls the state of this flow run and of its parent flow runs."""

    def __init__(self) -> None:
        context = FlowRunContext.get()
        own = context.flow_run if context is not None else None
        self.flow_run = FlowRun()
        if own is not None:
            self.flow_run = FlowRun(id=str(own.id), url="" if is_temporary_server() else ui_link("flow-run", own.id))
        self._own = own
        self._lineage: list[UUID] = []
        """Ids of this flow run and its parents, innermost first; empty until they are known."""
        self._running: UUID | None = None
        """Id of the state in which this process runs the flow."""
        self._run: JobController | None = None
        self._paused: State | None = None
        self._predecessor_at = 0.0
        self._failing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="own flow run", daemon=True)

    def __enter__(self) -> Self:
        if self._own is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.flow_run.poll.set()
        if self._thread.is_alive():
            self._thread.join(LAST_SECONDS)

    def control(self, run: JobController) -> None:
        """Start with the job. A previous flow run of it whose process is dead is marked as crashed in Prefect."""
        self._run, self._predecessor_at = run, time.monotonic() + PREDECESSOR_SECONDS

    def leave_suspended(self, saved: str) -> None:
        """Leave the flow run suspended, with what was *saved* as its message.

        Raise `Pause` if Prefect starts the flow again when it is resumed. A run without a deployment waits in its process instead: return
        once it is resumed or cancelled; raise `Pause` if it is ended while it waits.
        """
        self._write_message(saved)
        if self._is_started_again():
            raise Pause(state=self._paused)
        while self.flow_run.suspended and not self.flow_run.cancelled:
            if self._paused is not None and self._paused.is_final():  # the maximum pause has passed
                raise Pause(state=self._paused)
            time.sleep(POLL_SECONDS / 4)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                # retry here: Prefect would wait for minutes after the server is reachable again
                with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}), get_client(sync_client=True) as client:
                    self._poll_while_reachable(client)
            except Exception as error:  # noqa: BLE001 (the server may be unreachable for hours, and training continues)
                if not self._failing:
                    note(log, "prefect.unreachable", level=logging.WARNING, why=error)
                self._failing = True
                self._over.wait(POLL_SECONDS)

    def _poll_while_reachable(self, client: SyncPrefectClient) -> None:
        while not self._over.is_set():
            for number in self._lineage or self._find_lineage(client):
                with suppress(ObjectNotFound):  # the server lost its database
                    self._apply(client, client.read_flow_run(number))
            self._failing = False
            self._close_predecessor(client)
            self.flow_run.poll.wait(POLL_SECONDS)
            self.flow_run.poll.clear()

    def _find_lineage(self, client: SyncPrefectClient) -> list[UUID]:
        """Return the ids of this flow run and its parents: cancelling a parent cancels its subflows."""
        assert self._own is not None
        found, run = [self._own.id], self._own
        while run.parent_task_run_id is not None:
            parent = client.read_task_run(run.parent_task_run_id).flow_run_id
            if parent is None:
                break
            run = client.read_flow_run(parent)
            found.append(run.id)
        self._lineage = found
        return found

    def _apply(self, client: SyncPrefectClient, run: PrefectFlowRun) -> None:
        """Carry out what the state of this flow run, or of one of its parents, asks for."""
        state, is_own = run.state, run.id == self._lineage[0]
        if state is None:
            return
        suffix = "" if is_own else f" with its parent flow run '{run.name}'"
        if state.is_cancelling() or state.is_cancelled():
            self.flow_run.cancelled = self.flow_run.cancelled or f"cancelled in Prefect{suffix}"
        elif state.is_paused():
            self._paused = state
            self.flow_run.suspended = self.flow_run.suspended or f"suspended in Prefect{suffix}"
        elif self.flow_run.suspended and not self._is_started_again():
            if state.is_running():
                self._paused, self.flow_run.suspended = None, ""
            elif state.is_final():
                self._paused = state
        elif is_own:
            self._apply_own(client, run.id, state)

    def _apply_own(self, client: SyncPrefectClient, flow_run: UUID, state: State) -> None:
        if state.is_running():
            self._detach_if_replaced(state)
        elif state.is_failed():
            self._suspend_if_run_out(client, flow_run)

    def _is_started_again(self) -> bool:
        """Return whether Prefect starts this flow in a new process when it is resumed."""
        state = self._paused
        if state is not None and state.is_paused():
            return state.state_details.pause_reschedule is not False
        return self._own is not None and self._own.deployment_id is not None

    def _detach_if_replaced(self, state: State) -> None:
        """Detach from the job if this flow run was suspended and resumed between two polls: another process runs it now."""
        self._running = self._running or state.id
        if state.id != self._running and self._is_started_again() and self._run is not None:
            self._run.detach.request("its flow run was resumed in another process")

    def _suspend_if_run_out(self, client: SyncPrefectClient, flow_run: UUID) -> None:
        """Suspend the job if Prefect failed this flow run because its suspension ran out, all of it between two polls."""
        before = client.read_flow_run_states(flow_run)[-2:-1]
        if before and before[0].is_paused():
            self._paused = before[0]
            self.flow_run.suspended = "suspended in Prefect; the flow run was not resumed in time"

    def _write_message(self, saved: str) -> None:
        """Write *saved* into the state of this flow run while it is suspended; give up after a while, as the history has it too."""
        assert self._own is not None
        deadline = time.monotonic() + MESSAGE_SECONDS
        while saved and self.flow_run.suspended:
            try:
                # Without Prefect's own retries, which would send it long after it was true.
                with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
                    set_message_while_suspended(client, self._own.id, saved)
            except Exception as error:  # noqa: BLE001 (the server may be unreachable for longer than this waits)
                if time.monotonic() > deadline:
                    note(log, "prefect.unreachable", level=logging.WARNING, why=error)
                    return
                time.sleep(POLL_SECONDS)
            else:
                return

    def _close_predecessor(self, client: SyncPrefectClient) -> None:
        """Mark the previous flow run of the job as crashed if its process could not end it; it would stay Running."""
        number = self.flow_run.predecessor
        if not number or self._run is None or time.monotonic() < self._predecessor_at:
            return
        self.flow_run.predecessor = ""
        if UUID(number) in self._lineage:
            return
        with suppress(ObjectNotFound):
            state = client.read_flow_run(UUID(number)).state
            if state is not None and state.is_running():
                message = (
                    f"The controller's process ended unexpectedly; training continued. Flow run {self._lineage[0]} controls the job now."
                )
                client.set_flow_run_state(UUID(number), State(type=StateType.CRASHED, message=message), force=True)


def set_message_while_suspended(client: SyncPrefectClient, flow_run: UUID, message: str) -> None:
    """Write *message* into the state of a flow run if it is suspended.

    Prefect can only set a complete new state, whatever the present one is. If a person resumes or cancels the flow run between our read and
    our write, ours would undo theirs. So the state before ours is read afterwards, and set again if it is not "suspended".
    """
    state = client.read_flow_run(flow_run).state
    if state is None or not state.is_paused():
        return
    if state.message != message:
        client.set_flow_run_state(flow_run, _copy(state, message), force=True)
    now = client.read_flow_run(flow_run).state
    if now is None or now.message != message:
        return
    others = [one for one in client.read_flow_run_states(flow_run) if one.id != now.id]
    if others and not others[-1].is_paused():
        client.set_flow_run_state(flow_run, _copy(others[-1], others[-1].message), force=True)


def _copy(state: State[Any], message: str | None) -> State[Any]:
    return State(type=state.type, name=state.name, message=message, state_details=state.state_details)
