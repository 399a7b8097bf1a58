"""`init_process_group` as the launcher replaces it: what scripts get that know nothing of `holdfast.join`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.mentions import mentions
from tests.runtime.chaos import fault
from tests.runtime.flow_double import Ended, Job, assert_undisturbed


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
    assert (flow.folder / "rank-0.log").read_text().count("holdfast: process groups and state are managed") == 2


def test_torch_and_frameworks_get_what_they_would_from_torchs_own_group(job: Job) -> None:
    """Names of backends, subgroups, meshes, children with groups of their own, and a second start after all were destroyed."""
    flow = job(script="torch_calls", groups="managed", ranks=3)
    ended = flow.finish()
    assert ended.status == [0] * 3, flow.logs()
    managed = "ManagedGroup"
    for rank, told in enumerate(ended.told):
        assert (told["before"], told["same"], told["destroyed"]) == (False, True, False)
        assert (told["kind"], told["timeout"], told["default timeout"]) == (managed, 180, 1800)
        assert told["backend"] == ["gloo", True, "cpu:gloo,cuda:gloo"]
        assert told["device"] == ["cpu", ["cpu"]]
        assert mentions(told["again"], "twice")
        groups = {"default": "gloo", "named": "gloo", "both": "cpu:gloo,cuda:nccl"}
        expected = {name: [managed, backend, 6.0] for name, backend in groups.items()}
        assert told["groups"] == (expected | {"part": [managed, "gloo", 3.0]} if rank < 2 else expected)
        assert (told["mesh"], told["objects"]) == ([managed, "gloo"], [{"rank": one} for one in range(3)])
        assert (told["loaded"], told["ddp"]) == (28.0, 3)
        assert told["second"] == [managed, 6.0, 6.0, True]
    assert ended.told[0]["fork"] == ended.told[0]["spawn"] == ["ProcessGroup 2"] * 2
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
            assert flow.hear("exception", 0)["peer_lost"]
            survivor = flow.pids[0]
            assert flow.until(lambda flow=flow, pid=survivor: flow.workers.ended().get(pid), "the end of rank 0") == 1  # type: ignore[misc]
            flow.restart()
            flow.until(lambda log=log: "resuming from iteration" in log.read_text(), "the resume")  # type: ignore[misc]
        assert flow.finish().status == [0, 0], flow.logs()
        assert flow.of("groups") == flow.of("regrouped") == []
        assert {one["level"] for one in flow.of("level")} == {"unchanged"}
        assert "holdfast: this script has no holdfast.session" in (flow.folder / "rank-0.log").read_text()
        ends.append(torch.load(out / "final.pt"))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_groups_that_cannot_be_managed_are_torchs_own_with_the_reason(job: Job) -> None:
    """The arguments are the script's to choose, and it trains as ever."""
    flow = job(script="own_rendezvous", groups="auto", ranks=2)
    ended = flow.finish()
    assert ended.status == [0, 0], flow.logs()
    assert ended.told == [{"kind": "ProcessGroup", "step": 3}] * 2
    (told,) = flow.of("level")
    assert told["level"] == "managed-state"
    assert mentions(told["text"], "PyTorch's own", "init_method", "restart")
    assert told["text"] in (flow.folder / "rank-0.log").read_text()
