"""Lightning's Trainer with a HoldfastCallback: bit-equal after faults, on other ranks after a shrink, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mentions import one_line_mentions
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, FlowDouble, Workers
from tests.runtime.ranks import ROOT

SCRIPT = "lightning_trainer"


NOT_REPAIRED = "process groups are not repaired because Lightning's Trainer cannot repeat a step in its process"
LEVEL = {
    "auto": NOT_REPAIRED,
    "managed": NOT_REPAIRED,
    "stock": "process groups are PyTorch's own because the job says `groups: stock`",
}
"""The arguments of a job, by its ``groups``."""


def levels(flow: FlowDouble) -> set[tuple[str, str]]:
    """Return the levels that were reported, each with the sentence but for what a fault costs."""
    assert flow.of("groups") == [], "no rank says that it can be repaired, so no hot spare is started"
    return {(one["level"], one["text"].partition(": after a fault all ranks restart")[0]) for one in flow.of("level")}


def run(workers: Workers, folder: Path, *options: str, groups: str, faults: list[dict[str, Any]]) -> tuple[Ended, list[int]]:
    """Run two ranks to their end, through *faults*; return also the steps after which they resumed."""
    flow = FlowDouble(workers, folder, SCRIPT, *options, ranks=2, stride=1, chaos=faults, save=1, groups=groups).begin()
    resumed = []
    for one in faults:
        flow.until_dead(one["rank"])
        flow.restart()
        resumed.append(flow.receive("resumed", one["rank"], generation=flow.generation)["step"])
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert levels(flow) == {("managed-state", f"state is managed, {LEVEL[groups]}")}
    flow.close()
    return ended, resumed


@pytest.mark.long
@pytest.mark.timeout(240)
def test_manual_optimization_and_workers_continue_bit_equal(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Killed in the middle of an epoch and in a validation, in groups of the launcher's: weights, buffers, metrics, callbacks, workers.

    Meanwhile two checkpoints of Lightning cannot be written: that is reported, removes no older one, and ends nothing.
    """
    chaos = [fault(1, "step", 3), fault(0, "validation", 5, generation=2)]
    undisturbed, folder = tmp_path_factory.mktemp("f"), tmp_path_factory.mktemp("f")
    calm, _ = run(workers, undisturbed, "manual", "workers", groups="stock", faults=[])
    ended, resumed = run(workers, folder, "manual", "workers", "full", groups="auto", faults=chaos)
    assert resumed == [2, 4]
    assert ended.results == calm.results
    assert ended.losses == calm.losses
    assert sorted(calm.losses[0]) == list(range(1, 7))
    log = (folder / "rank-0.log").read_text()
    assert all(one_line_mentions(log, "checkpoint-write-failed", name) for name in ("epoch=0-step=2.ckpt", "epoch=1-step=3.ckpt"))
    kept, usual = ({one.name for one in (place / "lightning").iterdir()} for place in (folder, undisturbed))
    assert "epoch=0-step=1.ckpt" in kept - usual, "the one that the first of them would have replaced"
    assert not kept & {"epoch=0-step=2.ckpt", "epoch=1-step=3.ckpt"}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_fewer_ranks_take_the_rest_of_the_epoch(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """After 12 of 30 samples one rank goes on with the next: it counts batches of 3 where two ranks counted 6 samples.

    The groups are demanded: the rank that is left ends with the lost one, and names why no other took its place.
    """
    folder = tmp_path_factory.mktemp("f")
    flow = FlowDouble(workers, folder, SCRIPT, ranks=2, stride=1, chaos=[fault(0, "step", 2)], save=1, groups="managed").begin()
    flow.until_dead(0)
    assert flow.receive("exception", 1)["peer_lost"]
    flow.until(lambda: flow.pids[1] in flow.workers.ended(), "the end of rank 1")
    assert levels(flow) == {("managed-state", f"state is managed, {LEVEL['managed']}")}
    flow.ranks = 1
    flow.restart()
    assert flow.receive("resumed", 0, generation=2)["step"] == 1
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[0], -1) == 0, "the end of rank 0")
    flow.close()
    result = json.loads((folder / "result-0.json").read_text())
    rest, second, third = (10 - 4) // 2, 10 // 2, 10  # two batches a step in the first two epochs, then one
    assert result["step"] == 1 + rest + second + third
    assert result["batches"] == 2 + (10 - 4) + 10 + 10


def test_misuse_is_refused_in_a_sentence(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Strategies that shard, callbacks that cannot be restored, states that cannot be saved, and a second session."""
    flow = FlowDouble(workers, tmp_path_factory.mktemp("f"), "lightning_refused", ranks=1, stride=1).begin()
    ended = flow.finish()
    assert ended.status == [0], flow.logs()
    flow.close()
    result = ended.results[0]
    for name, words in {
        "option": "every",
        "sharded": "ModelParallelStrategy",
        "averaging": "EMAWeightAveraging",
        "twice": "one process can have one",
        "state": "'Unsaveable'",
        "torn": "torn.ckpt",
        "second": "one process can have one",
    }.items():
        assert words in result[name], result
        assert "\n" not in result[name], result


@pytest.mark.long
def test_a_lightning_that_is_too_old_is_refused_in_a_sentence() -> None:
    """When the integration is imported; so is a Lightning that is missing."""
    old = (
        "import sys, types; old = types.ModuleType('lightning.pytorch'); old.__version__ = '2.4.1'; sys.modules['lightning.pytorch'] = old"
    )
    none = "import sys; sys.modules['lightning'] = sys.modules['lightning.pytorch'] = sys.modules['pytorch_lightning'] = None"
    for first, words in ((old, "needs Lightning 2.6 or newer, and this is lightning.pytorch 2.4.1"), (none, "which is not installed")):
        command = [sys.executable, "-c", f"{first}\nimport holdfast.integrations.lightning"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stderr.splitlines()[-1].startswith("ImportError: HoldfastCallback needs Lightning"), done.stderr
        assert words in done.stderr.splitlines()[-1]
