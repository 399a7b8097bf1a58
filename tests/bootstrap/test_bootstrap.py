"""`holdfast node bootstrap` on real hosts: what is there afterwards, and what is said where it cannot be."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import __version__
from holdfast.bootstrap import Hosts, NodeWheel, installer, node_wheel
from holdfast.cluster import open_cluster
from holdfast.errors import NodeStateUnknown
from holdfast.spec import SshCluster, cluster_of
from tests.bootstrap.wheels import newer
from tests.cli.conftest import Command, holdfast  # noqa: F401 (a fixture)
from tests.hosts.fixture import rack_of
from tests.hosts.host import Host
from tests.hosts.rack import Rack
from tests.mentions import mentions

IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
assert all(module.__file__.startswith(sys.argv[1]) for name, module in sys.modules.items() if name.startswith("holdfast"))
"""
LATE = "import sys; print('up', flush=True); sys.stdin.readline(); import holdfast; print(holdfast.__version__)"


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give three hosts."""
    with rack_of(3, tmp_path_factory) as rack:
        yield rack


def cluster_file(rack: Rack, place: Path, **fields: Any) -> str:
    """Write a file of the rack's cluster; return its name."""
    (place / "cluster.yaml").write_text(yaml.safe_dump(rack.cluster(**fields)))
    return str(place / "cluster.yaml")


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the result for each node."""
    return {one["node"]: one for one in json.loads(done.stdout)["nodes"]}


def files(host: Host) -> dict[str, tuple[int, int]]:
    """Return what changes when a file is written or replaced."""
    stats = {path: path.lstat() for path in (host.home / "hf").rglob("*") if "__pycache__" not in str(path)}
    return {str(path): (one.st_ino, one.st_mtime_ns) for path, one in stats.items()}


def in_env(host: Host, code: str) -> str:
    """Run code in the environment on a host."""
    return host.run(str(host.home / "hf/env/bin/python"), "-I", "-c", code).strip()


def test_the_wheel_is_small_complete_and_reproducible(tmp_path: Path) -> None:
    """An interpreter without other packages can import all of it except the runtime."""
    first, second = node_wheel(), node_wheel.__wrapped__()
    assert first == second
    assert len(first.data) < 1 << 20
    file = tmp_path / "holdfast.whl"
    file.write_bytes(first.data)
    assert NodeWheel.read(file) == first
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
        names = [
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in archive.namelist() if name.endswith(".py")
        ]
    needless = ("holdfast.runtime", "pynvml")
    modules = [name for name in names if not name.startswith(needless) and not name.endswith("__main__")]
    assert {"holdfast.agent.server", "holdfast.detectors.signatures", "holdfast.memstore.shared_memory"} <= set(modules)
    assert not {"holdfast.spec", "holdfast.control", "holdfast.policies", "holdfast.tasks"} & set(names)
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(tmp_path / "site"), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_hosts_are_set_up_once_and_repaired_when_damaged(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """A second run changes nothing; a host that is off does not delay the others, and is reported with a cure."""
    name = cluster_file(rack, tmp_path, directory="hf")
    rack[2].server.stop()
    done = holdfast("node", "bootstrap", "--cluster", name, "--json")
    rack[2].server.start()
    assert done.returncode == 1
    results = rows(done)
    assert [one["done"] for one in results.values()] == ["installed", "installed", "failed"]
    assert "refused" in results["n2"]["why"]
    assert "SSH server" in results["n2"]["cure"]
    assert in_env(rack[0], "import holdfast.runtime.session, torch; print(torch.__version__)"), "torch is the interpreter's own"
    before = files(rack[0])
    done = holdfast("node", "bootstrap", "--cluster", name, "n[0-1]")
    assert (done.returncode, files(rack[0])) == (0, before)
    assert "2 unchanged" in done.stdout
    damaged = next((rack[1].home / "hf/env/lib").glob("*/site-packages/holdfast/protocol.py"))
    damaged.write_text("oops")
    done = holdfast("node", "bootstrap", "--cluster", name, "--json")
    assert [one["done"] for one in rows(done).values()] == ["kept", "repaired", "installed"]
    assert in_env(rack[1], "import holdfast.protocol; print(holdfast.protocol.PROTOCOL)")


def test_a_survey_of_hosts_shows_what_runs_there_now(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """Only on request: to log in everywhere takes time. A host that is down is off, with the reason."""
    name = cluster_file(rack, tmp_path, directory="hf")
    holdfast("node", "bootstrap", "--cluster", name)
    assert [one["status"] for one in json.loads(holdfast("node", "ls", "--cluster", name, "--json").stdout)["nodes"]] == [None] * 3
    rack[2].server.stop()
    looked = json.loads(holdfast("node", "ls", "--cluster", name, "--now", "--json").stdout)["nodes"]
    rack[2].server.start()
    assert [(one["name"], one["status"]) for one in looked] == [("n0", "idle"), ("n1", "idle"), ("n2", "off")]
    assert "refused" in looked[2]["why"]


@pytest.mark.usefixtures("holdfast_home")
def test_a_host_may_have_its_own_interpreter_folder_and_interface(rack: Rack) -> None:
    """Its own settings take precedence over those of the cluster."""
    fields = rack.cluster(directory="hf", python="/no/python3", interface="10.99.0.0/16")
    for host in fields["hosts"][:2]:
        host |= {"python": sys.executable, "directory": "own"}
    fields["hosts"][0]["interface"] = "eth0"
    cluster = cluster_of(fields)
    assert isinstance(cluster, SshCluster)
    with Hosts(cluster, node_wheel()) as hosts:
        own, other, wrong = hosts.set_up(["n0", "n1", "n2"])
    assert (own.done, other.done, wrong.done) == ("installed", "installed", "failed")
    assert own.path == str(rack[0].home / "own/env")
    assert "/no/python3" in wrong.why
    nodes = open_cluster(cluster)
    try:
        assert (nodes.interface("n0"), nodes.address("n0")) == ("eth0", rack[0].address)
        assert nodes.folder("n0") == rack[0].home / "own/nodes/n0"
        with pytest.raises(NodeStateUnknown, match=r"no interface 10\.99\.0\.0/16"):
            nodes.interface("n1")
    finally:
        nodes.close()


@pytest.mark.usefixtures("holdfast_home")
def test_a_process_keeps_the_environment_that_it_started_in(rack: Rack) -> None:
    """Modules that it imports later are of the version that it started with; new processes get the new one."""
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
        output, _ = older.communicate("go\n")
        assert output == f"{__version__}\n"


def test_hosts_that_share_a_folder_set_it_up_once(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """As with a home that is mounted everywhere: one installs, and the others wait."""
    done = holdfast("node", "bootstrap", "--cluster", cluster_file(rack, tmp_path, directory=str(tmp_path / "shared")), "--json")
    assert sorted(one["done"] for one in rows(done).values()) == ["installed", "kept", "kept"], done.stdout


@pytest.mark.long
def test_a_failed_installation_is_reported_with_a_cure(rack: Rack, holdfast: Command, tmp_path: Path) -> None:  # noqa: F811 (the fixture)
    """A full disk keeps what it had; a missing interpreter is named; so are invalid arguments."""
    full = rack[1].home / "full"
    full.mkdir()
    rack[1].run("mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(full))
    done = holdfast("node", "bootstrap", "--cluster", cluster_file(rack, tmp_path, directory=str(full)), "n1")
    assert done.returncode == 1
    assert "No space left on device" in done.stdout
    assert "`directory`" in done.stdout
    rack[1].run("umount", str(full))
    done = holdfast("node", "bootstrap", "--cluster", cluster_file(rack, tmp_path, python="/no/python3"), "n1")
    assert done.returncode == 1
    assert mentions(done.stdout, "/no/python3")
    (tmp_path / "torn.whl").write_bytes(node_wheel().data[:-100])
    (tmp_path / "local.yaml").write_text("kind: local\n")
    name = cluster_file(rack, tmp_path)
    for words, why in (
        (["--cluster", name, "--wheel", "torn.whl"], "it is no wheel of `holdfast_node`"),
        (["--cluster", name, "n0", "n7"], "has no node 'n7'"),
        (["--cluster", "local.yaml"], "of kind local"),
    ):
        done = holdfast("node", "bootstrap", *words)
        assert done.returncode == 2
        assert why in done.stderr


@pytest.mark.long
def test_programs_start_while_a_new_version_is_installed(rack: Rack) -> None:
    """A program that is started through the link never gets an incomplete environment."""
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
        output, _ = reader.communicate()
        assert reader.returncode == 0
        assert int(output) > 0
    assert in_env(rack[0], "import holdfast; print(holdfast.__version__)") == __version__


@pytest.mark.long
def test_an_interrupted_installation_is_completed_by_the_next(tmp_path: Path) -> None:
    """Interrupted before each file, link and folder; the interpreter is in an environment itself, whose packages stay importable."""
    lender = tmp_path / "lender"
    venv.create(lender, symlinks=True)
    next((lender / "lib").glob("*/site-packages")).joinpath("lent_alone.py").write_text("")
    record = b"of_ours.py,,\nholdfast_node-1.dist-info/RECORD,,\n"
    listed = "holdfast_node-1.dist-info/RECORD"
    with zipfile.ZipFile(tmp_path / "small.whl", "w") as archive:
        archive.writestr("of_ours.py", "")
        archive.writestr(listed, record)
    words = [str(tmp_path / "small.whl"), "1", hashlib.sha256(record).hexdigest(), "lent_alone, of_ours"]
    command = [str(lender / "bin/python"), str(Path(__file__).with_name("cut_off.py")), installer.__file__, str(tmp_path / "hf"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *cut, ended = json.loads(done.stdout)
    assert len(cut) > 20, "it was cut off"
    assert {row["status"] for row in cut} == {9}
    assert (ended["status"], ended["healed"]["done"]) == (0, "kept")
    wrong = [(number, row) for number, row in enumerate(cut) if row["wrong"] or "failed" in row["healed"]]
    assert not wrong, wrong
    assert {row["healed"]["done"] for row in cut if not row["complete"]} == {"installed", "repaired"}
    proof = [str(tmp_path / "hf/env/bin/python"), "-I", "-c", "import lent_alone, of_ours"]
    assert subprocess.run(proof, check=False).returncode == 0
