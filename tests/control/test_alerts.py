"""Alerts through which training continues, and when the ranks' status is queried."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.control.faults.evaluator import LONG_INTERVAL, REPORT_SECONDS, Alerts
from holdfast.control.faults.rank_status import RankStatusQuery, parse_rank_status
from holdfast.control.state.generation import GenerationState, Roles
from holdfast.control.supervisor import event_table
from holdfast.detectors.catalogue import Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import HangLimits, NonFiniteLoss, ReplicaDigests
from holdfast.protocol import Message
from tests.control.test_generation_state import BEAT
from tests.mentions import mentions

ALL: Roles = ((0, 1, 2),)


class Watched:
    """The state of three ranks, each on a node of its own, and its alerts."""

    def __init__(self) -> None:
        self.board, self.concerns, self.now = GenerationState(1, {"a": [0], "b": [1], "c": [2]}), Alerts(), 100.0
        for rank, node in enumerate("abc"):
            self.receive(node, "worker.started", rank=rank, pid=100 + rank)
            self.receive(node, "worker.stepped", rank=rank, step=1, until=None)

    def receive(self, node: str, event: str, **facts: Any) -> None:
        """Change the state by an event."""
        event_table.change_state(self.board, node, event_table.parse({"event": event, "generation": 1, "at": self.now, **facts}), self.now)

    def beat(self, rank: int, **facts: Any) -> None:
        """Change the state by a heartbeat of one rank."""
        self.receive("abc"[rank], "heartbeats", ranks={str(rank): BEAT | facts})

    def check(self, step: int, *digests: str, shard: str = "p") -> None:
        """Have every rank report its digest."""
        for rank, digest in enumerate(digests):
            self.beat(rank, checks=[{"step": step, "digest": digest, "shard": shard}])

    def poll(self, seconds: float = LONG_INTERVAL) -> list[Fault]:
        """Return what is reported after so many seconds more."""
        self.now += seconds
        good = "there is one of step 50".__str__
        return list(self.concerns.poll(self.board, self.now, roles=ALL, limits=HangLimits(), good=lambda _step: good()))

    def acts(self) -> list[ReplicaDigests]:
        """Return the evidence that calls for an action."""
        return [one for one in self.board.evidence if isinstance(one, ReplicaDigests)]


@pytest.fixture
def watched() -> Watched:
    """Return such a state with its alerts."""
    return Watched()


def test_a_non_finite_loss_of_one_rank_is_reported_as_its_only_one(watched: Watched) -> None:
    """Once the others have had the time to report theirs."""
    watched.receive("b", "worker.loss", rank=1, step=7, loss=math.nan)
    assert watched.poll(REPORT_SECONDS / 2) == []
    (fault,) = watched.poll(REPORT_SECONDS)
    assert (fault.kind, fault.rank, fault.step) == ("loss-not-finite", 1, 7)
    assert mentions(fault.quote, "step 50")
    assert watched.poll() == []


def test_the_first_rank_with_a_bad_loss_is_reported_before_the_loss_of_all_is_acted_on(watched: Watched) -> None:
    """Steps may be so short that the loss diverges before other ranks had the time to report theirs."""
    steps = [[step, watched.now, 0.02, 1.0 if step < 20 else math.nan] for step in range(2, 26)]
    watched.receive("a", "steps", steps=steps)
    watched.receive("b", "worker.loss", rank=1, step=20, loss=math.nan)
    assert watched.poll(0.2) == []
    assert watched.board.evidence == []
    reported = watched.poll(REPORT_SECONDS)
    assert [(fault.kind, fault.rank) for fault in reported] == [("loss-not-finite", 1)]
    watched.poll()
    assert [fault.kind for fault in see(watched.board.evidence, HangLimits())] == ["loss-diverged"]


def test_a_bad_loss_of_all_ranks_is_reported_once_with_its_first_step_and_rank(watched: Watched) -> None:
    """The following steps are secondary failures."""
    for rank, step in ((2, 7), (0, 7), (1, 8)):
        watched.receive("abc"[rank], "worker.loss", rank=rank, step=step, loss=math.inf)
        watched.poll(REPORT_SECONDS / 5)
    (fault,) = watched.poll(REPORT_SECONDS)
    assert (fault.rank, fault.step) == (0, 7)
    assert "alone" not in fault.quote


def test_the_replica_that_differs_is_named_with_the_tensor(watched: Watched) -> None:
    """The ranks are queried for their checksums first; the result is evidence to act on."""
    watched.check(16, "x", "x", "x")
    assert watched.poll() == []
    watched.check(32, "x", "y", "x")
    assert watched.poll(0.2) == []
    assert list(watched.concerns.checksum_requests(watched.board)) == [(32, frozenset({0, 1, 2}))]
    assert list(watched.concerns.checksum_requests(watched.board)) == []
    for rank, last in enumerate((3, 9, 3)):
        watched.receive("abc"[rank], "worker.checksums", rank=rank, said={"step": 32, "sums": {"w.0": 1, "w.1": last}})
    assert watched.poll(0.2) == []
    (seen,) = watched.acts()
    assert (seen.step, seen.sums[1]["w.1"], seen.equal_at) == (32, 9, 16)
    assert mentions(seen.good, "step 50")


def test_ranks_that_do_not_answer_delay_no_result(watched: Watched) -> None:
    """It is reported without the tensor."""
    watched.check(32, "x", "y", "x")
    watched.poll(0.2)
    assert watched.acts() == []
    watched.poll(REPORT_SECONDS)
    assert [one.digests[1] for one in watched.acts()] == ["y"]


def test_ranks_of_different_shards_are_not_compared(watched: Watched) -> None:
    """Shards and stages differ as they should."""
    for rank in range(3):
        watched.beat(rank, checks=[{"step": 32, "digest": f"d{rank}", "shard": f"p{rank}"}])
    watched.poll(), watched.poll()
    assert watched.acts() == []


def test_unknown_replicas_are_inferred_from_equal_digests(watched: Watched) -> None:
    """Ranks that differed from the beginning are no replicas; those that were equal at two checks are."""
    watched.check(16, "a", "b", "a", shard="")
    watched.check(32, "c", "d", "c", shard="")
    watched.poll()
    watched.check(48, "e", "f", "g", shard="")
    watched.poll()
    assert watched.poll(REPORT_SECONDS)[0].kind == "copies-differ"


def test_a_check_waits_until_all_ranks_have_reported_it(watched: Watched) -> None:
    """Ranks check at different steps; heartbeats arrive at different times."""
    watched.check(32, "x", "y")
    watched.poll(), watched.poll()
    assert watched.acts() == []
    watched.check(48, "x", "x")
    watched.beat(2, checks=[{"step": 32, "digest": "x", "shard": "p"}])
    watched.poll(), watched.poll()
    assert [one.step for one in watched.acts()] == [32]


def test_frozen_parameters_are_reported_once(watched: Watched) -> None:
    """After three consecutive checks."""
    for step in (16, 32):
        watched.check(step, "x", "x", "x")
    assert watched.poll() == []
    watched.check(48, "x", "x", "x")
    assert [fault.kind for fault in watched.poll()] == ["training-frozen"]
    watched.check(64, "x", "x", "x")
    assert watched.poll() == []


def test_a_straggler_explains_a_slower_job(watched: Watched) -> None:
    """It is reported by name, and not a second time as slow steps."""
    for block in range(24):
        for rank in range(3):
            slow = rank == 1 and block >= 12
            own, talk = (0.6, 0.02) if slow else (0.3, 0.32 if block >= 12 else 0.02)
            watched.beat(rank, step_timings=[[block, own, talk, 0.0]])
        steps = [(block * 8 + place, watched.now, 0.62 if block >= 12 else 0.32, 3.0 - block / 100 - place / 1e4) for place in range(8)]
        watched.receive("a", "steps", steps=steps)
    faults = [watched.poll() for _ in range(3)]
    assert [(fault.kind, fault.rank) for some in faults for fault in some] == [("straggler-gpu", 1)]


@pytest.mark.parametrize("overloaded", [False, True])
def test_slow_links_are_not_reported_on_overloaded_nodes(watched: Watched, *, overloaded: bool) -> None:
    """The data movers wait for a processor there."""
    if overloaded:
        watched.board.node_faults.append(Fault(kind="host-overloaded", at=1.0, node="b", quote="load 14 on 2 processors"))
    for block in range(24):
        for rank in range(3):
            watched.beat(rank, step_timings=[[block, 0.3, 0.3 if block >= 12 else 0.05, 0.0]])
    faults = [watched.poll() for _ in range(3)]
    assert [fault.kind for some in faults for fault in some] == ([] if overloaded else ["straggler-network"])


class QueriedAgents:
    """Records the queries."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Message]] = []

    def alive(self) -> list[str]:
        """Return the reachable nodes."""
        return ["a", "b"]

    def send_commands_async(self, by_node: Mapping[str, Mapping[str, Any]], verb: str) -> None:
        """Record the commands."""
        self.asked += [(node, {"do": verb, **facts}) for node, facts in by_node.items()]


