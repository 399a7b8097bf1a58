"""The hosts that other tests use are hosts, and their faults are faults."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.commands import run
from tests.hosts.fixture import rack_of
from tests.hosts.host import Direction, Host, Whom
from tests.hosts.rack import Rack
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster
BOOT = Path("/proc/sys/kernel/random/boot_id")
OWNER = """
import sys
from pathlib import Path
from tests.hosts import rack
rack.LOWEST = int(sys.argv[2])
print(rack.Rack(Path(sys.argv[1]), 1).number, flush=True)
sys.stdin.read()
"""
DIRECTIONS: tuple[Direction, ...] = ("in", "out")
CUTS: tuple[tuple[Whom | list[int], set[str]], ...] = (
    ("orchestrator", {"peer", "other"}),
    ("peers", {"orchestrator"}),
    ([1], {"orchestrator", "other"}),
    ("all", set()),
)


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Give three hosts."""
    with rack_of(3, tmp_path_factory) as rack:
        yield rack


def output_of(rack: Rack, host: Host, *words: str) -> str:
    """Run a command by SSH; return what it says, or what is wrong."""
    done = subprocess.run([*rack.login, host.address, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def reaches(host: Host, address: str) -> bool:
    """Return whether a packet goes from a host to an address and one comes back."""
    try:
        host.run("ping", "-qc1", "-W0.3", address)
    except RuntimeError:
        return False
    return True


def test_a_host_has_a_name_processes_memory_and_a_home_of_its_own(rack: Rack) -> None:
    """What programs take for a machine is one."""
    Path("/dev/shm/of-the-machine").touch()
    try:
        words = output_of(
            rack, rack[1], "hostname; pwd; ls /dev/shm; ls /sys/class/net; ps -e | wc -l; cat /proc/sys/kernel/random/boot_id"
        )
    finally:
        Path("/dev/shm/of-the-machine").unlink()
    name, home, *devices, processes, boot = words.splitlines()
    assert (name, home, devices) == ("n1", str(rack[1].home), ["eth0", "lo"])
    assert int(processes) < 10
    rack[1].power_cycle()
    assert output_of(rack, rack[1], "cat", str(BOOT)) not in {boot, BOOT.read_text().strip()}


def test_a_host_has_a_kernel_log_of_its_own(rack: Rack) -> None:
    """What one logs, the others do not get, nor this machine; and a boot empties it."""
    rack[1].log("nvme nvme0: controller is down")
    assert [output_of(rack, host, "cat", "/dev/kmsg").partition(";")[2] for host in rack] == ["", "nvme nvme0: controller is down", ""]
    rack[1].power_cycle()
    assert output_of(rack, rack[1], "cat", "/dev/kmsg") == ""


@pytest.mark.long
def test_a_host_can_be_cut_off_from_some_and_in_one_direction(rack: Rack) -> None:
    """From the orchestrator, from its peers, from one of them, from all; what is mended goes again."""
    host, peer, other = rack
    ways = {"orchestrator": rack.address, "peer": peer.address, "other": other.address}

    def reached() -> set[str]:
        return {name for name, address in ways.items() if reaches(host, address)}

    for whom, left in CUTS:
        for direction in DIRECTIONS:
            wait_until(lambda: reached() == set(ways), seconds=60)
            host.cut(whom if isinstance(whom, str) else [rack[number] for number in whom], direction)
            wait_until(lambda: reached() == left, seconds=60)  # noqa: B023 (at once)
            assert host.lost() > 0
            host.heal()
    for break_it in (host.unplug, host.strand):
        break_it()
        assert not reached()
        host.heal()
        wait_until(lambda: reached() == set(ways), seconds=60)


def test_a_host_without_power_says_nothing_and_comes_back_empty(rack: Rack) -> None:
    """A connection gets nothing at a loss of power, but of a kernel that goes down."""
    host = rack[2]
    for silent in (True, False):
        host.run("touch", "/dev/shm/lost")
        with socket.create_connection((host.address, 22), timeout=60) as connection:
            assert connection.recv(100).startswith(b"SSH")
            host.power_off(silent=silent)
            connection.settimeout(0.3 if silent else 60)
            if silent:
                with pytest.raises(TimeoutError):
                    connection.recv(100)
            else:
                assert not connection.recv(100)
        assert not host.processes()
        assert not reaches(rack[0], host.address)
        host.power_on()
        host.serve()
        assert output_of(rack, host, "ls /dev/shm; hostname") == "n2"


@pytest.mark.long
def test_links_can_be_slow_lossy_and_reset(rack: Rack) -> None:
    """Delay, rate and loss are measured by what comes through, a reset by what the connection sees."""
    host = rack[0]
    host.lose(0.5)
    lost = [not reaches(host, rack.address) for _ in range(12)]
    assert set(lost) == {True, False}, "each outcome of twelve throws, but once in two thousand runs"
    host.heal()
    with socket.create_connection((host.address, 22), timeout=60) as connection:
        connection.recv(100)
        host.reset("orchestrator")
        with pytest.raises(ConnectionError):
            connection.recv(100)
    host.limit("1mbit")
    sent = host.run("ping", "-qc1", "-s30000", rack.address)
    assert float(sent.rsplit("=", 1)[1].split("/")[2]) > 200, "30 kB through a megabit a second take a quarter of a second each way"
    host.heal()
    host.delay(0.2)
    slow = host.run("ping", "-qc1", rack.address)
    assert float(slow.rsplit("=", 1)[1].split("/")[1]) >= 400
    host.heal()
    assert output_of(rack, host, "hostname") == "n0"


def test_a_host_that_hangs_answers_pings_and_nothing_else(rack: Rack) -> None:
    """The kernel lives, and no process runs."""
    host = rack[0]
    host.freeze()
    wait_until(lambda: reaches(rack[1], host.address), seconds=60)
    with socket.create_connection((host.address, 22), timeout=60) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(100)
    host.thaw()
    assert output_of(rack, host, "hostname") == "n0"


def test_hosts_go_with_who_made_them(rack: Rack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed leaves no process; what is left of the network goes when the next one comes."""
    lowest = 100 + os.getpid() % 100  # whoever makes hosts for other tests meanwhile takes lower numbers
    monkeypatch.setattr("tests.hosts.rack.LOWEST", lowest)
    words = [sys.executable, "-c", OWNER, str(tmp_path / "rack"), str(lowest)]
    owner = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    number = int(owner.stdout.readline())
    assert number != rack.number
    assert run(["ip", "netns", "pids", f"hf{number}n0"])
    owner.kill()
    owner.communicate()
    wait_until(lambda: not run(["ip", "netns", "pids", f"hf{number}n0"]), seconds=60)
    with Rack(tmp_path / "next", 1) as following:
        assert following.number == number
        wait_until(lambda: reaches(following[0], following.address), seconds=60)
    assert f"hf{number}" not in run(["ip", "netns", "list"]).replace(f"hf{rack.number}n", "").split()
