"""Network devices as sysfs shows them: from a folder, and from a real pair of interfaces of which one end goes down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.detectors.codec import packed, unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.links import Link, LinkReading
from holdfast.probe.readers.links import read_links

CARD = "0000:9a:00.0"
PAIR = """
import json, subprocess
from holdfast.detectors import all_kinds
from holdfast.detectors.codec import packed
from holdfast.detectors.nodes.links import check_link_line
from holdfast.probe.readers.links import read_links
def ip(*words): subprocess.run(["ip", "link", *words], check=True)
ip("add", "eth7", "type", "veth", "peer", "name", "far")
for name in ("far", "eth7"): ip("set", name, "up")
before = read_links()
same = check_link_line("link-down", "veth eth7: Link is Down", [before, before], read_links(), 1.0)
ip("set", "far", "down")
down = check_link_line("link-down", "veth eth7: Link is Down", [before, before], read_links(), 1.0)
ip("set", "far", "up")
again = check_link_line("link-down", "veth eth7: Link is Down", [before, before], read_links(), 1.0)
print(json.dumps([packed(one) for one in (same, down, again)]))
"""


def write(root: Path, **files: str) -> None:
    """Write files of sysfs, by their paths below it."""
    for name, text in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def node(root: Path, **ports: str) -> LinkReading:
    """Return what is read of a node with one interface, a bond, and an InfiniBand adapter on the card of the interface."""
    nic, port = "class/net/ens5f0np0", "class/infiniband/mlx5_0/ports/1"
    write(root, **{f"{nic}/flags": "0x1003", f"{nic}/carrier": "1", f"{nic}/carrier_down_count": "2"})
    write(root, **{"class/net/bond0/flags": "0x1003", "class/net/bond0/carrier": "0", "class/net/bonding_masters": "bond0"})
    write(root, **{"class/net/off/flags": "0x1002", "class/net/lo/flags": "0x9"})
    write(root, **{f"{port}/state": "4: ACTIVE", f"{port}/counters/link_downed": "7"} | {f"{port}/{name}": ports[name] for name in ports})
    device = root / "sys/bus/pci/devices" / CARD
    device.mkdir(parents=True)
    for place in (nic, "class/infiniband/mlx5_0"):
        (root / "sys" / place / "device").symlink_to(device)
    (root / "sys" / nic / "upper_bond0").symlink_to(root / "sys/class/net/bond0")
    return read_links(root)


def test_a_folder_is_read(tmp_path: Path) -> None:
    """State, counter and card of each; where the interfaces may be a container's, addresses are not known."""
    reading = node(tmp_path)
    unknown = Unknown("a container does not see the machine's addresses")
    assert not isinstance(reading.links, Unknown)
    found = {one.name: one for one in reading.links}
    assert found.keys() == {"bond0", "ens5f0np0", "mlx5_0/1", "off"}
    assert found["ens5f0np0"] == Link(name="ens5f0np0", bus=CARD, up=True, downs=2, addresses=unknown, stacked=True)
    assert (found["bond0"].up, found["off"].up, found["bond0"].stacked) == (False, False, False)
    assert found["mlx5_0/1"] == Link(name="mlx5_0/1", bus=CARD, up=True, downs=7)
    assert (reading.buses, reading.adapters, reading.is_host) == ((CARD,), {"mlx5_0": CARD}, False)
    assert unpacked(LinkReading, json.loads(json.dumps(packed(reading)))) == reading


def test_a_counter_that_is_full_counts_no_more(tmp_path: Path) -> None:
    """An InfiniBand port's has 8 bits and stays at the end."""
    reading = node(tmp_path, **{"counters/link_downed": "255", "state": "1: DOWN"})
    assert not isinstance(reading.links, Unknown)
    (port,) = [one for one in reading.links if one.name == "mlx5_0/1"]
    assert (port.up, isinstance(port.downs, Unknown)) == (False, True)


def test_a_node_without_network_devices_is_read(tmp_path: Path) -> None:
    """Nothing is known of it."""
    reading = read_links(tmp_path)
    assert isinstance(reading.links, Unknown)
    assert isinstance(reading.buses, Unknown)
    assert reading.adapters == {}


def test_a_real_link_whose_other_end_goes_down_is_counted() -> None:
    """A line is contradicted before, agrees with it while the link is down, and once it is up again."""
    isolated = ["unshare", "--net", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh"]
    if (tried := subprocess.run([*isolated, "ip", "link"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"needs network namespaces (root): {tried.stderr.strip()}")
    done = subprocess.run([*isolated, sys.executable, "-c", PAIR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, down, again = json.loads(done.stdout)
    assert "did not lose its link" in same["contradicted"]
    assert (down["contradicted"], down["supported"]) == ("", "eth7 has no link, eth7 lost its link once in 1 s")
    assert (again["contradicted"], again["supported"]) == ("", "eth7 lost its link once in 1 s")
