"""`nproc_per_node: auto | gpu | cpu` on hosts behind real SSH servers: they are counted when the job is launched there."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import Any

import pytest

from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import RanksNotCounted
from holdfast.history import History, queries
from holdfast.host.gpu_assignment import VISIBLE
from holdfast.policies.states import Event, State
from holdfast.spec import TrainingJob
from tests.control.launches import COUNTS, ends, launched
from tests.mentions import mentions
from tests.ssh.conftest import Site


@pytest.fixture
def hosts(site: Site, holdfast_home: object) -> Site:
    """Give a site on whose hosts Holdfast is installed."""
    (site.place / "hf").mkdir()
    (site.place / "hf" / "env").symlink_to(sys.prefix)
    return site


def job(site: Site, nproc: str, nodes: int, **more: Any) -> TrainingJob:
    """Return a job whose ranks write down how many there are on their node."""
    fields = {"name": "counts", "command": [sys.executable, "-c", COUNTS], "workdir": str(site.place), "nproc_per_node": nproc, **more}
    return TrainingJob.model_validate({**fields, "nnodes": nodes, "preflight": False, "checkpoint": {"directory": str(site.place)}})


def counts(site: Site, job: TrainingJob) -> dict[str, str]:
    """Run *job* to its end; return what each rank found."""
    with control_job(job, site.cluster(directory=str(site.place / "hf"))) as run:
        assert isinstance(run, JobController)
        ends(run, launched(run))
        assert run.state is State.COMPLETED, run.reason
    return {path.name: path.read_text() for path in site.place.glob("rank-*")}


def test_each_gpu_of_a_host_gets_a_rank(hosts: Site) -> None:
    """Those that the host gives to whoever logs in; the number is on record, for whoever takes the job over."""
    for name in ("a", "b"):
        hosts.node(name, f"SetEnv {VISIBLE}=2,3,5")
    assert counts(hosts, job(hosts, "auto", 2)) == {f"rank-{rank}": "3" for rank in range(6)}
    with closing(History.open()) as history:
        assert queries.newest_job(history, "counts").spec["nproc_per_node"] == 3


@pytest.mark.parametrize("nproc", ["auto", "cpu"])
def test_without_gpus_each_cpu_gets_a_rank(hosts: Site, nproc: str) -> None:
    """As torchrun's `auto`; the job itself may hide the GPUs."""
    hosts.node("a", f"SetEnv {VISIBLE}=0,1,2,3,4")
    found = counts(hosts, job(hosts, nproc, 1, env={VISIBLE: ""}))
    cpus = len(os.sched_getaffinity(0))
    assert found == {f"rank-{rank}": str(cpus) for rank in range(cpus)}


def test_hosts_that_differ_end_the_launch_with_both_names_and_numbers(hosts: Site) -> None:
    """No rank has started."""
    hosts.node("a", f"SetEnv {VISIBLE}=0,1,2,3")
    hosts.node("b", f"SetEnv {VISIBLE}=0,1")
    with control_job(job(hosts, "gpu", 2), hosts.cluster(directory=str(hosts.place / "hf"))) as run:
        assert isinstance(run, JobController)
        turn = launched(run)
        assert turn.event is Event.FAILED
        assert mentions(turn.reason, "nproc_per_node", "a: 4 GPUs", "b: 2 GPUs")
        run.move(turn.event, turn.reason)
    assert not list(hosts.place.glob("rank-*"))


def test_a_host_without_gpu_ends_the_launch_of_a_job_that_asks_for_some(hosts: Site) -> None:
    """With its name; as torchrun's `gpu` fails."""
    hosts.node("a", f"SetEnv {VISIBLE}=")
    with control_job(job(hosts, "gpu", 1), hosts.cluster(directory=str(hosts.place / "hf"))) as run:
        assert isinstance(run, JobController)
        turn = launched(run)
        assert (turn.event, mentions(turn.reason, "nproc_per_node", "a", "no GPU")) == (Event.FAILED, True)
        run.move(turn.event, turn.reason)


def test_a_host_that_differs_is_no_spare_node(hosts: Site) -> None:
    """It is refused when it is brought up, and the job goes on with the others."""
    hosts.node("a", f"SetEnv {VISIBLE}=0,1")
    hosts.node("b", f"SetEnv {VISIBLE}=0")
    with control_job(job(hosts, "auto", 1), hosts.cluster(directory=str(hosts.place / "hf"))) as run:
        assert isinstance(run, JobController)
        turn = launched(run)
        (refused,) = run.nodes.bring_up(["b"]).values()
        assert isinstance(refused, RanksNotCounted)
        assert refused.detail == "a: 2 GPUs; b: 1 GPU"
        ends(run, turn)
        assert run.state is State.COMPLETED
