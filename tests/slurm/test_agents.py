"""Agents on nodes of a real allocation: begun by its wardens, they outlive who asked for them and end with it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from holdfast.cluster.interface import AllocationRequest
from holdfast.cluster.slurm.nodes import SlurmNodes
from holdfast.history.models import Generation, Job
from holdfast.history.store import History
from holdfast.host.process import marked
from holdfast.paths import job_directory
from holdfast.spec import SlurmCluster
from holdfast.support.bundle import write
from tests.cli.test_support_bundle import contents
from tests.mentions import mentions
from tests.slurm.slurm_server import SlurmServer
from tests.waiting import wait_until


@pytest.mark.long
def test_agents_outlive_their_controller_have_no_secrets_and_end_with_their_allocation(
    slurm: SlurmServer, holdfast_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next controller finds them in the same allocation, though its node does not see this host's log folder."""
    assert holdfast_home.is_dir()
    for name, value in {**slurm.environment, "LAB_TOKEN": "s3cret", "LAB_FOLDER": "/shared"}.items():
        monkeypatch.setenv(name, value)
    cluster = SlurmCluster(kind="slurm", allocation="new", directory=str(tmp_path / "n"), options=["--hold"])
    first = SlurmNodes(cluster)
    first.allocator.begin("j1", "agents", tmp_path)
    first.allocator.request(AllocationRequest(nodes=1))
    (held,) = wait_until(lambda: first.allocator.present, seconds=60, explain=first.allocator.describe)
    shutil.rmtree(job_directory("agents"))
    slurm.run("scontrol", "release", held.id)
    (node,) = wait_until(lambda: first.allocator.usable(time.time()), seconds=60, explain=first.allocator.describe)
    first.start_agent(node)
    (number,) = [one.id for one in first.allocator.present]
    assert (tmp_path / f"slurm-{number}.log").exists()
    assert any(mentions(one, "1 node", f"job {number}") for one in first.allocator.new_messages())
    first.allocator.close(end=False)
    first.close()

    second = SlurmNodes(cluster)
    second.allocator.begin("j1", "agents", tmp_path)
    assert second.allocator.usable(time.time()) == [node]
    views = {view.name: (view.status, view.allocation) for view in second.survey()}
    assert views == {name: ("up", number) if name == node else ("away", None) for name in slurm.names}
    assert (second.is_reachable(node), second.address(node)) == (True, "127.0.0.1")
    agent = next(iter(marked("HOLDFAST_NODE_MARK", str(second.folder(node)))))
    words = dict(one.partition("=")[::2] for one in Path(f"/proc/{agent}/environ").read_text().split("\0"))
    assert words["LAB_FOLDER"] == "/shared"
    assert not words.keys() & {"LAB_TOKEN", "SLURM_NTASKS", "SLURM_PROCID"}
    second.close()
    in_a_bundle(second, node, tmp_path)
    second.allocator.close(end=True)
    wait_until(lambda: not list(marked("HOLDFAST_NODE_MARK", str(tmp_path / "n" / "nodes" / node))), seconds=60, explain=slurm.logs)
    assert slurm.run("squeue", "--noheader", "--states=RUNNING,PENDING") == ""


def in_a_bundle(nodes: SlurmNodes, node: str, place: Path) -> None:
    """See that what the agent wrote is in a bundle, and what the ranks wrote once: nodes share the folder of the job."""
    other = next(name for name in nodes.names() if name != node)
    (nodes.folder(node) / "agent.log").write_text("the agent was here\n")
    logs = job_directory("agents") / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (logs / f"rank-{rank}.log").write_text(f"rank {rank} was here\n")
    described = {"kind": "slurm", "allocation": "new", "directory": str(place / "n")}
    history = History.open()
    with history.session() as session:
        session.add(Job(id="j1", name="agents", cluster=described, directory="/", at=1.0))
        session.add(Generation(job_id="j1", number=1, at=1.0, world_size=2, ranks={node: [0], other: [1]}))
        session.commit()
    history.close()
    missing = [line for line in write(place / "b.tar.gz", "agents") if line.startswith("nodes/")]
    texts = contents(place / "b.tar.gz")
    assert [name for name in texts if "rank-" in name] == ["job/logs/rank-0.log", "job/logs/rank-1.log"]
    assert texts[f"nodes/{node}/agent.log"] == "the agent was here\n"
    (line,) = missing
    assert mentions(line, f"nodes/{other}/agent.log", "NodeLost")
    assert f"{place}/n/nodes" in line