def test_quiet_ranks_are_queried_after_half_of_the_limit_and_not_too_often(watched: Watched) -> None:
    """Unreachable nodes are left out; an answer counts until the next sign of progress."""
    fleet, limits = QueriedAgents(), HangLimits()
    roll = RankStatusQuery(fleet)  # type: ignore[arg-type]
    for rank in range(3):
        watched.beat(rank)
    watched.receive("a", "steps", steps=[(step, watched.now, 0.1, None) for step in range(1, 9)])
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
    watched.receive("a", "worker.rank-status", rank=0, said=said)
    seen = watched.board.progress(begin + 1.9, steps_expected=True)
    assert seen is not None
    assert seen.status_requested
    assert seen.ranks[0].status is not None
    watched.now = begin + 2.0
    watched.receive("a", "steps", steps=[(9, watched.now, 0.1, None)])
    after = watched.board.progress(begin + 2.1, steps_expected=True)
    assert after is not None
    assert after.ranks[0].status is None


def test_operations_that_begin_between_two_answers_are_progress(watched: Watched) -> None:
    """So a long step that continues is no hang."""
    for rank in range(3):
        watched.beat(rank)

    def answer(number: int, seconds: float) -> float | None:
        watched.now += 0.5
        group = {"name": "0", "ranks": {"first": 0, "stride": 1, "count": 3}, "counts": {"": number}, "pending": []}
        watched.receive("a", "worker.rank-status", rank=0, said={"groups": [group], "seconds": seconds})
        seen = watched.board.progress(watched.now, steps_expected=True)
        assert seen is not None
        return seen.moved

    assert answer(7, 0.1) is None
    assert answer(7, 0.6) is None
    assert answer(8, 0.0) == 0.0
    assert answer(8, 0.5) == 0.5


