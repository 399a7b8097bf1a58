"""Network interfaces and InfiniBand ports: trees of a test's own, and this machine's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.readings import Counters, IbPort, NetworkReading, Nic, NodeReading
from holdfast.probe.readers.network import driver_counters, read_network

Tree = Callable[[dict[str, str]], Path]

NIC = "sys/class/net/eth0"
PORT = "sys/class/infiniband/mlx5_0/ports/1"
WELL = {
    f"{NIC}/device/vendor": "0x15b3",
    f"{NIC}/flags": "0x1003",
    f"{NIC}/operstate": "up\n",
    f"{NIC}/carrier": "1\n",
    f"{NIC}/speed": "100000\n",
    f"{NIC}/carrier_down_count": "1\n",
    f"{NIC}/statistics/rx_crc_errors": "0\n",
    f"{NIC}/statistics/rx_bytes": "12345\n",
    "sys/class/net/lo/operstate": "unknown\n",
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/phys_state": "5: LinkUp\n",
    f"{PORT}/link_layer": "InfiniBand\n",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)\n",
    f"{PORT}/counters/symbol_error": "7\n",
    f"{PORT}/counters/link_downed": "3\n",
    f"{PORT}/hw_counters/out_of_sequence": "2\n",
}


def nothing(_interface: str) -> Counters | Unknown:
    """Answer for the driver of an interface that is not there."""
    return Unknown("no driver")


def look(root: Path, at: float = 0.0) -> NodeReading:
    """Return a reading with only the network of a node."""
    return NodeReading(node="n0", at=at, network=read_network(root, nothing))


def test_interfaces_and_ports_are_read_with_all_their_counters(tree: Tree) -> None:
    """What has no hardware (the loopback) is left out."""
    reading = read_network(tree(WELL), lambda name: {f"{name}_counted": 1})
    counters = {"rx_bytes": 12345, "rx_crc_errors": 0, "carrier_down": 1}
    nic = Nic(name="eth0", wanted_up=True, state="up", carrier=True, speed=100_000, counters=counters, driver_counters={"eth0_counted": 1})
    port = IbPort(
        device="mlx5_0",
        port=1,
        state="ACTIVE",
        physical_state="LinkUp",
        layer="InfiniBand",
        rate=400.0,
        counters={"symbol_error": 7, "link_downed": 3, "out_of_sequence": 2},
    )
    assert reading == NetworkReading(nics=(nic,), ib_ports=(port,))


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        (f"{NIC}/carrier", "0", "nic-link-down"),
        (f"{NIC}/carrier_down_count", "2", "nic-link-flapped"),
        (f"{NIC}/statistics/rx_crc_errors", "5000", "nic-errors"),
        (f"{PORT}/state", "1: DOWN", "ib-port-down"),
        (f"{PORT}/rate", "100 Gb/sec (1X NDR)", "ib-rate-low"),
        (f"{PORT}/counters/link_downed", "4", "ib-link-flapped"),
        (f"{PORT}/counters/symbol_error", "547", "ib-symbol-errors"),
    ],
)
def test_each_changed_file_becomes_its_fault(tree: Tree, file: str, text: str, kind: str) -> None:
    """One file is another an hour later; that fault is seen and no other, and an hour in which nothing changed has none."""
    before, unchanged = look(tree(WELL)), look(tree(WELL), at=3600.0)
    assert judge(unchanged, before) == []
    (fault,) = judge(look(tree({**WELL, file: text}), at=3600.0), before)
    assert fault.kind == kind
    assert ("mlx5_0/1" if file.startswith(PORT) else "eth0") in fault.quote


def test_files_that_cannot_be_read_are_unknown_and_the_others_are_read(tree: Tree) -> None:
    """A carrier cannot be read while its interface is switched off; a rate may be in an unknown format."""
    reading = read_network(tree({**WELL, f"{NIC}/carrier": "?", f"{PORT}/rate": "fast"}), nothing)
    assert not isinstance(reading.nics, Unknown)
    assert not isinstance(reading.ib_ports, Unknown)
    assert isinstance(reading.nics[0].carrier, Unknown)
    assert isinstance(reading.ib_ports[0].rate, Unknown)
    assert reading.nics[0].state == "up"


def test_no_infiniband_is_a_value_and_no_sysfs_is_unknown(tree: Tree, tmp_path: Path) -> None:
    """A node without adapters has no ports; a node that shows nothing may have any."""
    assert read_network(tree({"sys/class/net/eth0/operstate": "up"}), nothing) == NetworkReading(nics=(), ib_ports=())
    dark = read_network(tmp_path / "missing", nothing)
    assert isinstance(dark.nics, Unknown)
    assert isinstance(dark.ib_ports, Unknown)


def test_this_machines_interfaces_are_those_that_sysfs_shows() -> None:
    """With counters that only grow."""
    place = Path("/sys/class/net")
    if not place.is_dir():
        pytest.skip("needs /sys/class/net")
    first, second = read_network(), read_network()
    assert not isinstance(first.nics, Unknown)
    assert not isinstance(second.nics, Unknown)
    assert {nic.name for nic in first.nics} == {one.name for one in place.iterdir() if (one / "device").exists()}
    for old, new in zip(first.nics, second.nics, strict=True):
        assert isinstance(old.counters, dict)
        assert isinstance(new.counters, dict)
        assert all(new.counters[name] >= count for name, count in old.counters.items())


def test_ethtool_answers_or_says_why_not() -> None:
    """The loopback counts nothing, and what is not there has no driver."""
    missing = driver_counters("holdfast-none")
    assert isinstance(missing, Unknown)
    assert "No such device" in missing.why
    assert isinstance(driver_counters("lo"), Unknown | dict)
    for place in Path("/sys/class/net").iterdir() if Path("/sys/class/net").is_dir() else ():
        counted = driver_counters(place.name)
        assert isinstance(counted, Unknown) or all(name and count >= 0 for name, count in counted.items())
