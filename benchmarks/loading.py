"""Time for a rank's new process to load its state: from its node's memory, from another node's, and from disk.

One rank trains some steps with everything on: snapshots in its node's memory store, which the memory server sends to a second node's, and a
checkpoint on disk. Then new processes come, one after the other, in an order drawn anew for every round; each is a real session that finds
its state at one of these places, given by its environment as an agent gives it. What is measured is what the session itself reports as the
time to load: to find the newest whole state, to judge every byte of it by its sum or digest, and to fill the training.

Before a load from disk the checkpoint's pages are dropped from the page cache (``posix_fadvise``), and it is looked whether they are gone;
what the disk itself, or a host under a virtual one, still holds in memory cannot be seen from here. Loads with warm pages stand beside.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.driver import Driver, Starter
from benchmarks.measuring import wait_for
from benchmarks.memory_node import MemoryNode

SCRIPT: Final = Path(__file__).with_name("train_pieces.py")
STEPS: Final = 8
"""Steps before the state is loaded: snapshots begin after the fifth."""
SOURCES: Final = ("memory", "replica", "disk", "disk_cached")
BLOCK: Final = 4096


class Loads:
    """A state that lies at all places, and processes that load it."""

    def __init__(self, memory: Path, disk: Path, megabytes: int) -> None:
        self._memory, self._disk, self._megabytes = memory, disk, megabytes
        self._fork_server = Starter(memory)
        self._count = 0
        self._own, self._home = MemoryNode("own", memory), MemoryNode("home", memory)
        self._nobody = memory / "nobody"
        self._nobody.mkdir(mode=0o700)
        self._own.replicate(self._home)

    def train(self) -> int:
        """Train, so that the state of one step lies at all places; return its bytes."""
        given = {"HOLDFAST_MEMSTORE": str(self._own.memstore), "HOLDFAST_NODE": "own", "HOLDFAST_SAVE_EVERY": str(STEPS)}
        given |= {"HOLDFAST_MEMORY_POLICY": "pause", "HOLDFAST_MEMORY_PAUSE": "10", "HOLDFAST_CHECKPOINT_DIR": str(self._disk)}
        self._run(STEPS, given)
        newest = STEPS - 1
        self._home.holds(newest)
        return max(path.stat().st_size for path in self._home.memstore.glob("*.snap"))

    def load(self, source: str) -> dict[str, Any]:
        """Have a new process load its state from *source*; return what it reported."""
        empty = {"HOLDFAST_SAVE_EVERY": "0", "HOLDFAST_CHECKPOINT_DIR": str(self._memory / "none")}
        resident = None
        if source == "memory":
            given = {**empty, "HOLDFAST_MEMSTORE": str(self._own.memstore), "HOLDFAST_NODE": "own"}
        elif source == "replica":
            servers = f'{{"home": ["{self._home.address[0]}", {self._home.address[1]}]}}'
            given = {**empty, "HOLDFAST_MEMSTORE": str(self._nobody), "HOLDFAST_NODE": "nobody", "HOLDFAST_MEMORY_SERVERS": servers}
        else:
            given = {**empty, "HOLDFAST_CHECKPOINT_DIR": str(self._disk)}
            if source == "disk":
                evict(self._disk)
            resident = cached(self._disk)
        result = self._run(0, given)
        step = result["resumed"]["step"]
        if step != (STEPS if source.startswith("disk") else STEPS - 1) or bool(result["resumed"]["path"]) != source.startswith("disk"):
            raise RuntimeError(f"the state did not come from {source}: {result}")
        return {"source": source, "seconds": result["mark"]["seconds"], "cached": resident}

    def _run(self, until: int, given: Mapping[str, str]) -> dict[str, Any]:
        """Run a process to its end; return what it said of its start."""
        self._count += 1
        place = self._memory / f"run-{self._count}"
        argv = [str(SCRIPT), "--megabytes", str(self._megabytes), "--until", str(until)]
        driver = Driver(self._fork_server, place, argv, 1, given)
        try:
            wait_for(lambda: driver.said("finished"), f"the end of run {self._count}", every=0.02)
            (load,) = [one for one in driver.said("mark") if one["name"] == "load"]
            return {"mark": load, "resumed": driver.said("resumed")[0]}
        finally:
            driver.close()

    def close(self) -> None:
        """End everything."""
        self._fork_server.close()
        self._own.close()
        self._home.close()


def evict(folder: Path) -> None:
    """Drop the pages of all files below *folder* from the page cache."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(folder: Path) -> float:
    """Return the share of the pages below *folder* that are in the page cache, of one in sixteen that are looked at."""
    seen = found = 0
    for path in _files(folder):
        with path.open("rb") as file:
            for at in range(0, path.stat().st_size, 16 * BLOCK):
                seen += 1
                found += _is_cached(file.fileno(), at)
    return found / seen if seen else 0.0


def _is_cached(file: int, at: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        raise


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def file_system(path: Path) -> str:
    """Return type and device of the file system that *path* lies on."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    fitting = [one for one in mounts if path.resolve().is_relative_to(one[1])]
    device, _, kind, *_ = max(fitting, key=lambda one: len(one[1]))
    return f"{kind} on {device}"


def rounds(number: int, megabytes: int, disk: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Load *number* times from each source; return every load, and the facts of the setting."""
    order, found = random.Random(3), []  # noqa: S311 (an order)
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=disk) as folder:
        loads = Loads(Path(memory), Path(folder), megabytes)
        try:
            size = loads.train()
            for count in range(number + 1):
                for source in order.sample(SOURCES, len(SOURCES)):
                    result = loads.load(source)
                    print(f"load: {result}", flush=True)
                    if count:  # the first round warms whatever can be warmed
                        found.append(result)
        finally:
            loads.close()
        return found, {"state_MB": round(size / 1e6, 1), "disk": file_system(Path(folder))}
