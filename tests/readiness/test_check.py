"""`holdfast node preflight` on real hosts with real faults: each is named, with its cure, and on no other host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.probe.readiness.findings import Facts, ReadinessState
from holdfast.probe.readiness.inspection import probe
from holdfast.probe.readiness.judge import judge
from holdfast.probe.remote.bundle import BOOT
from tests.cli.conftest import Command, holdfast  # noqa: F401 (a fixture)
from tests.hosts.fixture import rack_of
from tests.hosts.rack import Rack
from tests.mentions import mentions

PAST = "SetEnv LD_PRELOAD={} FAKETIME=-3600s"


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give four hosts."""
    with rack_of(4, tmp_path_factory) as rack:
        yield rack


def described(rack: Rack, place: Path, **fields: Any) -> tuple[str, str]:
    """Write files of the rack's cluster and of a job; return their names."""
    (place / "cluster.yaml").write_text(yaml.safe_dump(rack.cluster(directory="hf")))
    (place / "train.py").touch()
    (place / "ckpt").mkdir(exist_ok=True)
    (place / "job.yaml").write_text(yaml.safe_dump({"name": "a", "script": "train.py", "checkpoint": {"directory": "ckpt"}, **fields}))
    return "cluster.yaml", "job.yaml"


def wrong(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Return what is the matter with each node, check by check."""
    nodes = json.loads(done.stdout)["nodes"]
    return {node["node"]: {one["check"]: one for one in node["checks"] if one["state"] != "ok"} for node in nodes}


@pytest.mark.long
def test_hosts_without_holdfast_get_the_command_that_installs_it(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """The rest is looked at all the same; with Holdfast there, and nothing else the matter, the host is ready."""
    cluster, job = described(rack, tmp_path)
    done = holdfast("node", "preflight", "--cluster", cluster, "n0")
    assert done.returncode == 1
    assert "`holdfast node bootstrap --cluster CLUSTER_FILE`" in done.stdout
    assert "torch 2" in done.stdout
    assert holdfast("node", "bootstrap", "--cluster", cluster).returncode == 0
    done = holdfast("node", "preflight", "--cluster", cluster, "--job", job, "n[0-1]", "--json")
    assert wrong(done) == {"n0": {}, "n1": {}}
    assert done.stdout.count("checkpoints are shared") == 2
    assert done.returncode == 0


@pytest.mark.long
def test_each_fault_is_named_on_its_host(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """A clock, a folder that is not shared or not to be written, a full disk, low limits, blocked ports, an unknown host key, at once."""
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if library is None or shutil.which("prlimit") is None:
        pytest.skip("needs faketime and prlimit (scripts/system_packages.sh)")
    cluster, job = described(rack, tmp_path)
    _, blocked, spoilt, strange = rack
    (spoilt.home / "hf").mkdir(exist_ok=True)
    spoilt.run("mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(spoilt.home / "hf"))
    assert holdfast("node", "bootstrap", "--cluster", cluster).returncode == 0
    blocked.cut([spoilt], "out")
    spoilt.run("mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "ckpt"))
    blocked.run("mount", "--bind", str(tmp_path / "ckpt"), str(tmp_path / "ckpt"))
    blocked.run("mount", "-o", "remount,bind,ro", str(tmp_path / "ckpt"))
    spoilt.server.stop()
    spoilt.server.more += (PAST.format(library),)
    spoilt.server.within += ("prlimit", "--nofile=512:512")
    spoilt.server.start()
    known = rack.known_hosts.read_text()
    rack.known_hosts.write_text("".join(line for line in known.splitlines(keepends=True) if not line.startswith(strange.address)))
    try:
        done = holdfast("node", "preflight", "--cluster", cluster, "--job", job, "--json")
    finally:
        rack.known_hosts.write_text(known)
        blocked.heal()
    assert done.returncode == 1
    found = wrong(done)
    assert {node: set(checks) for node, checks in found.items()} == {
        "n0": set(),
        "n1": {"ports", "checkpoints"},
        "n2": {"clock", "disk", "limits", "checkpoints"},
        "n3": {"login"},
    }, done.stdout
    assert "3600" in found["n2"]["clock"]["message"]
    assert "n0 wrote" in found["n2"]["checkpoints"]["message"]
    assert "Read-only file system" in found["n1"]["checkpoints"]["message"]
    assert "nofile is 512" in found["n2"]["limits"]["message"]
    assert spoilt.address in found["n1"]["ports"]["message"]
    assert "holdfast node trust" in found["n3"]["login"]["message"]
    assert all(one["cure"] for node in ("n1", "n2") for one in found[node].values())
    assert list((tmp_path / "ckpt").iterdir()) == [], "nothing is left there"


def test_a_job_whose_interpreter_has_no_torch_is_not_ready(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """The job's own interpreter is asked, its files are looked for, and so are the GPUs in the cluster file."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare/bin/python")
    cluster, job = described(rack, tmp_path, python=python, script="missing.py")
    (tmp_path / cluster).write_text(yaml.safe_dump(rack.cluster(directory="hf", gpus=64)))
    done = holdfast("node", "preflight", "--cluster", cluster, "--job", job, "n0", "--json")
    found = wrong(done)["n0"]
    assert "No module named 'torch'" in found["torch"]["message"]
    assert mentions(done.stdout, "written"), "no other host has looked"
    assert mentions(found["gpus"]["message"], 64)
    assert str(tmp_path / "missing.py") in found["files"]["message"]
    assert done.returncode == 1


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that everybody may write in, as the one above that of checkpoints often is."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are closed to other users
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_a_host_with_another_user_cannot_save_with_the_others(open_folder: Path) -> None:
    """It may make its own folders there; what counts is whether it may write into those of the others, and read them."""
    python, change = shutil.which("python3", path="/usr/bin"), shutil.which("setpriv")
    if python is None or change is None or os.geteuid() != 0:
        pytest.skip("needs root, setpriv and an interpreter that everybody may use")

    def probe_answer(*other: str, **question: Any) -> dict[str, Any]:
        source = probe()
        text = f"{len(source.encode())}\n{source}{json.dumps({'mark': 'm', 'seconds': 20, 'token': 't', **question})}\n"
        done = subprocess.run([*other, python, "-I", "-c", BOOT], input=text, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout.partition(" ")[2]))

    nobody = (change, "--reuid=65534", "--regid=65534", "--clear-groups")
    left = probe_answer(do="leave", folder=str(open_folder / "ckpt"), name="n0")
    asked = {"do": "join", "by": "n0", "name": "n1.own", "patience": 3, **left}
    assert probe_answer(**asked) == {"seen": True}
    assert probe_answer(*nobody, **asked) == {"seen": True, "unwritten": "Permission denied"}
    Path(left["place"]).chmod(0o700)
    assert probe_answer(*nobody, **asked) == {"seen": True, "unread": "Permission denied"}
    assert probe_answer(do="remove", **left) == {}
    assert list(open_folder.iterdir()) == []
    for why in ("unwritten", "unread"):
        one = _node("n1")
        one.shared = {"seen": True, "alone": False, "by": "n0", **left, why: "Permission denied"}
        (found,) = [found for found in judge([one]) if found.check == "checkpoints"]
        assert found.state is ReadinessState.MISSING
        assert "Permission denied" in found.message
        assert "`id -u`" in found.cure


