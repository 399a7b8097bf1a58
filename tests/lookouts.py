"""Agents' lookouts, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.process import marked


def is_read(log: Path, node: str) -> bool:
    """Return whether a lookout of *node* stands at the end of its kernel's log, so that it tells what is written there from now on.

    That it has the log open is too little: it could go to the end only after the next line is there, and never see it.
    """
    end = log.stat().st_size
    assert end, "where a reader of an empty file stands tells nothing"
    return any(position == end for pid in _lookouts(node) for position in _positions(pid, log))


def _lookouts(node: str) -> Iterator[int]:
    for pid in marked("HOLDFAST_NODE", node):
        with suppress(OSError):
            if b"holdfast.agent.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


def _positions(pid: int, file: Path) -> Iterator[int]:
    """Yield how far a process has come in *file*, whatever that is called where it runs, for each time it has it open."""
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if one.samefile(file):
                    yield int(Path(f"/proc/{pid}/fdinfo/{one.name}").read_text().split()[1])
