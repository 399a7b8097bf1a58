"""The life of a job has one shape, whatever rows its table gets: asked for by shape, not by row."""

from __future__ import annotations

import ast
import inspect
import pickle
from itertools import product

import pytest

from holdfast.policies.states import TERMINAL, TRANSITIONS, Event, State, UnlistedTransition, advance
from tests.each import each
from tests.mentions import mentions
from tests.policies.shape import reached

MOVES = {(state, event): after for state, outcomes in TRANSITIONS.items() for event, after in outcomes.items()}
LIVE = sorted(frozenset(State) - TERMINAL)


@each("state, event", [pair for pair in product(State, Event) if pair not in MOVES])
def test_a_move_that_is_not_listed_is_refused(state: State, event: Event) -> None:
    """An event that a state knows nothing of is a mistake of ours, and never means done."""
    with pytest.raises(UnlistedTransition) as refused:
        advance(state, event)
    assert (refused.value.state, refused.value.event) == (state, event)
    assert str(state) in str(refused.value)
    assert str(event) in str(refused.value)


@each("state, event", MOVES)
def test_a_listed_move_leads_where_the_table_says_and_never_nowhere(state: State, event: Event) -> None:
    """A move that stays where it is would be no move."""
    assert advance(state, event) is MOVES[state, event]
    assert advance(state, event) is not state


@each("state", LIVE)
def test_from_every_live_state_each_end_can_be_reached(state: State) -> None:
    """No job is caught half-way."""
    assert reached(MOVES, state) >= {State.COMPLETED, State.FAILED, State.CANCELLED}


@each("state", LIVE)
def test_a_person_can_stop_a_job_in_every_live_state(state: State) -> None:
    """At any moment, in one move."""
    assert MOVES[state, Event.STOP_ASKED] is State.CANCELLED


@each("state", sorted(frozenset(LIVE) - {State.SUSPENDED}))
def test_a_person_can_suspend_a_job_in_every_live_state(state: State) -> None:
    """In one move, in the middle of a recovery too; it leads back to a launch and never to an end of its own."""
    assert MOVES[state, Event.SUSPEND_ASKED] is State.SUSPENDED
    assert MOVES[State.SUSPENDED, Event.RESUME_ASKED] is State.LAUNCHING


def test_every_state_is_reached_from_the_first() -> None:
    """One that no job can be in does not belong into the table."""
    first = next(iter(MOVES))[0]
    assert first is State.LAUNCHING
    assert reached(MOVES, first) | {first} == set(State)


def test_terminal_is_what_nothing_leaves() -> None:
    """Computed from the table, and the three ends that a person reads about."""
    assert {state for state, _ in MOVES}.isdisjoint(TERMINAL)
    assert {State.COMPLETED, State.FAILED, State.CANCELLED} == TERMINAL


def test_a_fault_in_any_phase_of_a_recovery_is_diagnosed() -> None:
    """There is no window in which a fault is lost: only the diagnosis itself goes on and takes it in."""
    for state in set(LIVE) - {State.DIAGNOSING, State.SUSPENDED}:  # a suspended job has no processes that could fail
        assert MOVES[state, Event.FAULTED] is State.DIAGNOSING


def test_only_a_finish_completes_and_only_a_request_or_the_time_limit_cancels() -> None:
    """A word from outside that we do not know is never done."""
    ends = {after: {event for (_, event), to in MOVES.items() if to is after} for after in TERMINAL}
    assert ends == {State.COMPLETED: {Event.FINISHED}, State.FAILED: {Event.FAILED}, State.CANCELLED: {Event.STOP_ASKED, Event.TIME_OVER}}


def test_no_event_is_idle() -> None:
    """One that moves nothing would be dead words in the docs."""
    assert {event for _, event in MOVES} == set(Event)


def test_every_event_has_the_sentence_that_the_docs_print() -> None:
    """The page of states takes it from the line under each member."""
    body = next(node.body for node in ast.parse(inspect.getsource(Event)).body if isinstance(node, ast.ClassDef))
    members = [at for at, node in enumerate(body) if isinstance(node, ast.Assign)]
    sentences = [body[at + 1] for at in members if at + 1 < len(body)]
    texts = [one.value.value for one in sentences if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
    assert len(members) == len(texts) == len(Event)
    assert all(isinstance(text, str) and text.endswith(".") for text in texts)


def test_states_are_stored_in_capitals_and_events_in_kebab_case() -> None:
    """As history and command line show them."""
    assert all(state.value == state.name for state in State)
    assert all(event.value == event.name.lower().replace("_", "-") for event in Event)


def test_a_refused_move_survives_pickling() -> None:
    """Prefect sends errors from process to process."""
    again = pickle.loads(pickle.dumps(UnlistedTransition(State.RUNNING, Event.PLACED)))  # noqa: S301 (our own bytes)
    assert (again.state, again.event) == (State.RUNNING, Event.PLACED)
    assert mentions(str(again), State.RUNNING, Event.PLACED)
