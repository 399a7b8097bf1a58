"""Services that a GPU node may need: whether they run is seen among the processes, whether they should by what the node is made of.

Works without systemd; where there is one, a service that it starts by itself is one that the node needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from detectors.evidence import Unknown
from detectors.readings import ServiceReading, ServiceState
from holdfast.probe.readers import files
from holdfast.probe.readers.gpus import NVIDIA, gpus_on_bus
from holdfast.probe.readers.processes import all_processes, sees_the_whole_node

PROGRAMS: Final = ("usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "bin", "sbin")
UNITS: Final = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
BOOTED: Final = "run/systemd/system"
"""What is there only where systemd began all processes; see sd_booted(3)."""
BRIDGE: Final = 0x0680
"""PCI class of an NVSwitch."""
SHOWN: Final = 15
"""Letters of a program's name that the kernel keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownService:
    """A service that is looked for."""

    name: str
    program: str
    units: tuple[str, ...]
    for_: str = ""
    """Hardware that needs it: `gpu` or `nvswitch`."""


KNOWN: Final = (
    KnownService(name="fabric manager", program="nv-fabricmanager", units=("nvidia-fabricmanager.service",), for_="nvswitch"),
    KnownService(name="nvidia-persistenced", program="nvidia-persistenced", units=("nvidia-persistenced.service",)),
    KnownService(name="sshd", program="sshd", units=("ssh.service", "sshd.service")),
    KnownService(name="chronyd", program="chronyd", units=("chrony.service", "chronyd.service")),
    KnownService(name="slurmd", program="slurmd", units=("slurmd.service",)),
    KnownService(name="munged", program="munged", units=("munge.service",)),
    KnownService(name="dcgm host engine", program="nv-hostengine", units=("nvidia-dcgm.service",)),
)


def read_services(root: Path = Path("/")) -> ServiceReading:
    """Return the services that this node has, runs or needs."""
    whole = sees_the_whole_node(root)
    running = {process.name for process in all_processes(root)}
    hardware = _hardware(root)
    found = (_service(one, running, hardware, whole, root) for one in KNOWN)
    return ServiceReading(services=tuple(service for service in found if service.present or service.needed))


def _service(known: KnownService, running: set[str], hardware: set[str], whole: bool | Unknown, root: Path) -> ServiceState:  # noqa: FBT001 (an answer)
    runs = known.program[:SHOWN] in running
    unseen = whole if isinstance(whole, Unknown) else Unknown("a container does not see the node's processes")
    return ServiceState(
        name=known.name,
        present=runs or any((root / place / known.program).exists() for place in PROGRAMS),
        running=True if runs else (False if whole is True else unseen),
        needed=known.for_ in hardware or any(_enabled(root, unit) for unit in known.units),
    )


def _enabled(root: Path, unit: str) -> bool:
    """Say whether systemd starts *unit* by itself; its link may lead out of what can be seen from here.

    Where something else began the node's processes, as in a container, units lie there from their packages and mean nothing.
    """
    if not (root / BOOTED).is_dir():
        return False
    wanted = (folder / unit for place in UNITS for folder in (root / place).glob("*.wants"))
    return any(link.is_symlink() or link.exists() for link in wanted)


def _hardware(root: Path) -> set[str]:
    gpus = gpus_on_bus(root)
    devices = files.entries(root / "sys/bus/pci/devices")
    switches = () if isinstance(devices, Unknown) else tuple(one for one in devices if _is_switch(one))
    return {name for name, there in (("gpu", gpus), ("nvswitch", switches)) if there and not isinstance(there, Unknown)}


def _is_switch(device: Path) -> bool:
    vendor, kind = files.number(device / "vendor"), files.number(device / "class")
    return vendor == NVIDIA and not isinstance(kind, Unknown) and kind >> 8 == BRIDGE
