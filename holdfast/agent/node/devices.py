"""Find the ranks that compute on a GPU of this node: the driver names their process, or their processes have that GPU open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.agent.workers.worker import Worker
from holdfast.host.gpu_assignment import own_gpu
from holdfast.host.process import children_of

_PID: Final = re.compile(r"\bpid='?(\d+)")
_BUS: Final = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?\b", re.IGNORECASE)
_MINOR: Final = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_UUID: Final = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
NVIDIA: Final = "0x10de"
_GPU_CLASSES: Final = ("0x03", "0x12")
"""Display controllers and processing accelerators, as PCI numbers the classes of devices."""
MAX_PROCESSES: Final = 4096
"""Processes of a worker that are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """A GPU as its driver lists it."""

    minor: int
    """N of ``/dev/nvidiaN``."""
    uuid: str


def ranks_on(part: str, quote: str, workers: Iterable[Worker], root: Path = Path("/")) -> list[int]:
    """Return the ranks of *workers* on the GPU that a fault's *part* names, as far as that is known; *quote* may name a process."""
    bus = _bus_address(part)
    living = [one for one in workers if one.hot_spare is None and one.pid and not one.exited]
    if bus is None or not living:
        return []
    gpus, named = _gpus(root), {int(pid) for pid in _PID.findall(quote)}
    return sorted(one.rank for one in living if _computes_on(one, bus, gpus, named, root))


def is_idle(part: str, workers: Iterable[Worker], root: Path = Path("/")) -> bool:
    """Return whether the GPU that a fault's *part* names is one that no process of *workers* has open, though they have others open.

    CUDA opens every visible GPU of NVIDIA's: one that is not open is hidden from the job, and one of another vendor is the display's. False
    where that is not known: while a worker has not opened any yet, or has exited.
    """
    bus, workers = _bus_address(part), list(workers)
    if bus is None or not workers or any(one.exited or not one.pid for one in workers):
        return False
    opened = [{minor for pid in processes_of(one) for minor in _open_gpus(pid, root)} for one in workers]
    if not all(opened):
        return False
    if (gpu := _gpus(root).get(bus)) is not None:
        return gpu.minor not in set().union(*opened)
    return _vendor_of_gpu(bus, root) not in {"", NVIDIA}


def rank_with_gpu_of(variables: Mapping[str, str], workers: Iterable[Worker], root: Path = Path("/")) -> int | None:
    """Return the rank that computes on the GPU which a process with these *variables* would take; None where no rank does.

    None also where *workers* share a GPU already: whoever started them so means it.
    """
    devices = root / "dev"
    living = [one for one in workers if one.hot_spare is None and one.pid and not one.exited]
    computing = [one for one in living if any(True for pid in processes_of(one) for _ in _open_gpus(pid, root))]
    ranks = {own_gpu(one.gpu_variables, devices): one.rank for one in computing}
    wanted = own_gpu(variables, devices)
    return None if wanted is None or len(ranks.keys() - {None}) < len(computing) else ranks.get(wanted)


def hot_spares_on_gpus_of(starting: Sequence[Worker], workers: Iterable[Worker], root: Path = Path("/")) -> list[Worker]:
    """Return those of *workers* that are hot spares and hold a GPU which one of the *starting* ranks takes, or are about to.

    None where those ranks share GPUs among themselves: whoever started them so means it.
    """
    devices = root / "dev"
    taken = [own_gpu(one.gpu_variables, devices) for one in starting]
    if None in taken or len(set(taken)) < len(taken):
        return []
    waiting = [one for one in workers if one.hot_spare is not None and not one.exited and own_gpu(one.gpu_variables, devices) in taken]
    return [one for one in waiting if one.parked is None or any(True for pid in processes_of(one) for _ in _open_gpus(pid, root))]


def processes_of(worker: Worker) -> list[int]:
    """Return the process of *worker* and those that it began; at most `MAX_PROCESSES`."""
    processes = [worker.pid or 0]
    for pid in processes:
        if len(processes) < MAX_PROCESSES:
            processes += [child for child in children_of(pid) if child not in processes]
    return processes


def _bus_address(text: str) -> str | None:
    """Return a GPU's address on its bus, without domain and function, in one form."""
    found = _BUS.search(text)
    return f"{int(found[1], 16):x}:{found[2].lower()}" if found else None


def _gpus(root: Path) -> dict[str, _Gpu]:
    """Return the GPUs by their bus address, in the order in which the driver numbers them."""
    found: dict[str, _Gpu] = {}
    with suppress(OSError):
        for folder in sorted((root / "proc/driver/nvidia/gpus").iterdir()):
            with suppress(OSError):
                text = (folder / "information").read_text(errors="replace")
                bus, minor, uuid = _bus_address(folder.name), _MINOR.search(text), _UUID.search(text)
                if bus is not None and minor is not None:
                    found[bus] = _Gpu(minor=int(minor[1]), uuid=uuid[1] if uuid else "")
    return found


def _vendor_of_gpu(bus: str, root: Path) -> str:
    """Return the vendor of the GPU at *bus*, as PCI numbers them; empty if no GPU is known there."""
    with suppress(OSError):
        for folder in (root / "sys/bus/pci/devices").iterdir():
            if _bus_address(folder.name) == bus and (folder / "class").read_text().startswith(_GPU_CLASSES):
                return (folder / "vendor").read_text().strip()
    return ""


def _computes_on(worker: Worker, bus: str, gpus: Mapping[str, _Gpu], named: set[int], root: Path) -> bool:
    """Return whether *worker* computes on the GPU at *bus*: CUDA opens every visible GPU, and a rank uses one of them."""
    processes = processes_of(worker)
    if not named.isdisjoint(processes):
        return True
    gpu = gpus.get(bus)
    opened = {minor for pid in processes for minor in _open_gpus(pid, root)}
    if gpu is None or gpu.minor not in opened:
        return False
    return len(opened) == 1 or _chosen_gpu(worker.gpu_variables, list(gpus.values())) == gpu


def _open_gpus(pid: int, root: Path) -> Iterator[int]:
    """Yield the minor numbers of the GPUs that a process has open."""
    device = re.compile(re.escape(str(root / "dev/nvidia")) + r"(\d+)")
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := device.fullmatch(str(descriptor.readlink())):
                    yield int(found[1])


def _chosen_gpu(variables: Mapping[str, str], gpus: list[_Gpu]) -> _Gpu | None:
    """Return the GPU that a rank with these variables uses, as torch does with ``cuda:LOCAL_RANK``; None where that is unknown."""
    with suppress(ValueError, IndexError):
        local, visible = int(variables.get("LOCAL_RANK", "0")), variables.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return gpus[local]
        names = [name.strip() for name in visible.split(",") if name.strip()]
        name = names[0] if len(names) == 1 else names[local]
        return gpus[int(name)] if name.isdecimal() else next((one for one in gpus if one.uuid.startswith(name)), None)
    return None
