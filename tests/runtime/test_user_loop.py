"""A loop of the script's own: its steps, what is repeated after a fault, and its mistakes in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from tests.mentions import mentions
from tests.runtime.chaos import fault
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed
from tests.runtime.test_groups_bit_equality import start_hot_spares, taken_over


def epochs_of(flow: FlowDouble, rank: int) -> tuple[list[int], int]:
    """Return after which epochs the last process of *rank* evaluated, and how many of its steps counted."""
    epochs = json.loads((flow.folder / f"epochs-{rank}.json").read_text())
    return epochs["evaluated"], epochs["counted"]


@pytest.fixture(scope="session")
def undisturbed_loop(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Give a run of the loop that nothing disturbs."""
    return undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "user_loop", UNTIL, ranks=2, stride=1))


def test_a_failed_step_is_repeated_by_the_loader_of_a_users_loop(job: Job, undisturbed_loop: Ended) -> None:
    """In the middle of an epoch, in the first step of one, and after the last step of one: each rank counts each step once.

    A new process begins at the batch at which the others wait, with the random numbers that follow what they drew between two epochs, and
    evaluates no epoch that they have evaluated.
    """
    faults = [
        fault(1, "forward", 3),
        fault(0, "backward", 5),
        fault(1, "committed", 8, generation=2),
        fault(0, "first part", 13, generation=3),
    ]
    flow = job("gate-5", script="user_loop", ranks=2, stride=1, chaos=faults)
    assert taken_over(flow, 1) == ({"live"}, {2})
    start_hot_spares(flow)
    flow.pass_gate("gate-5")
    assert taken_over(flow, 0, "s0") == ({"live"}, {4})
    assert taken_over(flow, 1) == ({"live"}, {8})
    assert taken_over(flow, 0) == ({"live"}, {12})
    assert_undisturbed(flow, undisturbed_loop)
    assert epochs_of(flow, 1) == ([2, 3], 8)
    assert epochs_of(flow, 0) == ([3], 4)


def test_with_stock_groups_all_restart_in_the_middle_of_an_epoch(job: Job, undisturbed_loop: Ended) -> None:
    """After SIGKILL in the middle of an epoch and between two: the loader continues, and the losses are those of managed groups."""
    flow = job(
        "stock", script="user_loop", ranks=2, stride=1, save=1, chaos=[fault(1, "forward", 7), fault(0, "committed", 12, generation=2)]
    )
    for rank, step in ((1, 6), (0, 12)):
        flow.until_dead(rank)
        flow.restart()
        assert flow.receive("resumed", rank, generation=flow.generation)["step"] == step
    assert not flow.of("groups")
    assert_undisturbed(flow, undisturbed_loop)
    assert epochs_of(flow, 0) == ([2, 3], 4)


def test_a_loop_with_data_of_its_own_restarts_all_ranks(job: Job, workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With managed groups and a DataLoader that the session does not know: one line says so at the start, and the error says it again."""
    whole = undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "user_loop", UNTIL, "plain", ranks=2, stride=1))
    flow = job("plain", script="user_loop", ranks=2, stride=1, save=1, chaos=[fault(1, "forward", 7)])
    flow.until_dead(1)
    raised = flow.receive("exception", 0)
    assert (raised["type"].rpartition(".")[2], raised["peer_lost"], raised["step"]) == ("StepNotRepeatable", True, 7)
    assert mentions(raised["message"], "step 7", "holdfast.Loader")
    lines = (flow.folder / "rank-0.log").read_text().splitlines()
    assert sum(mentions(line, "loop", "holdfast.Loader") for line in lines) == 1
    assert not flow.of("groups"), "the controller must not wait for this process"
    flow.restart()
    assert flow.receive("resumed", 0, generation=2)["step"] == 6
    assert_undisturbed(flow, whole)


def test_a_loop_in_groups_made_unasked_is_repeated_or_says_why_not(job: Job, undisturbed_loop: Ended) -> None:
    """`torch.distributed.init_process_group` and no `join`: with a Loader a killed rank is replaced, without one all restart."""
    flow = job("stock", script="user_loop", ranks=2, stride=1, groups="auto", chaos=[fault(1, "forward", 3)])
    assert taken_over(flow, 1) == ({"live"}, {2})
    assert_undisturbed(flow, undisturbed_loop)
    assert [one["level"] for one in flow.of("level")] == ["managed-groups"]
    flow = job("stock", "plain", script="user_loop", ranks=2, stride=1, groups="auto", save=1, chaos=[fault(1, "forward", 7)])
    flow.until_dead(1)
    assert flow.receive("exception", 0)["peer_lost"]
    flow.restart()
    assert flow.receive("resumed", 0, generation=2)["step"] == 6
    assert flow.finish().status == [0, 0], flow.logs()
    (level,) = {(one["level"], one["text"]) for one in flow.of("level")}
    assert level[0] == "managed-state"
    assert mentions(level[1], "cannot repeat a step", "no holdfast.Loader")


def test_wrong_use_of_a_users_loop_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """A loop that was not begun, both forms in one script, and a step without a batch."""
    model = nn.Linear(1, 1)
    unstarted = holdfast.session(model=model)
    with pytest.raises(RuntimeError, match=r"has not begun: use `with holdfast\.session\(\.\.\.\)\.start\(\) as session:`"):
        unstarted.step(0.0)
    with pytest.raises(RuntimeError, match=r"has not begun: call session\.close\(\) after session\.start\(\)"):
        unstarted.close()
    with pytest.raises(ValueError, match=r"start\(until=-1\): the number of steps cannot be negative"):
        unstarted.start(until=-1)
    with unstarted as session:
        with pytest.raises(RuntimeError, match="has not begun"):
            session.step(0.0)
        with pytest.raises(RuntimeError, match=r"has begun already: for a loop of your own use `with holdfast\.session"):
            session.start()
        for step in session.steps(until=1):
            with pytest.raises(RuntimeError, match=r"session\.steps\(\) yields the steps of this loop: end each by step\.end\(loss\)"):
                session.step(0.0)
            step.end()
    loader = holdfast.Loader(DataLoader([1.0, 2.0]), endless=False)  # type: ignore[arg-type]
    with holdfast.session(model=model, data=loader, checkpoint_dir=tmp_path).start(until=2) as session:
        with pytest.raises(RuntimeError, match=r"session\.start\(\) was called already"):
            session.start()
        with pytest.raises(RuntimeError, match=r"session\.start\(\) has begun a loop of your own, which ends its steps by session\.step"):
            next(session.steps())
        with pytest.raises(RuntimeError, match=r"step 1 took no batch from the session's Loader"):
            session.step(0.0)
        for number, _ in enumerate(loader, 1):
            with pytest.raises(TypeError, match=r"session\.step\(loss\) got a str"):
                session.step("low")  # type: ignore[arg-type]
            assert session.step(number / 2)
        assert (session.steps_done, session.loss, loader.epoch) == (2, 1.0, 1)
    with pytest.raises(RuntimeError, match="the session has ended"):
        session.step(0.0)


def test_a_loop_without_a_with_block_is_closed_by_hand(tmp_path: Path) -> None:
    """The lines of a script keep their indentation; a resumed loop finds what is done."""
    for already in (0, 3):
        session = holdfast.session(model=nn.Linear(1, 1), checkpoint_dir=tmp_path, save_every=100).start()
        assert session.steps_done == already
        for _ in range(3):
            session.step()
        session.close()
        session.close()
    assert session.saved == 6
