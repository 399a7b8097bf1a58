"""Follow the flow run that this controller is: whoever cancels or suspends it in Prefect is obeyed, whichever worker is alive.

A Prefect worker tells a flow's process of a cancellation by SIGTERM, if the worker that started it still lives; of a suspension nobody
tells it, but Prefect raises `Pause` at the next task. Neither is enough for a process that lives for weeks: so it polls.
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
SETTLING_SECONDS: Final = 30.0
"""How long the process of the flow run before may take to end that run itself."""
LAST_SECONDS: Final = 5.0
SAYING_SECONDS: Final = 20.0
"""How long a suspended flow run tries to say in its state what was saved, while the server does not answer."""


class OwnFlowRun:
    """One thread that polls the state of this flow run, and of those it is a subflow of."""

    def __init__(self) -> None:
        context = FlowRunContext.get()
        own = context.flow_run if context is not None else None
        self.flow_run = FlowRun()
        if own is not None:
            self.flow_run = FlowRun(id=str(own.id), url="" if is_temporary_server() else ui_link("flow-run", own.id))
        self._own = own
        self._lineage: list[UUID] = []
        """This flow run and its parents, innermost first, once they are known."""
        self._running: UUID | None = None
        """The state in which this process runs the flow."""
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
        """Begin with the job: a flow run that controlled it before, and whose process is gone, is told so in Prefect."""
        self._run, self._predecessor_at = run, time.monotonic() + SETTLING_SECONDS

    def leave_suspended(self, saved: str) -> None:
        """Leave the flow run suspended, and say in its state what was *saved*.

        Raise `Pause` where Prefect starts the flow again on resume. Return only once a run that waits in its process (one without a
        deployment, which nobody would start again) was resumed or cancelled; raise `Pause` as well when it was ended while it waited.
        """
        self._say(saved)
        if self._is_started_again():
            raise Pause(state=self._paused)
        while self.flow_run.suspended and not self.flow_run.cancelled:
            if self._paused is not None and self._paused.is_final():  # the time for which a run may be paused is over
                raise Pause(state=self._paused)
            time.sleep(POLL_SECONDS / 4)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                # retried here, so that no answer is awaited for minutes after the server is back
                with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}), get_client(sync_client=True) as client:
                    self._poll_while_it_answers(client)
            except Exception as error:  # noqa: BLE001 (the server may be away for hours, and training goes on)
                if not self._failing:
                    note(log, "prefect.unreachable", level=logging.WARNING, why=error)
                self._failing = True
                self._over.wait(POLL_SECONDS)

    def _poll_while_it_answers(self, client: SyncPrefectClient) -> None:
        while not self._over.is_set():
            for number in self._lineage or self._find_lineage(client):
                with suppress(ObjectNotFound):  # its server lost its database: nobody can cancel what is not there
                    self._heed(client.read_flow_run(number))
            self._failing = False
            self._close_predecessor(client)
            self.flow_run.poll.wait(POLL_SECONDS)
            self.flow_run.poll.clear()

    def _find_lineage(self, client: SyncPrefectClient) -> list[UUID]:
        """Return the ids of this flow run and of all that it runs within: who cancels a parent means its subflows too."""
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

    def _heed(self, told: PrefectFlowRun) -> None:
        state, mine = told.state, told.id == self._lineage[0]
        if state is None:
            return
        whose = "" if mine else f" with its parent flow run '{told.name}'"
        if state.is_cancelling() or state.is_cancelled():
            self.flow_run.cancelled = self.flow_run.cancelled or f"cancelled in Prefect{whose}"
        elif state.is_paused():
            self._paused = state
            self.flow_run.suspended = self.flow_run.suspended or f"suspended in Prefect{whose}"
        elif self.flow_run.suspended and not self._is_started_again():
            if state.is_running():
                self._paused, self.flow_run.suspended = None, ""
            elif state.is_final():
                self._paused = state
        elif mine and state.is_running():
            self._give_way(state)

    def _is_started_again(self) -> bool:
        """Tell whether Prefect starts this flow again, in a new process, when it is resumed."""
        state = self._paused
        if state is not None and state.is_paused():
            return state.state_details.pause_reschedule is not False
        return self._own is not None and self._own.deployment_id is not None

    def _give_way(self, state: State) -> None:
        """Detach from the job where this flow run was suspended and resumed between two polls: another process runs it now."""
        self._running = self._running or state.id
        if state.id != self._running and self._is_started_again() and self._run is not None:
            self._run.detach.request("its flow run was resumed in another process")

    def _say(self, saved: str) -> None:
        """Put *saved* into the state of this flow run while it is suspended; give up after a while: the history has it."""
        deadline = time.monotonic() + SAYING_SECONDS
        while saved and self.flow_run.suspended:
            try:
                self._say_once(saved)
            except Exception as error:  # noqa: BLE001 (the server may be away for longer than anybody waits here)
                if time.monotonic() > deadline:
                    note(log, "prefect.unreachable", level=logging.WARNING, why=error)
                    return
                time.sleep(POLL_SECONDS)
            else:
                return

    def _say_once(self, saved: str) -> None:
        """Try once to say it. Prefect's client does not send it again by itself: it would be sent long after it was true."""
        assert self._own is not None
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            say_while_suspended(client, self._own.id, saved)

    def _close_predecessor(self, client: SyncPrefectClient) -> None:
        """End the flow run that controlled the job before, if its process could not: nobody else would, and it would stay Running."""
        number = self.flow_run.predecessor
        if not number or self._run is None or time.monotonic() < self._predecessor_at:
            return
        self.flow_run.predecessor = ""
        if UUID(number) in self._lineage:
            return
        with suppress(ObjectNotFound):
            state = client.read_flow_run(UUID(number)).state
            if state is not None and state.is_running():
                words = f"The controller's process ended unexpectedly; training continued. Controlled by flow run {self._lineage[0]} now."
                client.set_flow_run_state(UUID(number), State(type=StateType.CRASHED, message=words), force=True)


def say_while_suspended(client: SyncPrefectClient, flow_run: UUID, message: str) -> None:
    """Put *message* into the state of a flow run if that is suspended.

    Prefect can only set a whole new state, whatever the present one is. Where a person resumes or cancels the flow run between our reading
    and our setting, ours would undo theirs: so the state before ours is looked at, and set again if it is another than "suspended".
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
