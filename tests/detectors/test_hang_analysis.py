"""Hang analysis: which rank blocks the others, for every combination of positions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from holdfast.detectors.evidence import GroupProgress, PendingOperation, Progress, RankProgress, RankStatus
from holdfast.detectors.training.hang_analysis import explain, operations
from tests.detectors.evidence_of import seen, the_fault
from tests.mentions import mentions

STEADY = (0.3,) * 8


def work(number: int, name: str = "allreduce", *, way: str = "", size: int = 64, seconds: float = 4.2) -> PendingOperation:
    """Return a pending operation."""
    return PendingOperation(way=way, number=number, name=name, size=size, kind="float32", seconds=seconds)


def member(*pending: PendingOperation, ranks: tuple[int, ...] = (0, 1, 2), name: str = "dp", **counts: Any) -> GroupProgress:
    """Return a rank's progress in a group: up to its pending operations, or as *counts* (``all``, ``to_1``, ``from_1``) say."""
    way_operations = {
        "all": "",
        **{f"to_{rank}": f"send>{rank}" for rank in range(4)},
        **{f"from_{rank}": f"recv<{rank}" for rank in range(4)},
    }
    begun = {one.way: one.number for one in pending} | {way_operations[way]: number for way, number in counts.items()}
    return GroupProgress(name=name, ranks=ranks, counts=begun, pending=pending)


def status(*groups: GroupProgress, waits: str = "", place: str = "train.py:31 in load") -> RankStatus:
    """Return a rank's status."""
    return RankStatus(waits=waits, seconds=4.2 if waits else 0.0, groups=groups, place=place)


def ranks(*standings: RankStatus | None, age: float = 900.0, process: str = "S") -> dict[int, RankProgress]:
    """Return ranks that stand like this, each on a node of its own; one without a standing did not answer."""
    return {
        rank: RankProgress(node=f"node-{rank}", step=40, age=age, status=one, process=process if one is None else "S")
        for rank, one in enumerate(standings)
    }


def quiet(*standings: RankStatus | None, **facts: object) -> Progress:
    """Return a job that has been quiet for long, whose ranks stand like this."""
    return Progress(at=100.0, ranks=ranks(*standings, **facts), step_seconds=STEADY, status_requested=True)  # type: ignore[arg-type]


WAITS = status(member(work(812)), waits="gradients")


def test_the_rank_that_did_not_arrive_is_named_with_the_collective_and_where_it_stands() -> None:
    """The words are those that a person needs: who, where, at what, who waits, and in which line."""
    fault = the_fault(quiet(WAITS, status(member(all=811)), WAITS))
    assert (fault.kind, fault.rank, fault.node, fault.step) == ("job-hang", 1, "node-1", 40)
    assert mentions(fault.quote, "rank 1 on node-1", "allreduce #812 of group dp", "ranks 0, 2", "4.2 s", "train.py:31 in load")
    assert mentions(fault.detail, "rank 0 on node-0", "gradients", "4.2 s")


def test_a_rank_that_does_not_answer_is_the_culprit_with_what_the_kernel_says() -> None:
    """It is stopped, or holds the interpreter's lock: its silence counts as not having arrived."""
    fault = the_fault(quiet(WAITS, WAITS, None, process="D"))
    assert (fault.kind, fault.rank) == ("job-hang", 2)
    assert mentions(fault.quote, "rank 2", "process state D")


def test_a_chain_of_waits_ends_at_its_cause() -> None:
    """Rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another: rank 2 is it, although nobody else waits for it."""
    pair, other = {"ranks": (0, 1), "name": "a"}, {"ranks": (1, 2), "name": "b"}
    first = status(member(work(5), **pair), waits="collective")  # type: ignore[arg-type]
    second = status(member(**pair, all=4), member(work(7), **other), waits="collective")  # type: ignore[arg-type]
    third = status(member(**other, all=6))  # type: ignore[arg-type]
    finding = explain(ranks(first, second, third))
    assert finding is not None
    assert (finding.kind, finding.rank) == ("", 2)


