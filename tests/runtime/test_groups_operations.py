"""A managed group does what torch's own code expects of a gloo group, and no wait in it is endless."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from holdfast.runtime.groups.backends import BuildOptions, build
from holdfast.runtime.groups.dry_runs.dry_run import DryRun
from holdfast.runtime.groups.operations import StepTransaction
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.process.exit import wait_until_idle
from tests.mentions import mentions
from tests.runtime.flow_double import FlowDouble, Job, Workers


def test_every_operation_gives_what_stock_gloo_gives(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Collectives, messages, objects, functional and coalesced ones, on three ranks."""
    flow = FlowDouble(workers, tmp_path_factory.mktemp("f"), "operations", ranks=3).begin()
    ended = flow.finish()
    assert ended.status == [0, 0, 0], flow.logs()
    for result in ended.results:
        assert result["kinds"] == ["gloo", "gloo"]
        different = {name: pair for name, pair in result["found"].items() if pair[0] != pair[1]}
        assert different == {}
        refused = {name for name, pair in result["found"].items() if str(pair[1]).startswith("error")}
        assert result["broken"][0] == result["broken"][1], "futures have gloo's shapes also where a peer is lost"
        assert refused <= ({"all_to_all"} if torch.__version__ < "2.12" else set())  # before, gloo had none
    flow.close()


def test_every_reduction_is_right_or_refused_as_gloo_refuses_it(job: Job) -> None:
    """Every collective that reduces, reduce operation and element type; AVG of whole numbers and PREMUL_SUM are refused."""
    flow = job(script="reductions", ranks=3)
    ended = flow.finish()
    assert ended.status == [0, 0, 0], flow.logs()
    assert ended.results == [{"count": 702, "wrong": []}] * 3


@pytest.mark.parametrize(("what", "left"), [("message", 0.0), ("part", 1.0), ("whole", 1.0), ("future", 1.0), ("scattered", 1.0)])
def test_a_command_ends_a_wait_that_would_never_end(job: Job, what: str, left: float) -> None:
    """Rank 0 waits for a stopped rank, which may have received a part of the message: only the command ends that.

    It ends as the loss of a peer, without an exception, and does not delay the end of the group.
    """
    flow = job(what, script="waiting", ranks=2)
    flow.receive("waits", 0)
    flow.until_stopped(1)
    flow.send(0, {"do": "abandon", "generation": 1, "lost": [1]})
    pid = flow.pids[0]
    assert flow.until(lambda: 0 if pid not in flow.workers.ended() else [flow.workers.ended()[pid]], "the end of rank 0") == [0]
    flow.kill(1)
    result = flow.finish().results[0]
    assert (result["tensor"], result["lost"]) == ([left] * 3, True)
    assert mentions(result["why"], "generation 1")


def test_a_reduce_scatter_notices_a_dead_peer_by_itself(job: Job) -> None:
    """No command comes: gloo's error is enough, though torch's work for such an operation never reports completion."""
    flow = job("dead", script="waiting", ranks=2)
    flow.until_dead(1)
    flow.until(lambda: flow.pids[0] in flow.workers.ended(), "the end of rank 0")
    result = json.loads((flow.folder / "result-0.json").read_text())
    assert (result["tensor"], result["lost"]) == ([1.0] * 3, True)
    assert "Connection closed" in result["why"] or "reset by peer" in result["why"], result


def test_a_receive_from_any_source_reports_the_sender() -> None:
    """Through the work, as torch asks for it."""
    store, groups = dist.HashStore(), dict[int, ManagedGroup]()
    options = BuildOptions(devices=("cpu",), timeout=timedelta(seconds=60), host="127.0.0.1")

    def make(rank: int) -> None:
        group = ManagedGroup("anybody", [0, 1], rank, StepTransaction(), options.timeout)
        group.replace_backend(build(store, "anybody", rank, 2, options=options, is_cancelled=lambda: False), {})
        groups[rank] = group

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    sent = groups[0].send([torch.ones(2)], 1, 0)
    work = groups[1].recv_anysource([torch.zeros(2)], 0)
    work.wait()
    sent.wait()
    assert work._source_rank() == 0
    wait_until_idle()
    for group in groups.values():
        group.shutdown()


def test_operations_need_no_options() -> None:
    """Some callers in torch omit them."""
    group = ManagedGroup("alone", [0, 1, 2], 2, StepTransaction(), timedelta(seconds=1))
    group.dry_run = DryRun(None, [group])
    gathered = torch.zeros(6)
    group.all_gather_single(gathered, torch.ones(2))
    group.allreduce_coalesced([torch.ones(2)])
    assert gathered.tolist() == [1.0] * 6
