"""Read what the kernel says of all network devices: whether each is up, how often it lost its link, its addresses, its card.

Small files of sysfs. An adapter's firmware may be asked for the state of its ports, and hang: the caller reads in a child process.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.detectors.evidence import Number, Unknown
from holdfast.detectors.nodes.links import Link, LinkReading
from holdfast.probe.readers import files
from holdfast.probe.readers.network import IFF_UP, read_ib_ports

SIOCGIFADDR: Final = 0x8915
INET6: Final = Path("/proc/net/if_inet6")
HOST_ONLY: Final = "proc/sys/net/core/dev_weight"
"""A setting that only the machine's own network namespace has."""
SATURATED: Final = 255
"""Value at which the 8 bits of an InfiniBand port's `link_downed` stay."""
_BUS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_links(root: Path = Path("/")) -> LinkReading:
    """Return all network interfaces and InfiniBand ports, the loopback left out; addresses only where the interfaces are the machine's."""
    places = files.entries(root / "sys/class/net")
    known = files.entries(root / "sys/class/infiniband") if (root / "sys/class/infiniband").exists() else ()
    buses = files.entries(root / "sys/bus/pci/devices")
    adapters = known if isinstance(known, Unknown) else {one.name: bus_of(one) for one in known}
    ports = _ports(root, {} if isinstance(adapters, Unknown) else adapters)
    is_host = (root / HOST_ONLY).exists()
    return LinkReading(
        links=places if isinstance(places, Unknown) else (*_interfaces(places, is_host=is_host), *ports),
        buses=buses if isinstance(buses, Unknown) else tuple(one.name.lower() for one in buses),
        adapters=adapters,
        is_host=is_host,
    )


def bus_of(place: Path) -> str:
    """Return the PCI address of the device of *place*, a folder of sysfs; empty if it has none."""
    found = _BUS.findall(os.path.realpath(place / "device"))
    return found[-1] if found else ""


def _interfaces(places: tuple[Path, ...], *, is_host: bool) -> Iterator[Link]:
    above = {place.name: _above(place) for place in places}
    for place in places:
        if place.name != "lo" and place.is_dir():  # `bonding_masters` is a file
            stack = [place.name]
            for name in stack:
                stack += [one for one in above.get(name, ()) if one not in stack]
            yield Link(
                name=place.name,
                bus=bus_of(place),
                up=_is_up(place),
                downs=files.number(place / "carrier_down_count"),
                addresses=_addresses(stack) if is_host else Unknown("a container does not see the machine's addresses"),
                stacked=len(stack) > 1,
            )


def _above(place: Path) -> list[str]:
    """Return the interfaces that send through the one at *place*: bonds, bridges, VLANs."""
    with suppress(OSError):
        return [one.name.removeprefix("upper_") for one in place.iterdir() if one.name.startswith("upper_")]
    return []


def _is_up(place: Path) -> bool | Unknown:
    flags = files.number(place / "flags")
    if not isinstance(flags, Unknown) and not flags & IFF_UP:
        return False
    return files.flag(place / "carrier")


def _addresses(names: list[str]) -> tuple[str, ...] | Unknown:
    """Return the addresses of the interfaces *names*, the link-local ones too."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name in names:
            with suppress(OSError):  # it has no IPv4 address
                found.append(socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24]))
    text = files.text(INET6) if INET6.exists() else ""  # a kernel without IPv6
    if isinstance(text, Unknown):
        return text
    rows = [line.split() for line in text.splitlines()]
    found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] in names]
    return tuple(found)


def _ports(root: Path, adapters: dict[str, str]) -> Iterator[Link]:
    ports = read_ib_ports(root / "sys/class")
    for port in () if isinstance(ports, Unknown) else ports:
        downs: Number = Unknown("its counters could not be read")
        if not isinstance(port.counters, Unknown) and port.counters.get("link_downed", SATURATED) < SATURATED:
            downs = port.counters["link_downed"]
        yield Link(
            name=f"{port.device}/{port.port}",
            bus=adapters.get(port.device, ""),
            up=port.state if isinstance(port.state, Unknown) else port.state == "ACTIVE",
            downs=downs,
        )