def test_a_stage_that_waits_for_what_was_not_sent_names_the_sender() -> None:
    """Receives are compared with the sends of the other end, not with the group's collectives."""
    waits = status(member(work(3, "recv", way="recv<1"), from_1=3), waits="pipeline")
    finding = explain(ranks(waits, status(member(to_0=2)), waits_for(1)))
    assert finding is not None
    assert finding.rank == 1
    assert mentions(finding.quote, "recv #3 of group dp", "from rank 1")


def waits_for(rank: int) -> RankStatus:
    """Return a rank that waits for something that *rank* has not sent."""
    return status(member(work(1, "recv", way=f"recv<{rank}")), waits="pipeline")


def test_what_was_sent_and_never_waited_for_is_no_wait() -> None:
    """The other end has taken it: the sender may be anywhere since."""
    sender = status(member(work(2, "send", way="send>1")))
    assert explain(ranks(sender, status(member(from_0=2)), status(member()))) is None


def test_ranks_that_have_voted_wait_for_those_that_have_not() -> None:
    """The vote does not go through a group."""
    voted = status(member(all=9), waits="vote")
    finding = explain(ranks(voted, voted, status(member(all=9), place="train.py:90 in save")))
    assert finding is not None
    assert finding.rank == 2
    assert mentions(finding.quote, "vote")


def test_all_missing_ranks_are_reported() -> None:
    """One is accused, the others are named."""
    late = status(member(all=811))
    finding = explain(ranks(WAITS, late, late))
    assert finding is not None
    assert finding.rank == 1
    assert "neither did rank 2" in finding.quote


def test_another_operation_under_the_same_number_is_the_scripts_mistake() -> None:
    """The odd one out is named; both sides are shown with their sizes."""
    odd = status(member(work(812, "broadcast", size=4)), waits="collective", place="train.py:50 in eval")
    fault = the_fault(quiet(WAITS, WAITS, odd))
    assert (fault.kind, fault.rank) == ("collective-mismatch", 2)
    assert mentions(fault.quote, "rank 2", "broadcast of 4 float32", "#812 of group dp", "ranks 0, 1", "allreduce of 64")


def test_another_size_under_the_same_number_is_a_mistake_where_sizes_must_agree() -> None:
    """An all-gather of uneven parts is none."""
    fault = the_fault(quiet(WAITS, status(member(work(812, size=65)), waits="gradients"), WAITS))
    assert (fault.kind, fault.rank) == ("collective-mismatch", 1)
    uneven = [status(member(work(5, "allgather", size=size)), waits="shards") for size in (8, 8, 7)]
    assert the_fault(quiet(*uneven)).kind == "collective-stuck"


def test_two_that_disagree_have_no_majority() -> None:
    """Nobody is accused."""
    mine, other = (status(member(work(3, name), ranks=(0, 1))) for name in ("allreduce", "broadcast"))
    fault = the_fault(quiet(mine, other))
    assert (fault.kind, fault.rank, fault.node) == ("collective-mismatch", None, None)


def test_ranks_that_wait_for_each_other_in_different_groups_are_a_deadlock() -> None:
    """Nobody is waited for who does not wait: the cycle is described, step by step."""
    one = status(member(work(3), ranks=(0, 1), name="a"), member(ranks=(0, 1), name="b", all=5))
    other = status(member(ranks=(0, 1), name="a", all=2), member(work(6), ranks=(0, 1), name="b"))
    fault = the_fault(quiet(one, other))
    assert (fault.kind, fault.rank) == ("collective-deadlock", None)
    first, _, second = fault.quote.partition("rank 1")
    assert mentions(first, "rank 0", "allreduce #3", "group a")
    assert mentions(second, "allreduce #6", "group b")


def test_a_collective_that_all_have_come_to_is_held_by_what_lies_between() -> None:
    """Only once it has taken a while: all may have come this very moment."""
    assert the_fault(quiet(WAITS, WAITS, WAITS)).kind == "collective-stuck"
    fresh = status(member(work(812, seconds=0.2)), waits="gradients")
    assert the_fault(quiet(fresh, fresh, fresh)).kind == "job-hang"


