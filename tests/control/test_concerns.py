"""What a board tells of trouble that training goes on through, and when the ranks are asked where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from detectors.catalogue import Fault, RecommendedAction, RecommendedActions
from detectors.diagnosis import see
from detectors.evidence import HangLimits, NonFiniteLoss, ReplicaDigests
from holdfast.control.faults.alerts import HEARD, PAUSE, Alerts
from holdfast.control.faults.rank_status import RankStatusQuery, parse_rank_status
from holdfast.control.state.generation import GenerationState, Roles
from holdfast.control.supervisor import event_table
from holdfast.protocol import Message
from tests.control.test_board import BEAT

ALL: Roles = ((0, 1, 2),)


class Watched:
    """A board of three ranks, each on a node of its own, and who looks at it."""

    def __init__(self) -> None:
        self.board, self.concerns, self.now = GenerationState(1, {"a": [0], "b": [1], "c": [2]}), Alerts(), 100.0
        for rank, node in enumerate("abc"):
            self.hear(node, "worker.started", rank=rank, pid=100 + rank)
            self.hear(node, "worker.stepped", rank=rank, step=1, until=None)

    def hear(self, node: str, event: str, **facts: Any) -> None:
        """Have the board hear an event."""
        event_table.change_state(self.board, node, event_table.parse({"event": event, "generation": 1, "at": self.now, **facts}), self.now)

    def beat(self, rank: int, **facts: Any) -> None:
        """Have the board hear a beat of one rank."""
        self.hear("abc"[rank], "heartbeats", ranks={str(rank): BEAT | facts})

    def check(self, step: int, *digests: str, shard: str = "p") -> None:
        """Have every rank tell its digest."""
        for rank, digest in enumerate(digests):
            self.beat(rank, checks=[{"step": step, "digest": digest, "shard": shard}])

    def poll(self, seconds: float = PAUSE) -> list[Fault]:
        """Return what is told after so many seconds more."""
        self.now += seconds
        good = "there is one of step 50".__str__
        return list(self.concerns.poll(self.board, self.now, roles=ALL, limits=HangLimits(), good=lambda _step: good()))

    def acts(self) -> list[ReplicaDigests]:
        """Return the evidence that asks the flow to act."""
        return [one for one in self.board.evidence if isinstance(one, ReplicaDigests)]


@pytest.fixture
def watched() -> Watched:
    """Give a board and who looks at it."""
    return Watched()


def test_a_rank_that_alone_has_a_bad_loss_is_said_to_have_it_alone(watched: Watched) -> None:
    """Once the others have had the time to tell of theirs."""
    watched.hear("b", "worker.loss", rank=1, step=7, loss=math.nan)
    assert watched.poll(HEARD / 2) == []
    (fault,) = watched.poll(HEARD)
    assert (fault.kind, fault.rank, fault.step) == ("loss-not-finite", 1, 7)
    assert "alone; there is one of step 50" in fault.quote
    assert watched.poll() == []


def test_whose_loss_was_bad_first_is_told_before_it_is_acted_on_that_all_are(watched: Watched) -> None:
    """Steps may be so quick that the loss is given up before other ranks had the time to say that theirs is bad too."""
    steps = [[step, watched.now, 0.02, 1.0 if step < 20 else math.nan] for step in range(2, 26)]
    watched.hear("a", "steps", steps=steps)
    watched.hear("b", "worker.loss", rank=1, step=20, loss=math.nan)
    assert watched.poll(0.2) == []
    assert watched.board.evidence == []
    told = watched.poll(HEARD)
    assert [(fault.kind, fault.rank) for fault in told] == [("loss-not-finite", 1)]
    watched.poll()
    assert [fault.kind for fault in see(watched.board.evidence, HangLimits())] == ["loss-lost"]


def test_a_bad_loss_of_all_is_told_once_by_its_first_step_and_rank(watched: Watched) -> None:
    """The steps that follow are echoes."""
    for rank, step in ((2, 7), (0, 7), (1, 8)):
        watched.hear("abc"[rank], "worker.loss", rank=rank, step=step, loss=math.inf)
        watched.poll(HEARD / 5)
    (fault,) = watched.poll(HEARD)
    assert (fault.rank, fault.step) == (0, 7)
    assert "alone" not in fault.quote


def test_a_liar_among_copies_is_named_with_the_tensor_that_differs(watched: Watched) -> None:
    """The ranks are asked for their sums first; the verdict is evidence for the flow to act on."""
    watched.check(16, "x", "x", "x")
    assert watched.poll() == []
    watched.check(32, "x", "y", "x")
    assert watched.poll(0.2) == []
    assert list(watched.concerns.checksum_requests(watched.board)) == [(32, frozenset({0, 1, 2}))]
    assert list(watched.concerns.checksum_requests(watched.board)) == []
    for rank, last in enumerate((3, 9, 3)):
        watched.hear("abc"[rank], "worker.checksums", rank=rank, said={"step": 32, "sums": {"w.0": 1, "w.1": last}})
    assert watched.poll(0.2) == []
    (seen,) = watched.acts()
    assert (seen.step, seen.sums[1]["w.1"], seen.equal_at, seen.good) == (32, 9, 16, "there is one of step 50")


def test_ranks_that_do_not_answer_hold_no_verdict_up(watched: Watched) -> None:
    """It is told without the tensor."""
    watched.check(32, "x", "y", "x")
    watched.poll(0.2)
    assert watched.acts() == []
    watched.poll(HEARD)
    assert [one.digests[1] for one in watched.acts()] == ["y"]


def test_ranks_of_different_pieces_are_not_compared(watched: Watched) -> None:
    """Shards and stages differ as they should."""
    for rank in range(3):
        watched.beat(rank, checks=[{"step": 32, "digest": f"d{rank}", "shard": f"p{rank}"}])
    watched.poll(), watched.poll()
    assert watched.acts() == []


def test_where_nobody_knows_the_copies_they_are_those_that_were_equal_for_a_while(watched: Watched) -> None:
    """Ranks that differed from the begin are no copies; those that were equal at two checks are."""
    watched.check(16, "a", "b", "a", shard="")
    watched.check(32, "c", "d", "c", shard="")
    watched.poll()
    watched.check(48, "e", "f", "g", shard="")
    watched.poll()
    assert watched.poll(HEARD)[0].kind == "copies-differ"


def test_a_check_waits_until_all_have_told_of_it(watched: Watched) -> None:
    """Ranks check at different distances; beats come at different times."""
    watched.check(32, "x", "y")
    watched.poll(), watched.poll()
    assert watched.acts() == []
    watched.check(48, "x", "x")
    watched.beat(2, checks=[{"step": 32, "digest": "x", "shard": "p"}])
    watched.poll(), watched.poll()
    assert [one.step for one in watched.acts()] == [32]


def test_parameters_that_never_change_are_told_once(watched: Watched) -> None:
    """Three checks in a row."""
    for step in (16, 32):
        watched.check(step, "x", "x", "x")
    assert watched.poll() == []
    watched.check(48, "x", "x", "x")
    assert [fault.kind for fault in watched.poll()] == ["job-zombie"]
    watched.check(64, "x", "x", "x")
    assert watched.poll() == []


def test_a_straggler_explains_a_job_that_became_slower(watched: Watched) -> None:
    """It is told by name and not a second time as slow steps."""
    for block in range(24):
        for rank in range(3):
            slow = rank == 1 and block >= 12
            own, talk = (0.6, 0.02) if slow else (0.3, 0.32 if block >= 12 else 0.02)
            watched.beat(rank, paces=[[block, own, talk, 0.0]])
        steps = [(block * 8 + place, watched.now, 0.62 if block >= 12 else 0.32, 3.0 - block / 100 - place / 1e4) for place in range(8)]
        watched.hear("a", "steps", steps=steps)
    faults = [watched.poll() for _ in range(3)]
    assert [(fault.kind, fault.rank) for some in faults for fault in some] == [("straggler-gpu", 1)]


@pytest.mark.parametrize("overloaded", [False, True])
def test_slow_links_are_not_told_of_nodes_with_more_work_than_processors(watched: Watched, *, overloaded: bool) -> None:
    """Who moves data waits for a processor there."""
    if overloaded:
        watched.board.node_faults.append(Fault(kind="host-overloaded", at=1.0, node="b", quote="load 14 on 2 processors"))
    for block in range(24):
        for rank in range(3):
            watched.beat(rank, paces=[[block, 0.3, 0.3 if block >= 12 else 0.05, 0.0]])
    faults = [watched.poll() for _ in range(3)]
    assert [fault.kind for some in faults for fault in some] == ([] if overloaded else ["straggler-network"])


class Fleet:
    """Writes down what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Message]] = []

    def alive(self) -> list[str]:
        """Return the nodes that can be asked."""
        return ["a", "b"]

    def send_commands_async(self, by_node: Mapping[str, Mapping[str, Any]], verb: str) -> None:
        """Take orders."""
        self.asked += [(node, {"do": verb, **facts}) for node, facts in by_node.items()]


