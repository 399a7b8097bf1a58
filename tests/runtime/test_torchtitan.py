"""torchtitan's own Trainer with Holdfast's checkpoint manager: bit-equal after faults, and what a lost node means."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.frameworks import needs
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Workers

needs("torchtitan")

SCRIPT = "torchtitan_trainer"
STEPS = 12


@pytest.fixture(scope="module")
def titans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Give a process that forks workers with torchtitan already imported."""
    server = Workers("examples.torchtitan_debug", "torchtitan.trainer")
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed_training(titans: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FlowDouble, Ended]]:
    """Give a training that nothing disturbs."""
    flow = FlowDouble(titans, tmp_path_factory.mktemp("f"), SCRIPT, ranks=2, stride=1).begin()
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    yield flow, ended
    flow.close()


def generators(flow: FlowDouble, generation: int) -> dict[int, str]:
    """Return the state of rank 0's random generator at the beginning of each step of a generation."""
    lines = [one.split() for one in (flow.folder / "generators-0").read_text().splitlines()]
    return {int(step): state for number, step, state in lines if int(number) == generation}


@pytest.mark.timeout(240)
def test_a_training_continues_bit_equal(
    titans: Workers, tmp_path_factory: pytest.TempPathFactory, undisturbed_training: tuple[FlowDouble, Ended]
) -> None:
    """Killed twice, in groups of the launcher's: from the nodes' memory, and from torchtitan's own checkpoint when that is all there is."""
    calm, whole = undisturbed_training
    assert sorted(whole.losses[0]) == list(range(1, STEPS + 1))
    chaos = [fault(1, "begin", 8), fault(0, "begin", 11, generation=2)]
    flow = FlowDouble(titans, tmp_path_factory.mktemp("f"), SCRIPT, ranks=2, stride=1, chaos=chaos, memory=True, groups="auto").begin()
    flow.until_dead(1)
    assert flow.hear("exception", 0)["peer_lost"]
    flow.restart()
    assert flow.hear("resumed", 0, generation=2)["step"] in (6, 7), flow.logs()
    flow.until_dead(0)
    assert generators(flow, 2).items() <= generators(calm, 1).items()
    shutil.rmtree(flow.folder / "memory")
    own = flow.folder / "output" / "checkpoint"
    (own / "step-10").mkdir()  # torn: what it says of itself is written last
    flow.restart()
    resumed = flow.hear("resumed", 0, generation=3, step=8)
    assert resumed["path"] == str(own / "step-8")
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.told == whole.told
    assert ended.losses == whole.losses
    assert {one["name"] for one in flow.of("section")} == {"checkpoint of torchtitan"}
    levels = {(one["level"], "torchtitan's Trainer cannot compute a step again" in one["text"]) for one in flow.of("level")}
    assert levels == {("managed-state", True)}
    flow.close()


def test_fewer_ranks_are_refused_in_a_sentence(titans: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A data loader of torchtitan cannot be divided anew: a job that lost a node for good ends, and says how the data can begin anew."""
    chaos, folder = [fault(1, "begin", 7)], tmp_path_factory.mktemp("f")
    flow = FlowDouble(titans, folder, SCRIPT, "--training.steps", "8", ranks=2, stride=1, chaos=chaos, save=3).begin()
    flow.until_dead(1)
    flow.ranks = 1
    flow.restart()
    status = flow.until(lambda: flow.workers.ended().get(flow.pids[0]), "the end of rank 0")
    assert status == 1, flow.logs()
    error = flow.hear("exception", 0)
    assert error["message"].startswith("the state was saved with 2 data-parallel ranks, and there are 1: torchtitan's data loader")
    flow.argv += ["--checkpoint.exclude_from_loading", "dataloader"]
    flow.restart()
    assert flow.hear("resumed", 0, generation=3)["step"] == 6
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[0], -1) == 0, "the end of rank 0")
    assert sorted(one["step"] for one in flow.of("beat") if one["generation"] == 3) == [7, 8]
    flow.close()
