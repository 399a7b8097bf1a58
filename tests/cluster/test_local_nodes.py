"""Nodes that are folders of this machine: starting agents, power cuts, fences."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.cluster import NodeView, open_cluster
from holdfast.cluster.local import LocalNodes
from holdfast.cluster.slurm.commands import environment
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.errors import NodeLost
from holdfast.host import gpu_assignment
from holdfast.host.gpu_assignment import VISIBLE
from holdfast.host.process import NODE_MARK, is_alive, mark_of, marked
from holdfast.spec import LocalCluster
from tests.mentions import mentions
from tests.waiting import wait_until

SECONDS = 60


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[LocalNodes]:
    """Give a cluster of three nodes."""
    cluster = LocalNodes("here", tmp_path / "here", 3)
    yield cluster
    clear(cluster)


def clear(cluster: LocalNodes) -> None:
    """Leave nothing of a cluster."""
    for node in cluster.names():
        cluster.fence(node)


def processes_of(cluster: LocalNodes, node: str) -> list[int]:
    """Return what runs on a node."""
    return list(marked(NODE_MARK, mark_of(cluster.folder(node))))


def run_worker(cluster: LocalNodes, node: str) -> int:
    """Have the node's agent run a worker; return its pid."""
    event_queue = EventQueue()
    channel = AgentClient(node, lambda: cluster.connect(node), event_queue, epoch=1, job="job")
    channel.attach()
    log = str(cluster.root / "logs")
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    channel.send_command("prepare", lease=60.0, warm=False, argv=nap, directory="/", environment={}, log_directory=log)
    channel.send_command("start", generation=1, membership={node: [0]}, workers=[{"rank": 0, "environment": {}}])
    while (event := event_queue.get(timeout=SECONDS)[1])["event"] != "worker.started":  # the machine's own faults may be reported before
        pass
    channel.close()
    return int(event["pid"])


def test_a_cluster_follows_its_description(holdfast_home: Path, tmp_path: Path) -> None:
    """Its nodes are in Holdfast's home unless it names a directory."""
    source = open_cluster(LocalCluster(name="mine", nodes=2))
    assert source.names() == ["node-0", "node-1"]
    assert source.folder("node-1") == holdfast_home / "clusters" / "mine" / "node-1"
    assert open_cluster(LocalCluster(directory=str(tmp_path))).folder("node-0") == tmp_path / "node-0"
    assert source.address("node-1") == "127.0.0.1"
    assert source.survey() == [NodeView(name=name, status="idle") for name in source.names()]