def test_without_counted_operations_the_stack_shows_who_waits() -> None:
    """Groups of torch's own: all but one are inside of a collective."""
    inside = RankStatus(waits="collective", place="train.py:40 in step")
    fault = the_fault(quiet(inside, RankStatus(place="train.py:31 in load"), inside))
    assert (fault.kind, fault.rank) == ("job-hang", 1)
    assert mentions(fault.quote, "rank 1 on node-1", "ranks 0, 2")


@pytest.mark.parametrize(("odd", "others"), [("", "backward"), ("backward", "collective"), ("data", "backward")])
def test_a_rank_in_backward_works_or_waits_as_the_others_have_it(odd: str, others: str) -> None:
    """DDP waits inside of backward."""
    finding = explain(ranks(RankStatus(waits=others), RankStatus(waits=others), RankStatus(waits=odd, place="train.py:9 in load")))
    assert finding is not None
    assert finding.rank == 2


def test_where_the_standings_say_nothing_the_first_suspect_is_named_as_before() -> None:
    """All are in backward, which may be work or a wait."""
    inside = RankStatus(waits="backward", place="train.py:41 in step")
    fault = the_fault(quiet(inside, inside, inside))
    assert fault.kind == "job-hang"
    assert mentions(fault.quote, "first suspect")


def test_a_culprit_that_is_known_spares_the_time_to_react_and_no_more() -> None:
    """The limit is 2 s: what is known is answered a quarter of a second before, what is not only after it."""
    late = status(member(all=811))
    assert seen(quiet(WAITS, late, WAITS, age=1.7), hang=2.0) == []
    assert the_fault(quiet(WAITS, late, WAITS, age=1.8), hang=2.0).rank == 1
    assert seen(quiet(late, late, late, age=1.99), hang=2.0) == []


def test_a_long_step_in_which_operations_begin_is_no_hang() -> None:
    """Until it has taken several limits: a loop that never ends begins operations too."""
    late = status(member(all=811))
    for age, faults in ((4.0, 0), (9.9, 0), (10.1, 1)):
        progress = Progress(at=100.0, ranks=ranks(WAITS, late, WAITS, age=age), step_seconds=STEADY, moved=0.5, status_requested=True)
        assert len(seen(progress, hang=2.0)) == faults
    stale = Progress(at=100.0, ranks=ranks(WAITS, late, WAITS, age=4.0), step_seconds=STEADY, moved=2.1, status_requested=True)
    assert len(seen(stale, hang=2.0)) == 1


def test_a_declared_section_is_not_judged_by_where_ranks_stand() -> None:
    """Rank 1 evaluates; the others wait for it as they should."""
    held = ranks(WAITS, status(member(all=811)), WAITS, age=600.0)
    held[1] = RankProgress(node="node-1", step=40, age=600.0, section="evaluation", status=held[1].status)
    assert seen(Progress(at=100.0, ranks=held, step_seconds=STEADY, status_requested=True)) == []


def test_a_first_step_that_does_not_come_names_its_culprit_too() -> None:
    """The limit is that of the first step."""
    late = status(member(all=0))
    fault = the_fault(Progress(at=0.0, ranks=ranks(WAITS, late, WAITS, age=1900.0), since_start=1900.0, status_requested=True))
    assert (fault.kind, fault.rank) == ("job-never-stepped", 1)


@pytest.mark.parametrize("culprit", range(4))
def test_a_ring_of_stages_names_the_one_that_stopped(culprit: int) -> None:
    """Each stage waits for the one before it; who stopped first sent nothing on."""
    held: list[RankStatus] = []
    for rank in range(4):
        before, sent = (rank - 1) % 4, {f"to_{(rank + 1) % 4}": 1}
        pending = [] if rank == culprit else [work(2, "recv", way=f"recv<{before}")]
        held.append(status(member(*pending, ranks=(0, 1, 2, 3), name="pp", **sent)))
    finding = explain(ranks(*held))
    assert finding is not None
    assert (finding.kind, finding.rank) == ("", culprit)


def test_two_looks_differ_as_soon_as_an_operation_begins() -> None:
    """What has only gone on waiting is the same."""
    looks = [[status(member(work(number, seconds=seconds)))] for number, seconds in ((7, 0.1), (7, 3.0), (8, 0.0))]
    same = [operations(one) == operations(other) for one, other in pairwise(looks)]
    assert same == [True, False]


