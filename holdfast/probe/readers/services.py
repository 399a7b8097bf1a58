"""Read stuck processes, and the services that a GPU node may need, from /proc.

Whether a service runs is read from the processes, and whether it is needed from the hardware. This works without systemd; where there is
one, a service that it starts at boot is needed too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import ProcessReading, ServiceReading, ServiceState, StuckProcess
from holdfast.probe.readers import files
from holdfast.probe.readers.gpus import NVIDIA, pci_class

HOST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the first process namespace (PROC_PID_INIT_INO): a process in it sees every process of the node."""
OURS: Final = re.compile(r"(^|\0)-m\0holdfast\.")
"""In the command line of a process of Holdfast: `python -m holdfast.agent ...`."""
PROGRAMS: Final = ("usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "bin", "sbin")
UNITS: Final = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
BOOTED: Final = "run/systemd/system"
"""Exists only where systemd is the init process; see sd_booted(3)."""
NVSWITCH: Final = 0x0680
"""PCI class of an NVSwitch."""
NAME_LETTERS: Final = 15
"""Letters of a program's name that the kernel keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process, from its `stat`; see proc_pid_stat(5)."""

    pid: int
    name: str
    state: str
    parent: int
    started: int
    """Clock ticks after the node's start."""


def all_processes(root: Path) -> Iterator[Process]:
    """Yield all processes that can be seen; one that ends meanwhile is left out."""
    for place in (root / "proc").iterdir():
        found = files.text(place / "stat") if place.name.isdigit() else Unknown("not a process")
        if not isinstance(found, Unknown):
            before, _, after = found.rpartition(")")  # a name may contain blanks and brackets
            words = after.split()
            name = before.partition("(")[2]
            yield Process(pid=int(place.name), name=name, state=words[0], parent=int(words[1]), started=int(words[19]))


def sees_all_processes(root: Path) -> bool | Unknown:
    """Return whether all processes of the node can be seen from here, or only those of a container."""
    try:
        return (root / "proc/self/ns/pid").stat().st_ino == HOST_PID_NAMESPACE
    except OSError as error:
        return files.unknown(root / "proc/self/ns/pid", error)


def read_processes(root: Path = Path("/")) -> ProcessReading:
    """Return the processes in uninterruptible sleep, and the zombies; other readers that run now are left out.

    A zombie child of Holdfast's own processes says nothing about the node.
    """
    found = [one for one in all_processes(root) if one.parent != os.getppid()]
    up = files.text(root / "proc/uptime")
    uptime = 0.0 if isinstance(up, Unknown) else float(up.split()[0])
    stuck = []
    for one in found:
        if one.state == "D" or (one.state == "Z" and not _is_ours(one.parent, root)):
            place = root / "proc" / str(one.pid)
            stuck.append(
                StuckProcess(
                    pid=one.pid,
                    name=one.name,
                    state=one.state,
                    age=max(0.0, uptime - one.started / os.sysconf("SC_CLK_TCK")),
                    wait=files.text(place / "wchan"),
                    parent=one.parent,
                    switches=files.parsed(place / "status", _switches, "status with counters"),
                )
            )
    return ProcessReading(count=len(found), stuck=tuple(one for one in stuck if (root / "proc" / str(one.pid)).exists()))  # others went on


def _is_ours(pid: int, root: Path) -> bool:
    """Return whether a process is one of Holdfast's own."""
    command = files.text(root / "proc" / str(pid) / "cmdline")
    return not isinstance(command, Unknown) and OURS.search(command) is not None


def _switches(found: str) -> int:
    """Return how often a process was switched away from its processor, of its own will or not."""
    counts = [int(count) for count in re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)$", found, re.MULTILINE)]
    if not counts:
        raise ValueError(found)
    return sum(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownService:
    """A service to look for."""

    name: str
    program: str
    units: tuple[str, ...]
    needed_for: int = 0
    """PCI class of NVIDIA hardware that needs it."""


KNOWN: Final = (
    KnownService(name="fabric manager", program="nv-fabricmanager", units=("nvidia-fabricmanager.service",), needed_for=NVSWITCH),
    KnownService(name="nvidia-persistenced", program="nvidia-persistenced", units=("nvidia-persistenced.service",)),
    KnownService(name="sshd", program="sshd", units=("ssh.service", "sshd.service")),
    KnownService(name="chronyd", program="chronyd", units=("chrony.service", "chronyd.service")),
    KnownService(name="slurmd", program="slurmd", units=("slurmd.service",)),
    KnownService(name="munged", program="munged", units=("munge.service",)),
    KnownService(name="dcgm host engine", program="nv-hostengine", units=("nvidia-dcgm.service",)),
)


def read_services(root: Path = Path("/")) -> ServiceReading:
    """Return the services that this node has, runs or needs."""
    complete = sees_all_processes(root)
    unseen = complete if isinstance(complete, Unknown) else Unknown("a container does not see the node's processes")
    names = {process.name for process in all_processes(root)}
    devices = files.entries(root / "sys/bus/pci/devices")
    hardware = (
        set() if isinstance(devices, Unknown) else {pci_class(device) for device in devices if files.number(device / "vendor") == NVIDIA}
    )
    found = []
    for one in KNOWN:
        runs = one.program[:NAME_LETTERS] in names
        found.append(
            ServiceState(
                name=one.name,
                present=runs or any((root / place / one.program).exists() for place in PROGRAMS),
                running=True if runs else (False if complete is True else unseen),
                needed=one.needed_for in hardware or any(_starts_at_boot(root, unit) for unit in one.units),
            )
        )
    return ServiceReading(services=tuple(service for service in found if service.present or service.needed))


def _starts_at_boot(root: Path, unit: str) -> bool:
    """Return whether systemd starts *unit* by itself; its link may lead out of what can be seen from here.

    Where systemd is not the init process, as in a container, units are there from their packages and mean nothing.
    """
    if not (root / BOOTED).is_dir():
        return False
    wanted = (folder / unit for place in UNITS for folder in (root / place).glob("*.wants"))
    return any(link.is_symlink() or link.exists() for link in wanted)
