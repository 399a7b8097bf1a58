"""What is said in the state of a suspended flow run never undoes what a person asked for meanwhile: against a real Prefect server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateDetails, StateType
from prefect.flows import flow

from holdfast.prefect_client.own_flow_run import set_message_while_suspended
from tests.integration.conftest import PrefectServer

pytestmark = pytest.mark.long

SAVED = "saved at step 8; resume continues from there"


@flow
def some_flow() -> None:
    """Stand for any flow: no test runs it."""


class Overtaken(SyncPrefectClient):
    """A client whose user is overtaken: a person sets a state right after the flow run was read."""

    def __init__(self, api: str, by: State[Any]) -> None:
        super().__init__(api)
        self.by: State[Any] | None = by

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        """Read it, and let the person act once."""
        read = super().read_flow_run(flow_run_id)
        by, self.by = self.by, None
        if by is not None:
            self.set_flow_run_state(flow_run_id, by, force=True)
        return read


@pytest.fixture
def person(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """Give what a person at the UI uses."""
    with SyncPrefectClient(prefect_server.url) as client:
        yield client


def paused(person: SyncPrefectClient) -> UUID:
    """Return a flow run that is paused in its process."""
    made = person.create_flow_run(some_flow)
    person.set_flow_run_state(made.id, State(type=StateType.RUNNING), force=True)
    person.set_flow_run_state(made.id, State(type=StateType.PAUSED, state_details=StateDetails(pause_reschedule=False)), force=True)
    return made.id


def test_a_suspended_flow_run_says_what_was_saved(person: SyncPrefectClient) -> None:
    """It stays suspended, under the same conditions; saying it again changes nothing."""
    flow_run = paused(person)
    for _ in range(2):
        set_message_while_suspended(person, flow_run, SAVED)
    said = person.read_flow_run(flow_run).state
    assert said is not None
    assert (said.type, said.message, said.state_details.pause_reschedule) == (StateType.PAUSED, SAVED, False)
    assert len(person.read_flow_run_states(flow_run)) == 3 + 1  # with "Pending", as it was made


@pytest.mark.parametrize("asked", [StateType.RUNNING, StateType.SCHEDULED, StateType.CANCELLING])
def test_whoever_acts_while_it_is_said_is_obeyed(person: SyncPrefectClient, prefect_server: PrefectServer, asked: StateType) -> None:
    """Resumed in its process, resumed for a worker, or cancelled between the reading and the setting: it is so afterwards."""
    flow_run = paused(person)
    with Overtaken(prefect_server.url, State(type=asked, message="a person's")) as client:
        set_message_while_suspended(client, flow_run, SAVED)
    states = person.read_flow_run_states(flow_run)
    assert [one.message for one in states][-3:] == ["a person's", SAVED, "a person's"], "it was overtaken, and put right"
    now = person.read_flow_run(flow_run).state
    assert now is not None
    assert (now.type, now.message) == (asked, "a person's")


def test_what_was_not_put_right_is_put_right_when_it_is_said_again(person: SyncPrefectClient) -> None:
    """The server may go away after ours was set, before we looked at it."""
    flow_run = paused(person)
    person.set_flow_run_state(flow_run, State(type=StateType.RUNNING, message="a person's"), force=True)
    person.set_flow_run_state(flow_run, State(type=StateType.PAUSED, message=SAVED), force=True)
    set_message_while_suspended(person, flow_run, SAVED)
    now = person.read_flow_run(flow_run).state
    assert now is not None
    assert (now.type, now.message) == (StateType.RUNNING, "a person's")


def test_a_flow_run_that_is_not_suspended_any_more_stays_as_it_is(person: SyncPrefectClient) -> None:
    """Nothing is set."""
    flow_run = paused(person)
    person.set_flow_run_state(flow_run, State(type=StateType.RUNNING), force=True)
    before = person.read_flow_run_states(flow_run)
    set_message_while_suspended(person, flow_run, SAVED)
    assert [one.id for one in person.read_flow_run_states(flow_run)] == [one.id for one in before]