def test_ranks_are_asked_when_they_have_been_quiet_for_half_of_the_limit_and_not_too_often(watched: Watched) -> None:
    """Nodes that cannot be asked are left out; what is told is of use until the next sign of progress."""
    fleet, limits = Fleet(), HangLimits()
    roll = RankStatusQuery(fleet)  # type: ignore[arg-type]
    for rank in range(3):
        watched.beat(rank)
    watched.hear("a", "steps", steps=[(step, watched.now, 0.1, None) for step in range(1, 9)])
    begin = watched.now
    for tenth in range(1, 19):
        seen = watched.board.progress(begin + tenth / 10, steps_expected=True)
        assert seen is not None
        roll.poll(watched.board, seen, limits)
        if tenth == 9:
            assert fleet.asked == []
    assert [node for node, _ in sorted(fleet.asked, key=lambda one: one[0])] == ["a"] * 2 + ["b"] * 2
    said = {"waits": "vote", "seconds": 1.0, "groups": [], "place": "train.py:3 in step"}
    watched.now = begin + 1.8
    watched.hear("a", "worker.rank-status", rank=0, said=said)
    seen = watched.board.progress(begin + 1.9, steps_expected=True)
    assert seen is not None
    assert seen.status_requested
    assert seen.ranks[0].status is not None
    watched.now = begin + 2.0
    watched.hear("a", "steps", steps=[(9, watched.now, 0.1, None)])
    after = watched.board.progress(begin + 2.1, steps_expected=True)
    assert after is not None
    assert after.ranks[0].status is None