@pytest.mark.parametrize("said", [{"groups": 7}, {"groups": [{"name": "x"}]}, {"seconds": "long"}, {"groups": [None]}])
def test_an_invalid_answer_is_ignored(said: Message) -> None:
    """Workers of another version may send anything."""
    assert parse_rank_status(said) is None


def test_a_bad_loss_that_a_policy_acts_on_is_evidence(watched: Watched) -> None:
    """Once; with the default recommended action it is reported, and training continues."""
    watched.concerns = Alerts(lambda: RecommendedActions(changed={"loss-not-finite": RecommendedAction.RESTART}))
    watched.receive("b", "worker.loss", rank=1, step=7, loss=math.nan)
    assert [fault.kind for _ in range(4) for fault in watched.poll(REPORT_SECONDS)] == []
    assert [type(one) for one in watched.board.evidence] == [NonFiniteLoss]
    assert [fault.kind for fault in see(watched.board.evidence, HangLimits())] == ["loss-not-finite"]


def test_no_replicas_are_compared_after_all_ranks_have_exited(watched: Watched) -> None:
    """Their last reports are still there: of a job that has finished, or whose workers all died at once."""
    watched.check(16, "x", "x", "x")
    for rank, node in enumerate("abc"):
        end = {"ended": watched.now, "code": 0, "signal": None, "step": 16, "raised": None, "finished": True, "ordered": False}
        watched.receive(node, "worker.exited", rank=rank, pid=100 + rank, oom=None, oom_blind=None, output="", **end)
    assert all(view.ended for view in watched.board.ranks.values())
    assert watched.poll() == []
