"""Read network interfaces and InfiniBand ports, from sysfs and from the drivers' own counters (`ethtool -S`).

The layout of the driver requests is that of linux/ethtool.h, which is part of the kernel's stable interface.
"""

from __future__ import annotations

import ctypes
import fcntl
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import Counters, IbPort, NetworkReading, Nic
from holdfast.probe.readers import files

IFF_UP: Final = 1
"""The bit of an interface's flags that says: switched on."""
SIOCETHTOOL: Final = 0x8946
GET_SET_SIZES: Final = 0x37
GET_NAMES: Final = 0x1B
GET_VALUES: Final = 0x1D
STATISTICS: Final = 1
"""The set of strings that names the counters (ETH_SS_STATS)."""
NAME_BYTES: Final = 32
"""Bytes of one name (ETH_GSTRING_LEN)."""
_RATE: Final = re.compile(r"([\d.]+) Gb/sec")


def driver_counters(interface: str) -> Counters | Unknown:
    """Return the counters of *interface*'s driver."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sizes = _ask_driver(sock, interface, struct.pack("=IIQ", GET_SET_SIZES, 0, 1 << STATISTICS), 4)
            count = int(struct.unpack("=I", sizes)[0])
            names = _ask_driver(sock, interface, struct.pack("=III", GET_NAMES, STATISTICS, count), count * NAME_BYTES)
            values = _ask_driver(sock, interface, struct.pack("=II", GET_VALUES, count), count * 8)
    except OSError as error:
        return Unknown(f"ethtool {interface}: {error.strerror or error}")
    starts = range(0, len(names), NAME_BYTES)
    texts = (names[at : at + NAME_BYTES].partition(b"\0")[0].decode(errors="replace").strip() for at in starts)
    return dict(zip(texts, struct.unpack(f"={count}Q", values), strict=False))


def _ask_driver(sock: socket.socket, interface: str, question: bytes, size: int) -> bytes:
    """Send *question* to the driver; return the *size* bytes of answer behind it."""
    buffer = ctypes.create_string_buffer(question, len(question) + size)
    fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", interface.encode()[:15], ctypes.addressof(buffer)))
    return buffer.raw[len(question) :]


def read_network(root: Path = Path("/"), ask: Callable[[str], Counters | Unknown] = driver_counters) -> NetworkReading:
    """Return the state and the counters of all interfaces with hardware, and of all InfiniBand ports."""
    places = files.entries(root / "sys/class/net")
    nics = places if isinstance(places, Unknown) else tuple(_nic(place, ask) for place in places if (place / "device").exists())
    return NetworkReading(nics=nics, ib_ports=read_ib_ports(root / "sys/class"))


def _nic(place: Path, ask: Callable[[str], Counters | Unknown]) -> Nic:
    flags, down = files.number(place / "flags"), files.number(place / "carrier_down_count")
    counters = files.counters(place / "statistics")
    if not isinstance(counters, Unknown) and not isinstance(down, Unknown):
        counters = {**counters, "carrier_down": down}
    return Nic(
        name=place.name,
        wanted_up=flags if isinstance(flags, Unknown) else bool(flags & IFF_UP),
        state=files.text(place / "operstate"),
        carrier=files.flag(place / "carrier"),  # refused while the interface is switched off
        speed=files.number(place / "speed"),
        counters=counters,
        driver_counters=ask(place.name),
    )


def read_ib_ports(classes: Path) -> tuple[IbPort, ...] | Unknown:
    """Return the state and the counters of all InfiniBand and RoCE ports; *classes* is the folder `/sys/class`."""
    known = files.entries(classes)
    if isinstance(known, Unknown):
        return known
    devices = files.entries(classes / "infiniband") if classes / "infiniband" in known else ()
    if isinstance(devices, Unknown):
        return devices
    found = []
    for device in devices:
        ports = files.entries(device / "ports")
        found += [] if isinstance(ports, Unknown) else [_ib_port(device.name, port) for port in ports if port.name.isdigit()]
    return tuple(found)


def _ib_port(device: str, place: Path) -> IbPort:
    standard, vendor = files.counters(place / "counters"), files.counters(place / "hw_counters")
    if isinstance(standard, Unknown):  # a virtual port may have only one kind
        counters = standard if isinstance(vendor, Unknown) else vendor
    else:
        counters = {**standard, **({} if isinstance(vendor, Unknown) else vendor)}
    return IbPort(
        device=device,
        port=int(place.name),
        state=_state(place / "state"),
        physical_state=_state(place / "phys_state"),
        layer=files.text(place / "link_layer"),
        rate=files.parsed(place / "rate", _rate, "rate"),
        counters=counters,
    )


def _state(path: Path) -> str | Unknown:
    """Return the word of a state that is written as `4: ACTIVE`."""
    found = files.text(path)
    return found if isinstance(found, Unknown) else found.partition(":")[2].strip() or found


def _rate(found: str) -> float:
    """Return the Gbit/s of a rate that is written as `400 Gb/sec (4X NDR)`."""
    rate = _RATE.match(found)
    if rate is None:
        raise ValueError(found)
    return float(rate[1])
