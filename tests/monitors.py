"""Node monitors, observed from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.host.process import marked


def is_read(log: Path, node: str) -> bool:
    """Return whether a monitor of *node* has read its kernel's log to the end, so that it reports what is written there from now on.

    It is not enough that it has the log open: it might seek to the end after the next line is there, and miss it.
    """
    end = log.stat().st_size
    assert end, "the position in an empty file shows nothing"
    return any(position == end for pid in _monitors(node) for position in _positions(pid, log))


def _monitors(node: str) -> Iterator[int]:
    for pid in marked("HOLDFAST_NODE", node):
        with suppress(OSError):
            if b"holdfast.agent.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


def _positions(pid: int, file: Path) -> Iterator[int]:
    """Yield the positions of a process in *file*, which may have another name where it runs."""
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if one.samefile(file):
                    yield int(Path(f"/proc/{pid}/fdinfo/{one.name}").read_text().split()[1])
