"""The Trainer with its callback: after every kind of fault the training ends as an undisturbed one, and no torn checkpoint is resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Workers

STEPS = 18

Train = Callable[..., FlowDouble]


@pytest.fixture(scope="module")
def trainers() -> Iterator[Workers]:
    """Give a process that forks workers with transformers already imported."""
    server = Workers("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
    yield server
    server.close()


@pytest.fixture
def train(trainers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Give what starts a training with two ranks on two nodes."""
    made: list[FlowDouble] = []

    def start(*options: str, **more: object) -> FlowDouble:
        folder = tmp_path_factory.mktemp("f")
        made.append(FlowDouble(trainers, folder, "trainer_of_transformers", *options, ranks=2, stride=1, **more))
        return made[-1].begin()

    yield start
    for flow in made:
        flow.close()


@pytest.fixture(scope="module")
def undisturbed_training(trainers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Give a training that nothing disturbs, with torch's own groups."""
    flow = FlowDouble(trainers, tmp_path_factory.mktemp("f"), "trainer_of_transformers", ranks=2, stride=1).begin()
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert sorted(ended.losses[0]) == list(range(1, STEPS + 1))
    flow.close()
    return ended


def assert_equal(flow: FlowDouble, whole: Ended) -> None:
    """Assert that weights, learning rate, log, floating point operations, generators and losses are those of the undisturbed training."""
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.told == whole.told
    assert ended.told[0]["step"] == STEPS
    assert ended.losses == whole.losses


def test_a_training_continues_after_a_hang_and_a_lost_node(train: Train, undisturbed_training: Ended) -> None:
    """After a hang the newest snapshot in the nodes' memory is used, and after the loss of a node with its memory the newest checkpoint."""
    flow = train(memory=True, save=4, chaos=[fault(1, "begin", 10, do="stop"), fault(0, "begin", 15, generation=2)])
    flow.until_stopped(1)
    flow.restart()
    assert flow.hear("resumed", 0, generation=2)["step"] in (8, 9)
    flow.until_dead(0)
    shutil.rmtree(flow.memstore(0))
    flow.restart()
    assert flow.hear("resumed", 0, generation=3)["step"] == 12
    names = {(one["name"], one["begin"]) for one in flow.of("section")}
    assert names >= {("evaluation", True), ("evaluation", False)}
    assert_equal(flow, undisturbed_training)


def test_with_managed_groups_a_killed_rank_restarts_all(train: Train, undisturbed_training: Ended) -> None:
    """The Trainer cannot compute a step again: the other rank says so and exits, and both continue with the step before."""
    flow = train("join", save=1, chaos=[fault(1, "begin", 5)])
    flow.until_dead(1)
    raised = flow.hear("exception", 0)
    assert raised["peer_lost"], raised
    assert not flow.of("groups"), "the controller must not wait for this process"
    flow.restart()
    assert flow.hear("resumed", 1, generation=2)["step"] == 4
    assert_equal(flow, undisturbed_training)


def test_a_torn_checkpoint_of_the_trainer_is_left_out(train: Train) -> None:
    """With ``resume_from_checkpoint=True`` and no state of the session: the one before is taken, with a reason in the log."""
    options = "plain", "resume"
    flow = train(*options, chaos=[fault(1, "begin", 11)])
    flow.until_dead(1)
    output = flow.folder / "output"
    assert {one.name for one in output.iterdir()} >= {"checkpoint-3", "checkpoint-6", "checkpoint-9"}
    torn = output / "checkpoint-9" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    (output / "checkpoint-6" / "checkpoint-is-incomplete.txt").touch()
    flow.restart()
    resumed = flow.hear("resumed", 0, generation=2, step=3)
    assert resumed["path"] == str(output / "checkpoint-3")
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    log = (flow.folder / "rank-0.log").read_text()
    assert "checkpoint-9 of the Trainer is not complete and is left out: optimizer.pt is cut off" in log
    assert "checkpoint-6 of the Trainer is not complete and is left out: checkpoint-is-incomplete.txt" in log
    assert json.loads((output / "checkpoint-18" / "trainer_state.json").read_text())["global_step"] == STEPS
    undisturbed = train(*options).finish()
    assert [one["model"] for one in undisturbed.told] == [one["model"] for one in ended.told]
    assert undisturbed.losses == ended.losses