def test_addresses_of_the_controller_reach_no_node(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an agent's environment, and so a worker's, nor that of Slurm's commands has them: they may contain passwords."""
    secret = "hunter2"
    for name in ("HOLDFAST_HISTORY", "PREFECT_API_AUTH_STRING", "HOLDFAST_PREFECT_STANDS_IN", "HOLDFAST_PREFECT_STANDS_IN_AUTH"):
        monkeypatch.setenv(name, f"http://ann:{secret}@prefect.example.org/api")
    nodes.start_agent("node-0")
    found = [Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_of(nodes, "node-0")]
    assert found
    assert not [one for one in found if secret.encode() in one]
    assert secret not in str(environment())


def test_an_agent_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """A controller exits, and so does its terminal."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.cluster.local import LocalNodes\n"
        "LocalNodes('here', Path(sys.argv[1]), 1).start_agent('node-0')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, start_new_session=True, cwd=Path(__file__).parents[2])
    nodes = LocalNodes("here", tmp_path, 1)
    try:
        (view,) = nodes.survey()
        assert (view.status, view.agent, view.job) == ("up", "up", None)
        assert view.pid is not None
        assert os.getsid(view.pid) != os.getsid(0)
        run_worker(nodes, "node-0")
        assert nodes.survey()[0].job == "job"
    finally:
        clear(nodes)
    assert nodes.survey()[0].status == "idle"


def test_eight_agents_come_up_at_once(tmp_path: Path) -> None:
    """A job's nodes are brought up in parallel."""
    nodes = LocalNodes("here", tmp_path, 8)
    try:
        with ThreadPoolExecutor(8) as hands:
            list(hands.map(nodes.start_agent, nodes.names()))
        assert [view.status for view in nodes.survey()] == ["up"] * 8
        assert len({view.pid for view in nodes.survey()}) == 8
    finally:
        with ThreadPoolExecutor(8) as hands:
            list(hands.map(nodes.fence, nodes.names()))


def test_each_node_shows_its_workers_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked in the environment of a real worker; a node whose GPUs another node holds is not started."""
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    nodes = LocalNodes("here", tmp_path, 2)
    try:
        for node, shown in (("node-0", ("4", "5")), ("node-1", ("6", "7"))):
            nodes.start_agent(node)
            worker = run_worker(nodes, node)
            wait_until(lambda worker=worker, shown=shown: gpu_assignment.gpus_of(worker) == shown, seconds=SECONDS)  # type: ignore[misc]
        nodes.fence("node-0")
        with pytest.raises(NodeLost, match=r"GPU 6, 7 .* node-1"):
            LocalNodes("here", tmp_path, 1).start_agent("node-0")
    finally:
        clear(nodes)


def test_without_gpus_the_visible_devices_are_not_set(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is left as it is."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(gpu_assignment, "visible_gpus", lambda *_: ())
    assert VISIBLE not in nodes.place("node-0").environment


def test_only_one_of_several_starts_of_an_agent_succeeds(nodes: LocalNodes) -> None:
    """The others get an error, and the first agent is not affected."""

    def start(_: int) -> str:
        try:
            nodes.start_agent("node-0")
        except NodeLost as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as hands:
        answers = sorted(hands.map(start, range(3)))
    assert answers[0] == ""
    assert all(mentions(answer, "another agent") for answer in answers[1:])
    nodes.connect("node-0").close()


def test_a_node_that_is_switched_off_loses_all_processes(nodes: LocalNodes) -> None:
    """It comes back empty."""
    nodes.start_agent("node-0")
    nodes.start_agent("node-1")
    pids = {node: run_worker(nodes, node) for node in ("node-0", "node-1")}
    nodes.power_off("node-0")
    assert not is_alive(pids["node-0"], None)
    assert is_alive(pids["node-1"], None)
    assert not nodes.is_reachable("node-0")
    assert [view.status for view in nodes.survey()] == ["off", "up", "idle"]
    with pytest.raises(ConnectionRefusedError, match="switched off"):
        nodes.connect("node-0")
    with pytest.raises(NodeLost, match="switched off"):
        nodes.start_agent("node-0")
    nodes.power_on("node-0")
    nodes.power_on("node-0")
    assert [view.status for view in nodes.survey()] == ["idle", "up", "idle"]
    nodes.start_agent("node-0")
    nodes.power_off("node-2")
    assert [view.status for view in nodes.survey()] == ["up", "up", "off"]


def test_a_fence_ends_the_processes_of_its_own_node_only(nodes: LocalNodes, tmp_path: Path) -> None:
    """Other nodes of the cluster, nodes of the same name in another cluster, and a node whose name starts like ours are not affected."""
    others = [LocalNodes("there", tmp_path / "there", 1), LocalNodes("longer", tmp_path / "here" / "node-0", 1)]
    try:
        for cluster, node in ((nodes, "node-0"), (nodes, "node-1"), *((other, "node-0") for other in others)):
            cluster.start_agent(node)
        pids = [
            run_worker(cluster, node) for cluster, node in ((nodes, "node-0"), (nodes, "node-1"), *((other, "node-0") for other in others))
        ]
        killed = nodes.fence("node-0")
        assert set(killed) <= {*killed, pids[0]}
        assert processes_of(nodes, "node-0") == []
        assert [is_alive(pid, None) for pid in pids] == [False, True, True, True]
        assert [view.status for view in nodes.survey()] == ["idle", "up", "idle"]
        assert nodes.fence("node-0") == nodes.fence("node-2") == []
        nodes.start_agent("node-0")
    finally:
        for other in others:
            clear(other)


def test_a_fence_ends_a_stopped_agent_and_its_workers(nodes: LocalNodes) -> None:
    """A stopped agent keeps its workers and does not answer."""
    nodes.start_agent("node-0")
    pid = run_worker(nodes, "node-0")
    agent = nodes.survey()[0].pid
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    assert agent in nodes.fence("node-0")
    assert not is_alive(pid, None)
    nodes.start_agent("node-0")
    assert nodes.survey()[0].pid != agent


def test_a_job_does_not_fence_a_node_that_another_job_has_taken(nodes: LocalNodes) -> None:
    """A controller that returns after an hour still believes that the node is its own."""
    nodes.start_agent("node-0")
    pid = run_worker(nodes, "node-0")
    assert nodes.fence("node-0", "another job") == []
    assert is_alive(pid, None)
    assert nodes.fence("node-0", "job")
    assert not is_alive(pid, None)
    assert nodes.fence("node-0", "another job") == []


def test_a_node_may_be_reached_through_a_link(tmp_path: Path) -> None:
    """The mark is that of the folder itself: another path leads to the same processes."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    by_link, by_name = LocalNodes("a", tmp_path / "link", 1), LocalNodes("b", tmp_path / "real", 1)
    by_link.start_agent("node-0")
    assert len(by_name.fence("node-0")) >= 2
    assert by_link.survey()[0].status == "idle"


@pytest.mark.parametrize("name", ["", "agent.sock", "agent.log", "event-log.jsonl"])
def test_an_agent_that_cannot_start_is_a_lost_node_with_the_reason(nodes: LocalNodes, name: str) -> None:
    """Something blocks the folder, or one of its files."""
    folder = nodes.folder("node-0")
    if name:
        (folder / name / "full").mkdir(parents=True)
        (folder / "event-log.before" / "full").mkdir(parents=True)
    else:
        folder.parent.mkdir(parents=True)
        folder.write_text("")
    with pytest.raises(NodeLost, match=r"File exists|[Dd]irectory"):
        nodes.start_agent("node-0")
    wait_until(lambda: processes_of(nodes, "node-0") == [], seconds=SECONDS)
    assert nodes.survey()[0].status == "idle"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_of_another_user_is_a_lost_node_with_the_reason(nodes: LocalNodes, tmp_path: Path, mode: int) -> None:
    """Tried as a user who may not write there, or not even read."""
    for folder in (tmp_path, *tmp_path.parents[:2]):  # as pytest makes them: for their owner alone
        folder.chmod(0o755)
    nodes.root.mkdir()
    nodes.root.chmod(mode)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom holdfast.cluster.local import LocalNodes\nfrom holdfast.errors import NodeLost\n"
        "os.setuid(65534)\n"
        "try:\n    LocalNodes('here', Path(sys.argv[1]), 1).start_agent('node-0')\n"
        "except NodeLost as error:\n    print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(nodes.root)], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert "Permission denied" in ran.stdout
    assert str(nodes.folder("node-0")) in ran.stdout


def test_an_agent_that_does_not_report_is_a_lost_node(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interpreter that exits at once, one that is missing, and one that hangs."""
    hangs = sleeper(tmp_path)
    for python, why in (("/bin/true", "it sent nothing"), (str(tmp_path / "none"), "No such file"), (hangs, "timed out")):
        monkeypatch.setattr("holdfast.agent.node.directory.START_SECONDS", 0.5 if python == hangs else SECONDS)
        monkeypatch.setattr(sys, "executable", python)
        with pytest.raises(NodeLost, match=why):
            nodes.start_agent("node-0")
        wait_until(lambda: processes_of(nodes, "node-0") == [], seconds=SECONDS)


def sleeper(folder: Path) -> str:
    """Return a program that never says anything."""
    path = folder / "sleeper"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"pid": "x", "started": 1, "job": null}', '{"pid": 1, "started": 1, "job": null}', "\xff"]
)
def test_a_malformed_agent_file_is_no_agent(nodes: LocalNodes, text: str) -> None:
    """A file damaged by a power cut, or of an agent from before the last boot."""
    nodes.folder("node-0").mkdir(parents=True)
    (nodes.folder("node-0") / "agent.json").write_bytes(text.encode("latin-1"))
    assert nodes.survey()[0] == NodeView(name="node-0", status="idle")
