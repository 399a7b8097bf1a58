"""`holdfast nodes bootstrap` on real hosts: what is there afterwards, and what is said where it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.bootstrap import Hosts, Wheel, node_wheel
from holdfast.spec import SshCluster, cluster_of
from tests.bootstrap.wheels import newer
from tests.cli.conftest import Command, holdfast  # noqa: F401 (a fixture)
from tests.hosts.fixture import rack_of
from tests.hosts.host import Host
from tests.hosts.rack import Rack

IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
assert all(module.__file__.startswith(sys.argv[1]) for name, module in sys.modules.items() if name.startswith(("holdfast", "detectors")))
"""
LATE = "import sys; print('up', flush=True); sys.stdin.readline(); import holdfast; print(holdfast.__version__)"


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give three hosts."""
    with rack_of(3, tmp_path_factory) as rack:
        yield rack


def described(rack: Rack, place: Path, **fields: Any) -> str:
    """Write a file of the rack's cluster; return its name."""
    (place / "cluster.yaml").write_text(yaml.safe_dump(rack.cluster(**fields)))
    return str(place / "cluster.yaml")


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what was told of each node."""
    return {one["node"]: one for one in json.loads(done.stdout)["nodes"]}


def files(host: Host) -> dict[str, tuple[int, int]]:
    """Return what would change if somebody touched what is there."""
    stats = {path: path.lstat() for path in (host.home / "hf").rglob("*") if "__pycache__" not in str(path)}
    return {str(path): (one.st_ino, one.st_mtime_ns) for path, one in stats.items()}


def in_env(host: Host, code: str) -> str:
    """Run code in the environment on a host."""
    return host.run(str(host.home / "hf/env/bin/python"), "-I", "-c", code).strip()


def test_the_wheel_is_small_whole_and_the_same_each_time(tmp_path: Path) -> None:
    """Unpacked, all of it but the runtime can be imported by an interpreter that has nothing else."""
    first, second = node_wheel(), node_wheel.__wrapped__()
    assert first == second
    assert len(first.data) < 1 << 20
    (tmp_path / first.file_name).write_bytes(first.data)
    assert Wheel.read(tmp_path / first.file_name) == first
    with zipfile.ZipFile(tmp_path / first.file_name) as archive:
        archive.extractall(tmp_path / "site")
        names = [
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in archive.namelist() if name.endswith(".py")
        ]
    needless = ("holdfast.runtime", "pynvml")
    modules = [name for name in names if not name.startswith(needless) and not name.endswith("__main__")]
    assert {"holdfast.agent.service", "detectors.signatures", "holdfast.vault"} <= set(modules)
    assert not {"holdfast.spec", "holdfast.control", "policies", "tasks"} & set(names)
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(tmp_path / "site"), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hosts_are_set_up_once_and_mended_when_damaged(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """A second run touches nothing; a host that is away costs the others nothing, and is told with a cure."""
    name = described(rack, tmp_path, directory="hf")
    rack[2].server.stop()
    done = holdfast("nodes", "bootstrap", name, "--json")
    rack[2].server.start()
    assert done.returncode == 1
    told = rows(done)
    assert [one["done"] for one in told.values()] == ["installed", "installed", "failed"]
    assert "refused" in told["n2"]["why"]
    assert "SSH server" in told["n2"]["cure"]
    assert in_env(rack[0], "import holdfast.runtime.session, torch; print(torch.__version__)"), "torch is the interpreter's own"
    before = files(rack[0])
    done = holdfast("nodes", "bootstrap", name, "--nodes", "n[0-1]")
    assert (done.returncode, files(rack[0])) == (0, before)
    assert "2 as before" in done.stdout
    damaged = next((rack[1].home / "hf/env/lib").glob("*/site-packages/holdfast/wire.py"))
    damaged.write_text("oops")
    done = holdfast("nodes", "bootstrap", name, "--json")
    assert [one["done"] for one in rows(done).values()] == ["kept", "mended", "installed"]
    assert in_env(rack[1], "import holdfast.wire; print(holdfast.wire.PROTOCOL)")


def test_a_look_at_hosts_says_what_runs_there_now(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """Only where it is asked for: to log in everywhere takes time. A host that is away is off, with the reason."""
    name = described(rack, tmp_path, directory="hf")
    holdfast("nodes", "bootstrap", name)
    assert [one["standing"] for one in json.loads(holdfast("nodes", name, "--json").stdout)["nodes"]] == [None] * 3
    rack[2].server.stop()
    looked = json.loads(holdfast("nodes", name, "--now", "--json").stdout)["nodes"]
    rack[2].server.start()
    assert [(one["name"], one["standing"]) for one in looked] == [("n0", "idle"), ("n1", "idle"), ("n2", "off")]
    assert "refused" in looked[2]["why"]


@pytest.mark.usefixtures("holdfast_home")
def test_who_runs_in_an_older_environment_keeps_it(rack: Rack) -> None:
    """Modules that it imports late are of the version that it began with; whoever comes after gets the new one."""
    cluster = cluster_of(rack.cluster(directory="hf"))
    assert isinstance(cluster, SshCluster)
    with Hosts(cluster, node_wheel()) as hosts:
        hosts.set_up(["n0"])
    words = [*rack[0].within, str(rack[0].home / "hf/env/bin/python"), "-I", "-c", LATE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as older:
        assert older.stdout is not None
        assert older.stdout.readline() == "up\n"
        with Hosts(cluster, newer()) as hosts:
            (outcome,) = hosts.set_up(["n0"])
        assert outcome.done == "installed", outcome
        assert in_env(rack[0], "import holdfast; print(holdfast.__version__)") == "9.9"
        told, _ = older.communicate("go\n")
        assert told == "0.1.0\n"


def test_hosts_that_share_a_folder_set_it_up_once(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """As with a home that is mounted everywhere: one does it, and the others wait for that one."""
    done = holdfast("nodes", "bootstrap", described(rack, tmp_path, directory=str(tmp_path / "shared")), "--json")
    assert sorted(one["done"] for one in rows(done).values()) == ["installed", "kept", "kept"], done.stdout


def test_what_cannot_be_is_told_with_a_cure(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """A disk that is full leaves what was there; an interpreter that is missing is named; so are slips of the hand."""
    full = rack[1].home / "full"
    full.mkdir()
    rack[1].run("mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(full))
    done = holdfast("nodes", "bootstrap", described(rack, tmp_path, directory=str(full)), "--nodes", "n1")
    assert done.returncode == 1
    assert "No space left on device" in done.stdout
    assert "`directory`" in done.stdout
    rack[1].run("umount", str(full))
    done = holdfast("nodes", "bootstrap", described(rack, tmp_path, python="/no/python3"), "--nodes", "n1")
    assert done.returncode == 1
    assert "it has no /no/python3" in done.stdout
    (tmp_path / "torn.whl").write_bytes(node_wheel().data[:-100])
    (tmp_path / "local.yaml").write_text("kind: local\n")
    name = described(rack, tmp_path)
    for words, why in (
        ([name, "--wheel", "torn.whl"], "it is no wheel of `holdfast_node`"),
        ([name, "--nodes", "n0,n7"], "has no node 'n7'"),
        (["local.yaml"], "of kind local"),
    ):
        done = holdfast("nodes", "bootstrap", *words)
        assert done.returncode == 2
        assert why in done.stderr


def test_a_wheel_is_put_into_one_home_while_another_reader_looks(rack: Rack) -> None:
    """Whoever starts programs through the link all the while never meets an environment that is not whole."""
    cluster = cluster_of(rack.cluster(directory="hf"))
    assert isinstance(cluster, SshCluster)
    python, stop = rack[0].home / "hf/env/bin/python", rack[0].home / "stop"
    loop = f"n=0; while [ ! -e {stop} ]; do {python} -I -c 'import holdfast.agent' || exit 9; n=$((n+1)); done; echo $n"
    with Hosts(cluster, node_wheel()) as hosts:
        hosts.set_up(["n0"])
    with subprocess.Popen([*rack[0].within, "sh", "-c", loop], stdout=subprocess.PIPE, text=True) as reader:
        for one in (newer(), node_wheel()):
            with Hosts(cluster, one) as hosts:
                assert not hosts.set_up(["n0"])[0].failed
        stop.touch()
        told, _ = reader.communicate()
        assert reader.returncode == 0
        assert int(told) > 0
    assert in_env(rack[0], "import holdfast; print(holdfast.__version__)") == "0.1.0"
