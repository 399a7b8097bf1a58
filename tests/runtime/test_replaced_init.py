"""`init_process_group` as the launcher replaces it: what scripts get that know nothing of `holdfast.join`."""

from __future__ import annotations

import copy
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.agent.workers.spawner import PROGRAM
from holdfast.runtime import init
from holdfast.runtime.agent_client import AgentLink
from holdfast.runtime.telemetry.integration_level import MANAGED, RESTART
from tests.mentions import mentions
from tests.runtime.agent_double import AgentDouble
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, Job, assert_undisturbed
from tests.runtime.ranks import ROOT


def test_a_script_with_a_session_and_torchs_own_call_has_lost_ranks_replaced(job: Job, undisturbed_run: Ended) -> None:
    """The other ranks keep their processes, and no weight differs from an undisturbed run's: with rank 0 lost, and with another."""
    flow = job("init", groups="auto", chaos=[fault(1, "backward", 5), fault(0, "forward", 9)])
    first = dict(flow.pids)
    for rank, others in ((1, {0, 2, 3}), (0, {2, 3})):
        flow.until_dead(rank)
        flow.regroup([rank])
        flow.mended()
        assert {flow.pids[other] for other in others} == {first[other] for other in others}
    assert_undisturbed(flow, undisturbed_run)
    assert flow.of("exception") == []
    assert [one["level"] for one in flow.of("level")] == ["managed-groups"] * 2  # of the first process of rank 0, and of the next
    assert (flow.folder / "rank-0.log").read_text().count(f"--- holdfast: {MANAGED}") == 2


def test_torch_and_frameworks_get_what_they_would_from_torchs_own_group(job: Job) -> None:
    """Names of backends, subgroups, meshes, children with groups of their own, and a second start after all were destroyed."""
    flow = job(script="torch_calls", groups="managed", ranks=3)
    ended = flow.finish()
    assert ended.status == [0] * 3, flow.logs()
    managed = "ManagedGroup"
    for rank, result in enumerate(ended.results):
        assert (result["before"], result["same"], result["destroyed"]) == (False, True, False)
        assert (result["kind"], result["timeout"], result["default timeout"]) == (managed, 180, 1800)
        assert result["backend"] == ["gloo", True, "cpu:gloo,cuda:gloo"]
        assert result["device"] == ["cpu", ["cpu"]]
        assert mentions(result["again"], "twice")
        groups = {"default": "gloo", "named": "gloo", "both": "cpu:gloo,cuda:nccl"}
        expected = {name: [managed, backend, 6.0] for name, backend in groups.items()}
        assert result["groups"] == (expected | {"part": [managed, "gloo", 3.0]} if rank < 2 else expected)
        assert (result["mesh"], result["objects"]) == ([managed, "gloo"], [{"rank": one} for one in range(3)])
        assert (result["loaded"], result["ddp"]) == (28.0, 3)
        assert result["second"] == [managed, 6.0, 6.0, True]
    assert ended.results[0]["fork"] == ended.results[0]["spawn"] == ["ProcessGroup 2"] * 2
    assert flow.of("exception") == flow.of("broken") == []


def test_managed_groups_without_a_session_end_with_the_rank_and_spoil_nothing(job: Job, tmp_path: Path) -> None:
    """The peers of a killed rank apply no step without it: all restart from the script's own checkpoint, and end with equal weights."""
    ends = []
    for kill in (False, True):
        out = tmp_path / f"out-{kill}"
        flow = job(f"--out_dir={out}", f"--pause={0.02 if kill else 0.0}", script="nano", groups="managed", ranks=2)
        if kill:
            log = flow.folder / "rank-0.log"
            flow.until(lambda log=log: log.exists() and "saved iteration 10" in log.read_text(), "iteration 10")  # type: ignore[misc]
            flow.kill(1)
            assert flow.receive("exception", 0)["peer_lost"]
            survivor = flow.pids[0]
            assert flow.until(lambda flow=flow, pid=survivor: flow.workers.ended().get(pid), "the end of rank 0") == 1  # type: ignore[misc]
            flow.restart()
            flow.until(lambda log=log: "resuming from iteration" in log.read_text(), "the resume")  # type: ignore[misc]
        assert flow.finish().status == [0, 0], flow.logs()
        assert flow.of("groups") == flow.of("regrouped") == []
        assert {one["level"] for one in flow.of("level")} == {"unchanged"}
        assert f"--- holdfast: {RESTART}" in (flow.folder / "rank-0.log").read_text()
        ends.append(torch.load(out / "final.pt"))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_groups_that_cannot_be_managed_are_torchs_own_with_the_reason(job: Job) -> None:
    """The arguments are the script's to choose, and it trains as ever."""
    flow = job("file", script="own_rendezvous", groups="auto", ranks=2)
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.results == [{"kind": "ProcessGroup", "step": 3}] * 2
    (message,) = flow.of("level")
    assert message["level"] == "managed-state"
    assert mentions(message["text"], "PyTorch's own", "init_method", "restart")
    assert message["text"] in (flow.folder / "rank-0.log").read_text()


