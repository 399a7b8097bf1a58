"""The Trainer with its callback: after every kind of fault the training ends as an undisturbed one, and no torn checkpoint is resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrations.huggingface.checkpoints import SENTINEL, problem_of
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Workers

STEPS = 18

Train = Callable[..., FlowDouble]

DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "model.safetensors is missing": ("model.safetensors", Path.unlink),
    "model.safetensors is cut off": ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "scheduler.pt is missing": ("scheduler.pt", Path.unlink),
    "rng_state_1.pth is missing": ("rng_state_1.pth", Path.unlink),
    "trainer_state.json is missing or damaged": ("trainer_state.json", lambda path: path.write_text(path.read_text()[:-9])),
    "trainer_state.json is of step 3": ("trainer_state.json", lambda path: path.write_text('{"global_step": 3}')),
}
"""What may be wrong with a checkpoint of the Trainer: the file, and how it came to that."""


@pytest.fixture(scope="module")
def trainers(torch_imported: Path) -> Iterator[Workers]:
    """Give a process that forks workers with transformers already imported."""
    server = Workers(torch_imported, "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
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
    assert ended.results == whole.results
    assert ended.results[0]["step"] == STEPS
    assert ended.losses == whole.losses


@pytest.mark.long
def test_a_training_continues_after_a_hang_and_a_lost_node(train: Train, undisturbed_training: Ended) -> None:
    """After a hang the newest snapshot in the nodes' memory is used, and after the loss of a node with its memory the newest checkpoint."""
    flow = train(memory=True, save=4, chaos=[fault(1, "begin", 10, do="stop"), fault(0, "begin", 15, generation=2)])
    flow.until_stopped(1)
    flow.restart()
    assert flow.receive("resumed", 0, generation=2)["step"] in (8, 9)
    flow.until_dead(0)
    shutil.rmtree(flow.memstore(0))
    flow.restart()
    assert flow.receive("resumed", 0, generation=3)["step"] == 12
    names = {(one["name"], one["begin"]) for one in flow.of("section")}
    assert names >= {("evaluation", True), ("evaluation", False)}
    assert_equal(flow, undisturbed_training)


@pytest.fixture(scope="module")
def saves_that_fail(trainers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowDouble]:
    """Give a training with checkpoints of the Trainer, two of which a full disk has no space for; nothing else disturbs it."""
    folder = tmp_path_factory.mktemp("f")
    for name in ("checkpoint-6/optimizer.pt", "checkpoint-12/trainer_state.json"):
        (folder / "output" / name).parent.mkdir(parents=True)
        (folder / "output" / name).symlink_to("/dev/full")
    flow = FlowDouble(trainers, folder, "trainer_of_transformers", "plain", "resume", ranks=2, stride=1).begin()
    assert flow.finish().status == [0, 0], flow.logs()
    yield flow
    flow.close()


@pytest.mark.parametrize("options", [{"join": True}, {"groups": "auto"}], ids=["joined", "auto"])
def test_with_managed_groups_a_killed_rank_restarts_all(train: Train, undisturbed_training: Ended, options: dict[str, Any]) -> None:
    """The Trainer cannot compute a step again: the other rank says so and exits, and both continue with the step before."""
    flow = train(*(["join"] if options.pop("join", False) else []), save=1, chaos=[fault(1, "begin", 5)], **options)
    flow.until_dead(1)
    raised = flow.receive("exception", 0)
    assert raised["peer_lost"], raised
    assert not flow.of("groups"), "the controller must not wait for this process"
    flow.restart()
    assert flow.receive("resumed", 1, generation=2)["step"] == 4
    assert_equal(flow, undisturbed_training)
    if options:
        texts = {(one["level"], "the Trainer cannot compute a step again" in one["text"]) for one in flow.of("level")}
        assert texts == {("managed-state", True)}


@pytest.mark.long
def test_fewer_ranks_start_anew_and_say_so(train: Train) -> None:
    """The Trainer has cached the number of ranks, so the one that is left is not used further: a new process counts epochs and batches."""
    flow = train(save=1, groups="managed", chaos=[fault(1, "begin", 5)])
    flow.until_dead(1)
    assert flow.receive("exception", 0)["peer_lost"]
    flow.until(lambda: flow.pids[0] in flow.workers.ended(), "the end of rank 0")
    assert not flow.of("groups"), "the controller must not have it go on alone"
    flow.ranks = 1
    flow.restart()
    assert flow.receive("resumed", 0, generation=2)["step"] == 4
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[0], -1) == 0, "the end of rank 0")
    result = json.loads((flow.folder / "result-0.json").read_text())
    assert (result["step"], result["epoch"]) == (3 * 11, 3.0), "44 samples are 11 steps of 4 for one rank, and 6 for two"
    assert "step 4 was saved by 2 ranks and continues on 1: all ranks have started anew" in (flow.folder / "rank-0.log").read_text()