def _node(name: str, **changes: Any) -> Facts:
    gpu = {"on_bus": ["0000:18:00.0"], "driver_version": "580.1", "gpus": [{"index": 0}, {"index": 1}]}
    probe = {
        "python": "3.12.1",
        "disk": {"path": "/", "free": 10**12, "writable": True},
        "shm": {"free": 10**9, "total": 10**9},
        "limits": {"nofile": [65536, 65536], "memlock": [65536, -1], "nproc": [-1, -1]},
        "infiniband": [],
    }
    facts = Facts(node=name, probe={**probe, **changes.pop("probe", {})}, gpus={**gpu, **changes.pop("gpus", {})}, clock=(0.0, 0.1))
    facts.environment = {"in_use": "0.1.0-a-b", "complete": True, "path": "/x/env"}
    facts.torch = {"version": "2.13.0", "cuda": "13.0", "hip": None, "gloo": True, "devices": 2, "why": "", **changes.pop("torch", {})}
    facts.node_proxy = {"interface": "eth0", "address": "10.0.0.1"}
    return facts


@pytest.mark.parametrize(
    ("changes", "check", "state"),
    [
        ({"torch": {"version": "2.12.0"}}, "torch", ReadinessState.MISSING),
        ({"torch": {"cuda": None, "devices": 0}}, "torch", ReadinessState.MISSING),
        ({"torch": {"cuda": None, "hip": "6.4"}}, "torch", ReadinessState.MISSING),
        ({"torch": {"devices": 0, "why": "The NVIDIA driver on your system is too old"}}, "torch", ReadinessState.MISSING),
        ({"torch": {"gloo": False}}, "torch", ReadinessState.MISSING),
        ({"probe": {"python": "3.11.2"}}, "python", ReadinessState.DEGRADED),
        ({"gpus": {"gpus": [{"index": 0}]}}, "gpus", ReadinessState.MISSING),
        ({"gpus": {"gpus": {"blind": "no NVML"}}}, "gpus", ReadinessState.MISSING),
        ({"gpus": {"gpus": [{"index": 0}, {"index": 1, "failed": 15}]}}, "gpus", ReadinessState.MISSING),
        ({"gpus": {"driver_version": "570.2"}}, "gpus", ReadinessState.DEGRADED),
        ({"probe": {"infiniband": ["mlx5_0"]}}, "limits", ReadinessState.DEGRADED),
        ({"probe": {"shm": {"free": 10**7, "total": 6 * 10**7}}}, "memory", ReadinessState.DEGRADED),
        ({"probe": {"shm": None}}, "memory", ReadinessState.DEGRADED),
    ],
)
def test_a_node_that_differs_from_most_is_reported(changes: dict[str, Any], check: str, state: ReadinessState) -> None:
    """What this machine cannot have is judged from what such a node would report; the others are fine."""
    found = [one for one in judge([_node("a"), _node("b"), _node("c", **changes)]) if one.state is not ReadinessState.OK]
    assert [(one.node, one.check, one.state) for one in found] == [("c", check, state)]
    assert all(one.cure for one in found)