EVALUATES = status(member(all=811), place="train.py:88 in evaluate")
HURRY = [
    ("rank 0 evaluates", quiet(EVALUATES, WAITS, WAITS, age=30.0), None),
    ("rank 0 is stopped", quiet(None, WAITS, WAITS, age=30.0, process="T"), "job-hang"),
    ("rank 0 answers nothing: it holds the interpreter's lock, or saves", quiet(None, WAITS, WAITS, age=30.0, process="D"), None),
    ("another collective", quiet(status(member(work(812, "broadcast"))), WAITS, WAITS, age=30.0), "collective-mismatch"),
    ("another collective since a moment", quiet(status(member(work(812, "broadcast", seconds=0.1))), WAITS, WAITS, age=30.0), None),
    ("all have come", quiet(WAITS, WAITS, WAITS, age=30.0), "collective-stuck"),
    ("all have come just now", quiet(*[status(member(work(812, seconds=1.2)), waits="gradients")] * 3, age=30.0), None),
]


@pytest.mark.parametrize(("progress", "kind"), [pytest.param(*rest, id=name) for name, *rest in HURRY])
def test_only_what_proves_that_waiting_is_in_vain_is_acted_on_at_once(progress: Progress, kind: str | None) -> None:
    """Who does not come may evaluate, save or compile; who is stopped, and who waits for another operation, will not come."""
    assert [fault.kind for fault in seen(progress)] == ([kind] if kind else [])


def in_section(before: Progress, *which: int) -> Progress:
    """Return *before* with these ranks in a declared section."""
    held = {rank: replace(one, section="save" if rank in which else None) for rank, one in before.ranks.items()}
    return replace(before, ranks=held)


def test_who_waits_in_a_section_for_a_rank_that_is_in_none_is_given_no_longer_than_in_a_step() -> None:
    """A section has its limit for its own work; the rank that does not come to it is found all the same."""
    stuck = quiet(WAITS, status(member(all=811)), WAITS)
    assert (the_fault(in_section(stuck, 0, 2)).kind, the_fault(in_section(stuck, 0, 2)).rank) == ("job-hang", 1)
    assert seen(in_section(stuck, 1)) == [], "it works in a section, and the others wait for it"
    assert seen(in_section(stuck, 0, 1, 2)) == []
    assert seen(replace(in_section(stuck, 0, 2), status_requested=False)) == [], "nobody knows who waits for whom"


def test_ranks_that_can_never_meet_are_found_in_sections_too_and_a_long_exchange_is_given_time() -> None:
    """A mismatch proves a deadlock; that a collective takes long does not, as a section may exchange the whole model."""
    mismatch = quiet(WAITS, status(member(work(812, "broadcast"))), WAITS, age=30.0)
    assert the_fault(in_section(mismatch, 0, 1, 2)).kind == "collective-mismatch"
    assert the_fault(quiet(WAITS, WAITS, WAITS, age=30.0)).kind == "collective-stuck"
    assert seen(in_section(quiet(WAITS, WAITS, WAITS, age=30.0), 0, 1, 2)) == []
    assert the_fault(in_section(quiet(WAITS, WAITS, WAITS, age=900.0), 0, 1, 2)).kind == "collective-stuck"


def test_a_collective_that_one_rank_alone_cannot_finish_is_the_networks() -> None:
    """What the others sent does not reach it: they wait for it at the next collective, or at a meeting that is no operation of a group."""
    left = status(member(work(811)), waits="gradients")
    on = status(member(work(812)), waits="gradients")
    meeting = status(member(all=811), waits="collective")
    for others in (on, meeting):
        fault = the_fault(quiet(others, left, others, age=30.0))
        assert (fault.kind, fault.rank, fault.node) == ("collective-stuck", 1, "node-1")
        assert mentions(
            fault.quote, "allreduce of 64 float32 values", "#811 of group dp", "rank 1 on node-1", "ranks 0, 2 have finished it"
        )
    assert explain(ranks(on, status(member(work(811, seconds=0.2))), on)).kind == "", "it has only just begun to wait"  # type: ignore[union-attr]
    assert explain(ranks(on, left, None)).kind == "", "rank 2 does not answer: it may hold the others up"  # type: ignore[union-attr]
