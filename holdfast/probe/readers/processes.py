"""Processes that are not as they should be, and the services that a GPU node may need, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from detectors.evidence import Unknown
from detectors.readings import ProcessReading, Stuck
from holdfast.probe.readers import files

ALL_OF_THE_NODE: Final = 0xEFFFFFFC
"""Number of the first process namespace (PROC_PID_INIT_INO): whoever is in it sees every process of the node."""
OURS: Final = re.compile(r"(^|\0)-m\0holdfast\.")
"""In the command line of a process of Holdfast, the agent and its helpers: `python -m holdfast.agent ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process, as its `stat` tells; see proc_pid_stat(5)."""

    pid: int
    name: str
    state: str
    parent: int
    started: int
    """Clock ticks after the node's start."""


def all_processes(root: Path) -> Iterator[Process]:
    """Yield all processes that can be seen; one that ends meanwhile is left out."""
    for place in (root / "proc").iterdir():
        if place.name.isdigit() and (process := _process(place)) is not None:
            yield process


def _process(place: Path) -> Process | None:
    told = files.text(place / "stat")
    if isinstance(told, Unknown):
        return None
    before, _, after = told.rpartition(")")  # a name may have blanks and brackets
    words = after.split()
    return Process(pid=int(place.name), name=before.partition("(")[2], state=words[0], parent=int(words[1]), started=int(words[19]))


def sees_the_whole_node(root: Path) -> bool | Unknown:
    """Say whether all processes of the node can be seen from here, or only those of a container."""
    try:
        return (root / "proc/self/ns/pid").stat().st_ino == ALL_OF_THE_NODE
    except OSError as error:
        return files.blind(root / "proc/self/ns/pid", error)


def read_processes(root: Path = Path("/")) -> ProcessReading:
    """Return the processes that wait deaf to signals, and the zombies; none of the other readers beside this one.

    A zombie child of Holdfast's own agent or of one of its helpers says nothing about the node.
    """
    found = [one for one in all_processes(root) if one.parent != os.getppid()]
    up = files.text(root / "proc/uptime")
    uptime = 0.0 if isinstance(up, Unknown) else float(up.split()[0])
    shown = [one for one in found if one.state == "D" or (one.state == "Z" and not _is_ours(one.parent, root))]
    stuck = [_stuck(one, uptime, root) for one in shown]
    return ProcessReading(count=len(found), stuck=tuple(one for one in stuck if (root / "proc" / str(one.pid)).exists()))  # others went on


def _is_ours(pid: int, root: Path) -> bool:
    """Tell whether a process is one of Holdfast's own."""
    command = files.text(root / "proc" / str(pid) / "cmdline")
    return not isinstance(command, Unknown) and OURS.search(command) is not None


def _stuck(process: Process, uptime: float, root: Path) -> Stuck:
    return Stuck(
        pid=process.pid,
        name=process.name,
        state=process.state,
        age=max(0.0, uptime - process.started / os.sysconf("SC_CLK_TCK")),
        wait=files.text(root / "proc" / str(process.pid) / "wchan"),
        parent=process.parent,
        switches=_switches(root / "proc" / str(process.pid) / "status"),
    )


def _switches(path: Path) -> int | Unknown:
    """Return how often a process gave its processor up, of its own will or not."""
    told = files.text(path)
    if isinstance(told, Unknown):
        return told
    found = [int(count) for count in re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)$", told, re.MULTILINE)]
    return sum(found) if found else Unknown(f"{path}: nothing counts there")
