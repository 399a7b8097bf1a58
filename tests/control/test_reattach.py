"""The state of a generation some of whose processes are kept."""

from __future__ import annotations

from typing import Any

from holdfast.control.state.generation import GenerationState
from holdfast.control.supervisor import event_table
from holdfast.detectors.evidence import GroupFailure, ReplaceRanksFailure, WorkerExit
from holdfast.protocol import Message

MEMBERSHIP = {"a": [0, 1], "b": [2]}
HOME = {rank: node for node, ranks in MEMBERSHIP.items() for rank in ranks}


def an_event(name: str, rank: int, generation: int, **facts: Any) -> Message:
    """Return an event as an agent sends it."""
    return {"event": name, "rank": rank, "generation": generation, "at": 10.0, "pid": 100 + rank, **facts}


def an_exit(rank: int, generation: int, **facts: Any) -> Message:
    """Return the exit of a worker by SIGKILL."""
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
    """Change the state by what the agent of *node* sent."""
    event_table.change_state(board, node, event_table.parse(message), now)


def boards() -> tuple[GenerationState, GenerationState]:
    """Return a generation in which all use managed groups, and the next one, in which rank 2 is new."""
    before = GenerationState(1, MEMBERSHIP)
    for rank in range(3):
        take(before, HOME[rank], an_event("worker.started", rank, 1), 10.0)
        take(before, HOME[rank], an_event("worker.groups", rank, 1), 10.0)
        take(before, HOME[rank], an_event("worker.stepped", rank, 1, step=7, until=None), 10.0)
    after = GenerationState(2, MEMBERSHIP, since=1, kept=(0, 1))
    after.keep(before)
    return before, after


def test_a_kept_process_keeps_its_state_and_starts_with_the_agents_event() -> None:
    """Its groups can be recovered again; it has finished no step of the new generation."""
    before, after = boards()
    assert before.grouped()
    assert after.grouped()
    assert not after.all_started()
    assert after.step_before == 7
    for rank in (0, 1):
        take(after, "a", an_event("worker.kept", rank, 2, grouped=True), 11.0)
    take(after, "b", an_event("worker.started", 2, 2, hot_spare=4), 11.0)
    assert after.all_started()
    assert not after.all_stepped()


def test_a_rank_that_exited_unseen_does_not_change_the_others() -> None:
    """A later controller learns from the agents which running ranks use managed groups."""
    board = GenerationState(1, MEMBERSHIP)
    for rank in range(3):
        take(board, HOME[rank], an_event("worker.started", rank, 1), 10.0)
    take(board, "b", an_exit(2, 1), 10.0)
    assert not board.grouped()
    board.ranks[0].grouped = board.ranks[1].grouped = True
    assert board.grouped()


def test_the_exit_of_a_process_that_was_to_be_kept_counts_until_it_is() -> None:
    """Its agent reports it under the generation that it knew."""
    _, after = boards()
    take(after, "a", an_exit(1, 1), 11.0)
    assert [one.rank for one in after.evidence if isinstance(one, WorkerExit)] == [1]
    assert after.dead() == {1}


def test_the_exit_of_a_replaced_process_is_ignored() -> None:
    """And so is one of a rank that is kept already."""
    _, after = boards()
    take(after, "b", an_exit(2, 1), 11.0)
    take(after, "a", an_event("worker.kept", 0, 2), 11.0)
    take(after, "a", an_exit(0, 1), 11.0)
    assert after.evidence == []
    assert after.dead() == frozenset()


def test_aborted_groups_and_rejections_are_evidence() -> None:
    """Those of the previous generation are not."""
    _, after = boards()
    take(after, "a", an_event("worker.broken", 0, 1, step=7, group="0", why="on request"), 11.0)
    assert after.evidence == []
    take(after, "a", an_event("worker.broken", 0, 2, step=7, group="0", why="reset"), 11.0)
    take(after, "a", an_event("worker.recovery-failed", 1, 2, why="no copy"), 11.0)
    assert after.evidence == [
        GroupFailure(node="a", rank=0, at=10.0, why="reset", group="0", step=7),
        ReplaceRanksFailure(node="a", rank=1, at=10.0, why="no copy"),
    ]


def test_a_rank_that_has_switched_by_itself_is_noticed() -> None:
    """Until that is recorded, the generation is not what the controller assumes."""
    before, _ = boards()
    assert not before.is_ahead()
    take(before, "a", an_event("worker.switched", 0, 1, for_generation=2), 11.0)
    assert before.is_ahead()


def test_a_rank_that_was_not_reached_since_the_reattach_is_assumed_to_do_what_the_others_do() -> None:
    """Until its agent is reached; nothing is assumed where none is reached."""
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
