"""Which ranks compute on a GPU of this node: those whose process the driver names, or whose processes hold that GPU open as theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.agent.workers.worker import Worker
from holdfast.process import children_of

_PID: Final = re.compile(r"\bpid='?(\d+)")
_BUS: Final = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?\b", re.IGNORECASE)
_NUMBER: Final = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_UUID: Final = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
MOST: Final = 4096
"""Processes of a worker that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """A GPU as its driver lists it."""

    minor: int
    """N of ``/dev/nvidiaN``."""
    uuid: str


def ranks_on(part: str, quote: str, workers: Iterable[Worker], root: Path = Path("/")) -> list[int]:
    """Return the ranks of *workers* on the GPU that a fault's *part* names, as far as that can be told; *quote* may name a process."""
    bus = _bus(part)
    living = [one for one in workers if one.standby is None and one.pid and not one.gone]
    if bus is None or not living:
        return []
    gpus, named = _gpus(root), {int(pid) for pid in _PID.findall(quote)}
    return sorted(one.rank for one in living if _computes_on(one, bus, gpus, named, root))


def _bus(text: str) -> str | None:
    """Return the place of a GPU on its bus, without domain and function, in one form."""
    found = _BUS.search(text)
    return f"{int(found[1], 16):x}:{found[2].lower()}" if found else None


def _gpus(root: Path) -> dict[str, _Gpu]:
    """Return the GPUs by their place on the bus, in the order in which the driver numbers them."""
    found: dict[str, _Gpu] = {}
    with suppress(OSError):
        for place in sorted((root / "proc/driver/nvidia/gpus").iterdir()):
            with suppress(OSError):
                told = (place / "information").read_text(errors="replace")
                bus, minor, uuid = _bus(place.name), _NUMBER.search(told), _UUID.search(told)
                if bus is not None and minor is not None:
                    found[bus] = _Gpu(minor=int(minor[1]), uuid=uuid[1] if uuid else "")
    return found


def _family(pid: int) -> list[int]:
    """Return *pid* and all processes that it began."""
    found = [pid]
    for one in found:
        if len(found) < MOST:
            found += [child for child in children_of(one) if child not in found]
    return found


def _computes_on(worker: Worker, bus: str, gpus: Mapping[str, _Gpu], named: set[int], root: Path) -> bool:
    """Tell whether *worker* computes on the GPU at *bus*: CUDA opens every GPU that it may see, and a rank uses one of them."""
    family = _family(worker.pid or 0)
    if not named.isdisjoint(family):
        return True
    wanted = gpus.get(bus)
    held = {minor for pid in family for minor in _held(pid, root)}
    if wanted is None or wanted.minor not in held:
        return False
    return len(held) == 1 or _own(worker.sees, list(gpus.values())) == wanted


def _held(pid: int, root: Path) -> Iterator[int]:
    """Yield the numbers of the GPUs that a process has open."""
    device = re.compile(re.escape(str(root / "dev/nvidia")) + r"(\d+)")
    with suppress(OSError):
        for place in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := device.fullmatch(str(place.readlink())):
                    yield int(found[1])


def _own(sees: Mapping[str, str], gpus: list[_Gpu]) -> _Gpu | None:
    """Return the GPU that a rank takes by what it *sees*, as torch does with ``cuda:LOCAL_RANK``; None where that cannot be told."""
    with suppress(ValueError, IndexError):
        local, visible = int(sees.get("LOCAL_RANK", "0")), sees.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return gpus[local]
        names = [name.strip() for name in visible.split(",") if name.strip()]
        name = names[0] if len(names) == 1 else names[local]
        return gpus[int(name)] if name.isdecimal() else next((one for one in gpus if one.uuid.startswith(name)), None)
    return None
