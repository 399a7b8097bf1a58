"""Read what the kernel says of all disks and mounts, and which of them the processes of a job use.

Small files of sysfs and of /proc, which touch no disk. A process that waits for one may hold the lock of its own memory map, and then its
files in /proc hang too; so may a server that is asked whether it answers: the caller reads in a child process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.detectors.evidence import NOT_REQUESTED, Number, Unknown
from holdfast.detectors.nodes.memory_errors import MemoryErrors
from holdfast.detectors.nodes.readings import Mount
from holdfast.detectors.nodes.volumes import Volume, VolumeReading, names_server
from holdfast.probe.readers import files, storage
from holdfast.probe.readers.collect import run_in_children

ANSWER_SECONDS: Final = 0.25
"""Seconds that a server has to say how much space it has."""
MAX_PROCESSES: Final = 4096
"""Processes of the job that are looked at; with more of them nothing is said of what they use."""
_NAMESPACE: Final = re.compile(r"(nvme\d+)(?:c\d+)?(n\d+)")
_ATA: Final = re.compile(r"/(ata\d+)/")
_PATH: Final = re.compile(rb"/[^\x00\s:;,='\"]+")
_SCSI: Final = re.compile(r"\d+:\d+:\d+:\d+")


def read_volumes(root: Path = Path("/"), processes: Iterable[int] | None = None, text: str = "") -> VolumeReading:
    """Return all disks and mounts, and what *processes* use; without them that is not known.

    *text*: a line; the mounts of an NFS server that it names are asked whether they answer. Then it is only read what is open, which takes
    less long than what is mapped or named.
    """
    volumes, mounts = _volumes(root), _mounts(root)
    known = () if isinstance(mounts, Unknown) else mounts
    used: tuple[str, ...] | Unknown = NOT_REQUESTED
    if processes is not None and not isinstance(mounts, Unknown):
        found = _places(processes, briefly=bool(text))
        swap = files.text(root / "proc/swaps")
        if any(mount.path == "/" and mount.kind == "overlay" for _, mount in known):
            used = Unknown("a container does not see on which disk its files are")
        elif isinstance(found, Unknown):
            used = found
        else:
            places = found if isinstance(swap, Unknown) else found | {line.split()[0] for line in swap.splitlines()[1:]}
            used = tuple(sorted(_owners({*places, "/"}, [mount.path for _, mount in known])))
    asked = [mount.path for _, mount in known if text and mount.kind.startswith("nfs") and names_server(text, mount)]
    return VolumeReading(at=time.monotonic(), volumes=volumes, mounts=mounts, used=used, answers=_answers(root, asked))


def read_memory_errors(root: Path = Path("/")) -> MemoryErrors:
    """Return the uncorrected errors of each memory controller."""
    places = files.entries(root / "sys/devices/system/edac/mc")
    if isinstance(places, Unknown):
        return MemoryErrors(uncorrected=places)
    counts: dict[str, int] = {}
    for place in places:
        if re.fullmatch(r"mc\d+", place.name):
            count = files.number(place / "ue_count")
            if isinstance(count, Unknown):
                return MemoryErrors(uncorrected=count)
            counts[place.name] = count
    return MemoryErrors(uncorrected=counts)


# -- disks -------------------------------------------------------------------------------------------------------------


def _volumes(root: Path) -> tuple[Volume, ...] | Unknown:
    places = files.entries(root / "sys/class/block")
    if isinstance(places, Unknown):
        return places
    controllers = files.entries(root / "sys/class/nvme") if (root / "sys/class/nvme").exists() else ()
    if isinstance(controllers, Unknown):
        return controllers
    on: dict[str, list[str]] = {}
    for controller in controllers:
        namespaces = files.entries(controller)
        for namespace in () if isinstance(namespaces, Unknown) else namespaces:
            if found := _NAMESPACE.fullmatch(namespace.name):
                on.setdefault(found[1] + found[2], []).append(controller.name)
    return (
        *(_volume(place, on.get(place.name, [])) for place in places),
        *(Volume(name=one.name, state=files.text(one / "state"), failures=NOT_REQUESTED, requests=0) for one in controllers),
    )


def _volume(place: Path, controllers: Iterable[str]) -> Volume:
    real = Path(os.path.realpath(place))
    members = files.entries(place / "slaves") if (place / "slaves").exists() else ()
    below = [real.parent.name] if (place / "partition").exists() else list(controllers)
    below += [] if isinstance(members, Unknown) else [one.name for one in members]
    number = files.text(place / "dev")
    device = Path(os.path.realpath(place / "device")).name if (place / "device").exists() else ""
    is_scsi = _SCSI.fullmatch(device) is not None
    ata = _ATA.search(str(real)) if is_scsi else None
    names = [number if isinstance(number, str) else "", device if is_scsi else "", ata[1] if ata else ""]
    return Volume(
        name=place.name,
        below=tuple(below),
        aliases=tuple(filter(None, names)),
        state=files.text(place / "device/state") if is_scsi else "",
        failures=files.number(place / "device/ioerr_cnt") if is_scsi else NOT_REQUESTED,
        requests=_requests(place),
        removable=files.flag(place / "removable") is True,
    )


def _requests(place: Path) -> Number:
    """Return the reads, writes, discards and flushes of a disk that ended, and those that it has now."""

    def total(found: str) -> int:
        fields = [int(one) for one in found.split()]
        return fields[0] + fields[4] + fields[8] + sum(fields[11:12]) + sum(fields[15:16])

    return files.parsed(place / "stat", total, "statistics")


# -- mounts ------------------------------------------------------------------------------------------------------------


def _mounts(root: Path) -> tuple[tuple[str, Mount], ...] | Unknown:
    """Return each mount with the name of its disk."""
    found = storage.all_mounted(root)
    places = files.entries(root / "sys/class/block")
    if isinstance(found, Unknown):
        return found
    numbers = {} if isinstance(places, Unknown) else {files.text(place / "dev"): place.name for place in places}
    names = set(numbers.values())
    return tuple(
        (numbers.get(number, "") or (source if (source := Path(mount.source).name) in names else ""), mount) for number, mount in found
    )


def _answers(root: Path, paths: Iterable[str]) -> dict[str, bool]:
    jobs = {path: partial(_answer, root / path.lstrip("/")) for path in paths}
    found = run_in_children(jobs, time.monotonic() + ANSWER_SECONDS, "no answer in time") if jobs else {}
    return {path: answer is True for path, answer in found.items() if answer is not None}


def _answer(place: Path) -> bool | None:
    """Return whether the server of the file system at *place* says how much space it has; None where this process may not ask."""
    try:
        os.statvfs(place)
    except OSError as error:
        return False if error.errno in storage.BROKEN else None
    return True


# -- who uses them -----------------------------------------------------------------------------------------------------


def _places(processes: Iterable[int], *, briefly: bool) -> set[str] | Unknown:
    """Return the files that *processes* have open or mapped, and the paths that they were given."""
    namespace, found = Path("/proc/self/ns/mnt").readlink(), set[str]()
    for number, pid in enumerate(processes):
        if number >= MAX_PROCESSES:
            return Unknown(f"more than {MAX_PROCESSES} processes")
        process = Path(f"/proc/{pid}")
        try:
            if (process / "ns/mnt").readlink() != namespace:
                return Unknown(f"process {pid} has mounts of its own")
            found |= set(_open_files(process))
            found |= set() if briefly else set(_mapped_and_named(process))
        except PermissionError as error:
            return Unknown(f"{error.filename}: {error.strerror}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has exited
    return found


def _open_files(process: Path) -> Iterator[str]:
    for link in (process / "cwd", process / "root", process / "exe", *(process / "fd").iterdir()):
        with suppress(FileNotFoundError):
            yield str(link.readlink())


def _mapped_and_named(process: Path) -> Iterator[str]:
    for line in (process / "maps").read_bytes().splitlines():
        if (at := line.find(b"/")) >= 0:
            yield os.fsdecode(line[at:])
    for name in ("cmdline", "environ"):
        yield from map(os.fsdecode, _PATH.findall((process / name).read_bytes()))


def _owners(places: Iterable[str], mounts: Iterable[str]) -> set[str]:
    """Return the mounts that *places* are in, and the disks among them."""
    known, found, seen = set(mounts), set[str](), set[str]()
    for place in places:
        found |= {Path(place).name} if place.startswith("/dev/") else set()
        while place not in seen and place.startswith("/"):
            seen.add(place)
            if place in known:
                found.add(place)
                break
            place = place.rpartition("/")[0] or "/"  # noqa: PLW2901 (upwards)
    return found
