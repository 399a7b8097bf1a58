"""What the ranks exchanged before their first step: a process that takes over a rank gets the same values, or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mentions import mentions
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Job, Workers

RANKS = 3


def start_job(job: Job, *options: str, **more: Any) -> FlowDouble:
    """Start a job that uses every kind of exchange."""
    return job(*options, script="beginnings", ranks=RANKS, stride=1, **more)


@pytest.fixture(scope="module")
def expected(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return the values of each rank in an undisturbed run."""
    flow = FlowDouble(workers, tmp_path_factory.mktemp("f"), "beginnings", 2, ranks=RANKS, stride=1).begin()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    assert all(len(result) > 30 for result in ended.results)
    flow.close()
    return ended


def test_a_new_process_gets_what_the_rank_before_it_received(job: Job, expected: Ended) -> None:
    """Each rank is lost in turn, and every collective and object collective gives its replacement the real result."""
    flow = start_job(job, chaos=[fault(rank, "forward", 3 * rank + 2) for rank in range(RANKS)])
    for rank in range(RANKS):
        flow.until_dead(rank)
        flow.regroup([rank])
        flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    for rank in range(RANKS):
        assert ended.results[rank] == expected.results[rank]


@pytest.mark.parametrize("options", [(), ("any",), ("any", "one")])
def test_a_hot_spare_gets_what_the_rank_before_it_received(job: Job, expected: Ended, options: tuple[str, ...]) -> None:
    """In place where all ranks received the same, otherwise by another run of the script, whatever the script promises of its rank."""
    flow = start_job(job, *options, "gate=3", chaos=[fault(2, "forward", 4), fault(1, "forward", 6)])
    for number, rank in enumerate((2, 1)):
        if not number:
            flow.receive("roles")
        flow.hot_spare(number)
        parked = flow.receive("parked", f"s{number}")
        assert parked["coverage"]["calls"] == parked["coverage"]["played"] > 15
        flow.pass_gate()
        flow.until_dead(rank)
        flow.regroup([rank], {rank: f"s{number}"})
        flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    for result, wanted in zip(ended.results, expected.results, strict=True):
        assert result == {name: wanted[name] for name in result}


def test_the_record_survives_the_loss_of_its_rank_and_of_its_backup_ranks(job: Job, expected: Ended) -> None:
    """Two of three ranks are lost at once, then the remaining one, then one of the first again."""
    flow = start_job(
        job, chaos=[fault(0, "forward", 3), fault(2, "forward", 3), fault(1, "forward", 5), fault(2, "forward", 7, generation=2)]
    )
    for lost in ([0, 2], [1], [2]):
        flow.until_dead(*lost)
        flow.regroup(lost)
        flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    assert ended.results == expected.results


def test_a_number_that_rank_0_drew_stays_what_it_was(job: Job) -> None:
    """The process that becomes rank 0 draws another one, and gets the one that the others have."""
    flow = start_job(job, "number", chaos=[fault(0, "forward", 3)])
    flow.until_dead(0)
    flow.regroup([0])
    flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    assert ended.results[0]["number"] == ended.results[1]["number"] == ended.results[2]["number"]
    assert any("'broadcast!/(2,)float32'" in one for one in flow.of("regrouped", 0)[-1]["differs"])


def test_parameters_that_are_not_on_record_are_restored_by_the_session(job: Job) -> None:
    """They are larger than what a rank records, and a rank of the script's choice broadcast them."""
    flow = start_job(job, "one", "wide", chaos=[fault(2, "forward", 3)])
    flow.until_dead(2)
    flow.regroup([2])
    flow.mended()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    assert len({result["model"] for result in ended.results}) == 1, [result["model"] for result in ended.results]


@pytest.mark.parametrize(
    ("option", "rank", "why"),
    [
        ("name", 0, "sends other objects than the one before it sent"),
        ("large", 1, "a rank records at most 16 MiB"),
        ("asks", 1, "where the process before started 'allreduce/(1,)float32'"),
    ],
)
def test_what_cannot_be_repeated_is_refused(job: Job, option: str, rank: int, why: str) -> None:
    """The process that was to take over the rank reports it and stops: all ranks restart, and agree."""
    flow = start_job(job, option, chaos=[fault(rank, "forward", 3)])
    flow.until_dead(rank)
    flow.regroup([rank])
    cannot = flow.receive("recovery-failed", rank, generation=2)
    assert why in cannot["why"], cannot
    assert "beginnings.py:" in cannot["why"]
    flow.restart()
    ended = flow.finish()
    assert ended.status == [0] * RANKS, flow.logs()
    if option == "name":
        assert ended.results[0]["name"] == ended.results[1]["name"] == ended.results[2]["name"]


def test_a_rank_lost_before_the_first_step_ends_the_others_with_the_loss(job: Job) -> None:
    """Nothing may replace what it would have sent: the others raise, and report a lost peer."""
    flow = start_job(job, chaos=[fault(1, "begun")])
    flow.until_dead(1)
    for rank in (0, 2):
        raised = flow.receive("exception", rank)
        assert raised["peer_lost"], raised
        assert mentions(raised["message"], "outside of a step")


def test_a_rank_lost_between_two_steps_ends_ranks_that_exchange_something_there(job: Job) -> None:
    """The step is done, and what is exchanged after it belongs to no step: the others raise, and continue with no other value."""
    flow = start_job(job, "one", "between", chaos=[fault(1, "committed", 3)])
    flow.until_dead(1)
    for rank in (0, 2):
        raised = flow.receive("exception", rank)
        assert (raised["peer_lost"], raised["type"].rpartition(".")[2]) == (True, "PeerLostOutsideStep"), raised
