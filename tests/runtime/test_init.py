"""How a rank joins its groups: under torchrun, on a host with GPUs, with an NCCL that cannot be aborted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.runtime import world
from holdfast.torch_versions import untested
from tests.mentions import mentions
from tests.runtime.flow_double import SCRIPTS, UNTIL, Job
from tests.runtime.ranks import ROOT


@pytest.mark.long
def test_a_script_that_joins_runs_under_plain_torchrun(tmp_path: Path) -> None:
    """Without an agent the groups are torch's own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = [str(SCRIPTS / "joined.py"), str(tmp_path), "2"]
    ended = subprocess.run([*command, *script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    aborted_at_the_end = "terminate called without an active exception" in ended.stderr  # torch's own: runtime/threads.py says why
    assert ended.returncode == 0 or aborted_at_the_end, ended.stderr
    results = [(tmp_path / f"result-{rank}.json").read_text() for rank in range(2)]
    expected = '"ranks": 2, "step": 2'
    assert all(expected in one for one in results), results
    assert "holdfast" not in results[0].lower()


@pytest.mark.parametrize(
    ("environment", "gpus", "device"),
    [
        ({"LOCAL_RANK": "3"}, 8, "cuda:3"),
        ({"LOCAL_RANK": "0"}, 8, "cuda:0"),
        ({"LOCAL_RANK": "3"}, 1, "cuda:0"),  # `srun --gpus-per-task=1` shows each process its own
        ({}, 8, "cuda"),
        ({"LOCAL_RANK": ""}, 8, "cuda"),
        ({"LOCAL_RANK": "3"}, 0, "cpu"),
        ({}, 0, "cpu"),
    ],
    ids=str,
)
def test_a_rank_uses_the_gpu_with_its_local_rank(environment: dict[str, str], gpus: int, device: str) -> None:
    """Whether Holdfast manages its groups or not."""
    assert world.device_of(environment, gpus) == torch.device(device)


def test_more_ranks_than_gpus_are_refused_with_advice() -> None:
    """Two ranks on one GPU: NCCL would report it much later, with an obscure error."""
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK is 2\b.*\b2 GPUs"):
        world.device_of({"LOCAL_RANK": "2"}, 2)


@pytest.mark.parametrize(("local", "chosen"), [("1", ["cuda:1"]), ("", [])])
def test_a_script_that_joins_on_a_host_with_gpus_gets_the_device_with_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local: str, chosen: list[str]
) -> None:
    """Under torchrun; there is no GPU here, so what torch is asked for is noted in its stead. It takes no device without a number."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": local}.items():
        monkeypatch.setenv(name, value)
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", asked.append)
    holdfast.join()
    assert asked == [*chosen, "cpu:gloo,cuda:nccl"]


def test_an_nccl_that_cannot_be_aborted_costs_managed_groups_and_one_warning(job: Job) -> None:
    """All ranks use torch's own groups: no rank raises, and without managed groups the controller restarts after a fault."""
    flow = job("old-nccl", script="joined", ranks=3)
    ended = flow.finish()
    assert ended.status == [0] * 3, flow.logs()
    assert [(one["backend"], one["managed"]) for one in ended.results] == [("gloo", False)] * 3
    assert {(one["ranks"], one["step"]) for one in ended.results} == {(3, UNTIL)}
    assert flow.of("exception") == flow.of("groups") == flow.of("broken") == []
    logs = [(flow.folder / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert [log.count("NCCL 2.27.9") for log in logs] == [1, 0, 0]


MISSING = "torch.distributed.distributed_c10d._unregister_process_group"


def test_a_torch_that_lacks_what_managed_groups_need_trains_with_its_own(job: Job) -> None:
    """The attribute that is missing is named, and that the version is untested; nothing raises."""
    flow = job("other-torch", script="joined", ranks=2)
    ended = flow.finish()
    assert ended.status == [0] * 2, flow.logs()
    assert [(one["backend"], one["managed"], one["step"]) for one in ended.results] == [("gloo", False, UNTIL)] * 2
    assert mentions((flow.folder / "rank-0.log").read_text(), "2.99.0", MISSING, "PyTorch's own")
    assert {one["text"].partition("; ")[2] for one in flow.of("level")} == {untested("2.99.0")}
    assert flow.of("exception") == flow.of("groups") == []


def test_an_nccl_that_can_be_aborted_is_managed(job: Job) -> None:
    """The same script, with what there is here."""
    flow = job(script="joined", ranks=2)
    ended = flow.finish()
    assert ended.status == [0] * 2, flow.logs()
    assert [(one["backend"], one["managed"]) for one in ended.results] == [("gloo", True)] * 2


def test_ranks_that_start_late_are_waited_for(job: Job) -> None:
    """To each other, to a group, to the first operation in it, to a value in the store: however short recoveries' limits are."""
    flow = job(script="skewed", ranks=3)
    ended = flow.finish()
    assert ended.status == [0] * 3, flow.logs()
    assert [one["ranks"] for one in ended.results] == [3] * 3
    assert flow.of("exception") == flow.of("broken") == []


def test_a_group_that_is_not_complete_within_its_timeout_is_reported(job: Job) -> None:
    """Half a second, as the script has asked for: an error of its own, by which no group counts as broken."""
    flow = job("short", script="skewed", ranks=3)
    report = flow.receive("exception", 0)
    assert (report["type"], report["peer_lost"]) == (
        "torch.distributed.DistStoreError",
        True,
    )  # for the diagnosis it is a secondary failure
    assert flow.of("broken") == []
