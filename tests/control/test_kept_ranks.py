"""The board of a generation whose processes partly live on."""

from __future__ import annotations

from typing import Any

from detectors.evidence import GroupFailure, ReplaceRanksFailure, WorkerExit
from holdfast.control.state.generation import GenerationState
from holdfast.control.supervisor import event_table
from holdfast.protocol import Message

MEMBERSHIP = {"a": [0, 1], "b": [2]}
HOME = {rank: node for node, ranks in MEMBERSHIP.items() for rank in ranks}


def an_event(name: str, rank: int, generation: int, **facts: Any) -> Message:
    """Return an event as an agent tells it."""
    return {"event": name, "rank": rank, "generation": generation, "at": 10.0, "pid": 100 + rank, **facts}


def an_exit(rank: int, generation: int, **facts: Any) -> Message:
    """Return the end of a worker by SIGKILL."""
    end = {
        "ended": 9.0,
        "code": None,
        "signal": 9,
        "step": 7,
        "raised": None,
        "finished": False,
        "oom": None,
        "oom_blind": None,
        "output": "",
    }
    return an_event("worker.exited", rank, generation, ordered=False, **{**end, **facts})


def take(board: GenerationState, node: str, message: Message, now: float) -> None:
    """Have the board take in what the agent of *node* sent."""
    event_table.change_state(board, node, event_table.parse(message), now)


def boards() -> tuple[GenerationState, GenerationState]:
    """Return a generation in which all have told of their groups, and the next one, in which rank 2 is new."""
    before = GenerationState(1, MEMBERSHIP)
    for rank in range(3):
        take(before, HOME[rank], an_event("worker.started", rank, 1), 10.0)
        take(before, HOME[rank], an_event("worker.groups", rank, 1), 10.0)
        take(before, HOME[rank], an_event("worker.stepped", rank, 1, step=7, until=None), 10.0)
    after = GenerationState(2, MEMBERSHIP, since=1, kept=(0, 1))
    after.keep(before)
    return before, after


def test_who_lives_on_keeps_what_was_known_of_it_and_starts_with_the_agents_word() -> None:
    """Its groups can be mended again; it has done no step of the new generation."""
    before, after = boards()
    assert before.grouped()
    assert after.grouped()
    assert not after.all_started()
    assert after.step_before == 7
    for rank in (0, 1):
        take(after, "a", an_event("worker.kept", rank, 2, grouped=True), 11.0)
    take(after, "b", an_event("worker.started", 2, 2, standby=4), 11.0)
    assert after.all_started()
    assert not after.all_stepped()


def test_a_rank_that_ended_unseen_leaves_the_others_what_they_are() -> None:
    """A flow that comes later hears from the agents which of those that live have groups that can be mended."""
    board = GenerationState(1, MEMBERSHIP)
    for rank in range(3):
        take(board, HOME[rank], an_event("worker.started", rank, 1), 10.0)
    take(board, "b", an_exit(2, 1), 10.0)
    assert not board.grouped()
    board.ranks[0].grouped = board.ranks[1].grouped = True
    assert board.grouped()


def test_the_end_of_a_process_that_was_to_be_kept_counts_until_it_is() -> None:
    """Its agent tells of it under the generation that it knew."""
    _, after = boards()
    take(after, "a", an_exit(1, 1), 11.0)
    assert [one.rank for one in after.evidence if isinstance(one, WorkerExit)] == [1]
    assert after.dead() == {1}


def test_the_end_of_a_process_that_was_replaced_is_an_old_story() -> None:
    """And so is one of a rank that is kept already."""
    _, after = boards()
    take(after, "b", an_exit(2, 1), 11.0)
    take(after, "a", an_event("worker.kept", 0, 2), 11.0)
    take(after, "a", an_exit(0, 1), 11.0)
    assert after.evidence == []
    assert after.dead() == frozenset()


def test_broken_groups_and_refusals_are_evidence() -> None:
    """What belongs to the generation before is none."""
    _, after = boards()
    take(after, "a", an_event("worker.broken", 0, 1, step=7, group="0", why="told to"), 11.0)
    assert after.evidence == []
    take(after, "a", an_event("worker.broken", 0, 2, step=7, group="0", why="reset"), 11.0)
    take(after, "a", an_event("worker.recovery-failed", 1, 2, why="no copy"), 11.0)
    assert after.evidence == [
        GroupFailure(node="a", rank=0, at=10.0, why="reset", group="0", step=7),
        ReplaceRanksFailure(node="a", rank=1, at=10.0, why="no copy"),
    ]


def test_a_rank_that_went_over_by_itself_is_seen() -> None:
    """Until that is on record, the generation is not what the flow thinks."""
    before, _ = boards()
    assert not before.is_ahead()
    take(before, "a", an_event("worker.switched", 0, 1, for_generation=2), 11.0)
    assert before.is_ahead()


def test_a_rank_that_nobody_could_ask_since_the_job_was_adopted_is_presumed_to_do_what_the_others_do() -> None:
    """Until it is heard of; nothing is presumed where none is heard of."""
    board = GenerationState(1, MEMBERSHIP)
    board.unseen = {0, 1, 2}
    assert (board.all_started(), board.all_stepped(), board.grouped()) == (False, False, False)
    for rank in (0, 1):
        for name in ("worker.started", "worker.groups", "worker.stepped"):
            take(board, "a", an_event(name, rank, 1, step=7, until=None), 10.0)
    assert board.unseen == {2}
    assert (board.all_started(), board.all_stepped(), board.grouped(), board.all_running()) == (True, True, True, True)
    take(board, "b", an_event("worker.started", 2, 1), 11.0)
    assert (board.all_started(), board.all_stepped(), board.grouped()) == (True, False, False)