def test_a_session_that_may_not_repeat_a_step_restarts_with_its_state(job: Job) -> None:
    """Without `data` it is unknown which batch a repeated step would get: a lost rank ends the others, and the level says why."""
    flow = job(script="own_rendezvous", groups="auto", ranks=2, save=1, chaos=[fault(1, "forward", 3)])
    flow.until_dead(1)
    assert flow.receive("exception", 0)["peer_lost"]
    flow.restart()
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.results == [{"kind": "ManagedGroup", "step": 3}] * 2
    assert {one["step"] for one in flow.of("resumed")} == {0, 2}
    assert flow.of("groups") == []
    level, text = {(one["level"], one["text"]) for one in flow.of("level")}.pop()
    assert level == "managed-state"
    assert mentions(text, "not repaired", "no `data`", "groups: managed", "all ranks restart")


COLD = """
import sys
import torch
from torch.distributed import device_mesh, distributed_c10d, init_process_group
places = [module.init_process_group for module in (torch.distributed, distributed_c10d, device_mesh)]
print(hasattr(init_process_group, "of_torch"), all(one is init_process_group for one in places), init_process_group.__name__)
print(type(torch.distributed.__loader__).__name__, type(torch.distributed.__spec__.loader).__name__, __name__, sys.argv)
print([type(one).__name__ for one in sys.meta_path if "Finder" in type(one).__name__])
"""


@pytest.mark.parametrize("groups", ["auto", "stock"])
def test_a_worker_without_a_fork_server_has_the_same_groups(tmp_path: Path, groups: str) -> None:
    """Its script imports torch itself, and finds the function replaced, wherever torch has it; with `stock` nothing is touched."""
    script = tmp_path / "cold.py"
    script.write_text(COLD)
    environment = {**os.environ, "HOLDFAST_GROUPS": groups, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), "run", str(script), "x"], env=environment, capture_output=True, text=True, check=False
    )
    replaced, loaders, finders = ran.stdout.splitlines()
    assert replaced == f"{groups == 'auto'} True init_process_group"
    assert loaders == f"SourceFileLoader SourceFileLoader __main__ {[str(script), 'x']}"
    assert "_TorchFinder" not in finders


def test_a_program_that_needs_an_interpreter_of_its_own_cannot_have_managed_groups(tmp_path: Path) -> None:
    """One sentence, before anything runs."""
    (tmp_path / "__main__.py").write_text("print('ran')")
    environment = {**os.environ, "HOLDFAST_GROUPS": "managed", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, str(PROGRAM), "run", str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (1, "", 1)
    assert mentions(ran.stderr, "groups: managed", str(tmp_path), "-m", "groups: auto")


FILE = dist.FileStore(os.devnull, 2)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"backend": "mpi"}, ["mpi", "gloo", "nccl"]),
        ({"backend": "cpu:gloo,cuda:ucc"}, ["cpu:gloo,cuda:ucc"]),
        ({"backend": "nccl"}, ["nccl", "GPU"]),
        ({"init_method": "tcp://10.0.0.1:29500"}, ["init_method", "tcp://10.0.0.1:29500"]),
        ({"store": FILE, "rank": 0, "world_size": 2}, ["store"]),
        ({"init_method": "env://", "rank": 1}, ["rank=1", "0"]),
        ({"world_size": 4}, ["world_size=4", "2"]),
    ],
)
def test_demanded_groups_that_cannot_be_managed_are_an_error_with_the_reason(
    arguments: dict[str, Any], names: list[str], agent: AgentDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is created."""
    variables = {"HOLDFAST_GROUPS": "managed", "HOLDFAST_TOKEN": "ab" * 16, "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(init, "link", lambda: AgentLink(agent.path))
    with pytest.raises(init.GroupsNotManaged) as refused:
        init.init_process_group(dist.init_process_group, **arguments)
    assert mentions(str(refused.value), "groups: managed", "groups: auto", *names)
    assert str(copy.copy(refused.value)) == str(refused.value)  # as it goes to another process
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("groups", "arguments", "error"),
    [
        ("managed", {"backend": "gloo", "timeout": 5}, TypeError),
        ("managed", {"backend": "gloo", "init_method": "env://", "store": FILE}, AssertionError),
        ("managed", {"backend": "gloo", "nonsense": 1}, TypeError),
        ("auto", {"backend": "nonsense", "store": FILE, "rank": 0, "world_size": 2}, Exception),
    ],
)
def test_wrong_arguments_raise_what_torch_raises(
    groups: str, arguments: dict[str, Any], error: type[Exception], agent: AgentDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own function has the messages."""
    variables = {"HOLDFAST_GROUPS": groups, "HOLDFAST_TOKEN": "ab" * 16, "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(init, "link", lambda: AgentLink(agent.path))
    with pytest.raises(error) as own:
        dist.init_process_group(**arguments)
    with pytest.raises(type(own.value), match=re.escape(str(own.value)[:60])):
        init.init_process_group(dist.init_process_group, **arguments)
    assert not dist.is_initialized()


def test_hooks_of_the_users_own_and_of_others_run_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch goes through all hooks while ours learns that training has begun: it must leave theirs in place."""
    from holdfast.runtime.telemetry import integration_level  # noqa: PLC0415 (it looks up torch's optimizers)

    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", optimizers._global_optimizer_pre_hooks.copy())
    calls: list[Any] = []
    integration_level.groups_are_managed()
    optimizers.register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.step()
    assert calls == [1, 1]