def test_a_torn_checkpoint_of_the_trainer_is_left_out(train: Train, saves_that_fail: FlowDouble) -> None:
    """With ``resume_from_checkpoint=True`` and no state of the session: the one before is taken, with a reason in the log."""
    flow = train("plain", "resume", chaos=[fault(1, "begin", 11)])
    flow.until_dead(1)
    output = flow.folder / "output"
    assert {one.name for one in output.iterdir()} >= {"checkpoint-3", "checkpoint-6", "checkpoint-9"}
    torn = output / "checkpoint-9" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    (output / "checkpoint-6" / "checkpoint-is-incomplete.txt").touch()
    flow.restart()
    resumed = flow.receive("resumed", 0, generation=2, step=3)
    assert resumed["path"] == str(output / "checkpoint-3")
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    log = (flow.folder / "rank-0.log").read_text()
    assert "checkpoint-9 of the Trainer is not complete and is left out: optimizer.pt is cut off" in log
    assert "checkpoint-6 of the Trainer is not complete and is left out: checkpoint-is-incomplete.txt" in log
    assert json.loads((output / "checkpoint-18" / "trainer_state.json").read_text())["global_step"] == STEPS
    for problem, (name, damage) in DAMAGES.items():
        copy = flow.folder / "copy" / "checkpoint-18"
        shutil.copytree(output / "checkpoint-18", copy)
        assert problem_of(copy, 2) == ""
        damage(copy / name)
        assert problem_of(copy, 2) == problem
        shutil.rmtree(copy)
    undisturbed = saves_that_fail.finish()
    assert [one["model"] for one in undisturbed.results] == [one["model"] for one in ended.results]
    assert undisturbed.losses == ended.losses


def test_a_save_of_the_trainer_that_fails_does_not_end_the_training(saves_that_fail: FlowDouble) -> None:
    """The disk is full for a file of one checkpoint, and for the last file of another: both are marked, reported, and never resumed."""
    flow, output = saves_that_fail, saves_that_fail.folder / "output"
    found = {(one["kind"], one["step"], one["path"]) for one in flow.of("storage-error")}
    kinds = {6: "checkpoint-write-failed", 12: "checkpoint-disk-full"}  # torch.save does not say why, and the file system has space
    assert found == {(kind, step, str(output / f"checkpoint-{step}")) for step, kind in kinds.items()}, flow.logs()
    assert {step for step in range(3, STEPS + 1, 3) if not problem_of(output / f"checkpoint-{step}", 2)} == {3, 9, 15, 18}
    assert (output / "checkpoint-6" / SENTINEL).exists()


def test_outside_of_a_job_the_callback_does_nothing(trainers: Workers, tmp_path: Path, undisturbed_training: Ended) -> None:
    """The same training, and nothing is sent, saved or restored."""
    flow = FlowDouble(trainers, tmp_path, "trainer_of_transformers", ranks=2, stride=1)
    flow._given["HOLDFAST_SOCKET"] = ""
    ended = flow.begin().finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.results == undisturbed_training.results
    assert flow.received == []
    assert not (tmp_path / "checkpoints").exists()
    flow.close()


def test_a_mistake_with_the_callback_is_one_sentence(trainers: Workers, tmp_path: Path) -> None:
    """A batch size that may change, a second training, and a session of the script's own; a callback that is added late works."""
    flow = FlowDouble(trainers, tmp_path, "wrong_trainers", ranks=1, stride=1).begin()
    ended = flow.finish()
    assert ended.status == [0], flow.logs()
    assert ended.results[0] == {
        "batch size": "ValueError: HoldfastCallback needs one batch size for the whole training: set per_device_train_batch_size, "
        "and leave out auto_find_batch_size",
        "twice": "RuntimeError: HoldfastCallback supports one training: create another Trainer, in another process, for the next",
        "two sessions": "RuntimeError: HoldfastCallback has a session of its own: remove the script's holdfast.session, or the callback",
    }
    assert sorted(ended.losses[0]) == [1, 2]
    flow.close()
