"""Network interfaces and InfiniBand ports, from sysfs and the drivers' own counters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from detectors.evidence import Unknown
from detectors.readings import Counters, IbPort, NetworkReading, Nic
from holdfast.probe.readers import files
from holdfast.probe.readers.ethtool import driver_counters

IFF_UP: Final = 1
"""The bit of an interface's flags that says: switched on."""

_RATE: Final = re.compile(r"([\d.]+) Gb/sec")


def read_network(root: Path = Path("/"), ask: Callable[[str], Counters | Unknown] = driver_counters) -> NetworkReading:
    """Return the state and the counters of all interfaces with hardware, and of all InfiniBand ports."""
    return NetworkReading(nics=_nics(root / "sys/class/net", ask), ib_ports=_ib_ports(root / "sys/class"))


def _nics(place: Path, ask: Callable[[str], Counters | Unknown]) -> tuple[Nic, ...] | Unknown:
    found = files.entries(place)
    return found if isinstance(found, Unknown) else tuple(_nic(one, ask) for one in found if (one / "device").exists())


def _nic(place: Path, ask: Callable[[str], Counters | Unknown]) -> Nic:
    flags = files.number(place / "flags")
    return Nic(
        name=place.name,
        wanted_up=flags if isinstance(flags, Unknown) else bool(flags & IFF_UP),
        state=files.text(place / "operstate"),
        carrier=files.flag(place / "carrier"),  # refused while the interface is switched off
        speed=files.number(place / "speed"),
        counters=_counted(place),
        driver_counters=ask(place.name),
    )


def _counted(place: Path) -> Counters | Unknown:
    """Return the kernel's counters of an interface, and how often its carrier went away."""
    counters = files.counters(place / "statistics")
    down = files.number(place / "carrier_down_count")
    return counters if isinstance(counters, Unknown) or isinstance(down, Unknown) else {**counters, "carrier_down": down}


def _ib_ports(classes: Path) -> tuple[IbPort, ...] | Unknown:
    known = files.entries(classes)
    if isinstance(known, Unknown):
        return known
    devices = files.entries(classes / "infiniband") if classes / "infiniband" in known else ()
    if isinstance(devices, Unknown):
        return devices
    return tuple(_ib_port(device.name, port) for device in devices for port in _ports(device))


def _ports(device: Path) -> tuple[Path, ...]:
    found = files.entries(device / "ports")
    return () if isinstance(found, Unknown) else tuple(port for port in found if port.name.isdigit())


def _ib_port(device: str, place: Path) -> IbPort:
    return IbPort(
        device=device,
        port=int(place.name),
        state=_word(place / "state"),
        physical_state=_word(place / "phys_state"),
        layer=files.text(place / "link_layer"),
        rate=_rate(place / "rate"),
        counters=_ib_counters(place),
    )


def _word(path: Path) -> str | Unknown:
    """Return the word of a state that is written `4: ACTIVE`."""
    found = files.text(path)
    return found if isinstance(found, Unknown) else found.partition(":")[2].strip() or found


def _rate(path: Path) -> float | Unknown:
    """Return the Gbit/s of a rate that is written `400 Gb/sec (4X NDR)`."""
    found = files.text(path)
    if isinstance(found, Unknown):
        return found
    rate = _RATE.match(found)
    return float(rate[1]) if rate else Unknown(f"{path}: {found[:40]!r} is no rate")


def _ib_counters(place: Path) -> Counters | Unknown:
    """Return the counters of the standard and those of the adapter's own; a virtual port may have only one kind."""
    standard, own = files.counters(place / "counters"), files.counters(place / "hw_counters")
    if isinstance(standard, Unknown):
        return own if not isinstance(own, Unknown) else standard
    return {**standard, **({} if isinstance(own, Unknown) else own)}