def test_operations_that_begin_between_two_answers_are_a_sign_of_progress(watched: Watched) -> None:
    """A long step that gets on is told from one that does not."""
    for rank in range(3):
        watched.beat(rank)

    def answer(number: int, seconds: float) -> float | None:
        watched.now += 0.5
        group = {"name": "0", "ranks": {"first": 0, "pace": 1, "count": 3}, "counts": {"": number}, "pending": []}
        watched.hear("a", "worker.rank-status", rank=0, said={"groups": [group], "seconds": seconds})
        seen = watched.board.progress(watched.now, steps_expected=True)
        assert seen is not None
        return seen.moved

    assert answer(7, 0.1) is None
    assert answer(7, 0.6) is None
    assert answer(8, 0.0) == 0.0
    assert answer(8, 0.5) == 0.5


@pytest.mark.parametrize("said", [{"groups": 7}, {"groups": [{"name": "x"}]}, {"seconds": "long"}, {"groups": [None]}])
def test_an_answer_that_cannot_be_understood_is_none(said: Message) -> None:
    """Workers of another version may say anything."""
    assert parse_rank_status(said) is None


def test_a_bad_loss_that_a_policy_makes_act_is_evidence_and_no_mere_word(watched: Watched) -> None:
    """Once; under the catalogue's level it is told of, and training goes on."""
    watched.concerns = Alerts(lambda: RecommendedActions(changed={"loss-not-finite": RecommendedAction.RESTART}))
    watched.hear("b", "worker.loss", rank=1, step=7, loss=math.nan)
    assert [fault.kind for _ in range(4) for fault in watched.poll(HEARD)] == []
    assert [type(one) for one in watched.board.evidence] == [NonFiniteLoss]
    assert [fault.kind for fault in see(watched.board.evidence, HangLimits())] == ["loss-not-finite"]


def test_where_all_ranks_have_ended_no_copies_are_compared(watched: Watched) -> None:
    """What they told last is still on the board: of a job that has just finished, or whose workers all died at once."""
    watched.check(16, "x", "x", "x")
    for rank, node in enumerate("abc"):
        end = {"ended": watched.now, "code": 0, "signal": None, "step": 16, "raised": None, "finished": True, "ordered": False}
        watched.hear(node, "worker.exited", rank=rank, pid=100 + rank, oom=None, oom_blind=None, output="", **end)
    assert all(view.ended for view in watched.board.ranks.values())
    assert watched.poll() == []