EIGHT = {"gpus": [{"index": index} for index in range(8)]}
NONE: dict[str, Any] = {"on_bus": [], "gpus": {"blind": "no NVML"}}
CPU = {"cuda": None, "devices": 0}
ROCM = {"cuda": None, "hip": "6.4", "devices": 8}


@pytest.mark.parametrize(
    ("nodes", "declared", "wrong"),
    [
        ([{}, {}], {"a": 8, "b": 8}, [("a", "gpus", "2 GPUs, the cluster file says 8"), ("b", "gpus", "2 GPUs, the cluster file says 8")]),
        ([{"gpus": EIGHT}, {}], {"a": 8, "b": 2}, []),
        ([{"gpus": EIGHT}, {}, {}], {"a": 8}, []),
        ([{"gpus": EIGHT}, {"gpus": EIGHT}, {}], {"a": 8}, [("c", "gpus", "2 GPUs, other nodes have 8")]),
        ([{"gpus": EIGHT}, {}], {"a": 2, "b": 2}, [("a", "gpus", "8 GPUs, the cluster file says 2")]),
        ([{"gpus": NONE, "torch": ROCM}, {"gpus": NONE, "torch": ROCM}], {"a": 8, "b": 8}, []),
        ([{"gpus": NONE, "torch": CPU}, {}], {"a": 0, "b": 2}, []),
        ([{"gpus": NONE, "torch": CPU}, {"gpus": NONE, "torch": CPU}], {}, []),
        ([{"torch": CPU}, {"torch": CPU}], {"a": 2}, [("a", "torch", "built without CUDA"), ("b", "torch", "has 2 NVIDIA GPUs")]),
    ],
)
def test_a_node_is_compared_with_the_cluster_file(
    nodes: list[dict[str, Any]], declared: dict[str, int], wrong: list[tuple[str, str, str]]
) -> None:
    """Only nodes that it does not mention are compared with each other; a torch that all have alike may still not fit their GPUs."""
    facts = [_node(name, **changes) for name, changes in zip("abc", nodes, strict=False)]
    found = [one for one in judge(facts, gpus=declared) if one.state is not ReadinessState.OK]
    assert [(one.node, one.check) for one in found] == [(node, check) for node, check, _ in wrong]
    for one, (_, _, words) in zip(found, wrong, strict=True):
        assert words in one.message
        assert one.cure
