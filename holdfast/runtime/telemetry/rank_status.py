"""The status of this rank, sent when the controller queries it: what it has begun in each group, what it waits for, and in which line.

The thread that receives commands answers, so that a rank answers while its training thread waits in C++ or sleeps. A rank that is stopped,
or whose interpreter lock is held, does not answer.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups import control_tree
from holdfast.runtime.groups.membership import installed
from holdfast.runtime.groups.operations import COLLECTIVES, OperationMark
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.telemetry import nccl_ras
from holdfast.runtime.telemetry.wait_windows import process_waits

log = logging.getLogger("holdfast.runtime")

MAX_FRAMES: Final = 12
"""Frames of the training thread that are sent, the innermost first."""
_TORCH: Final = str(Path(torch.__file__).parent)
_HOLDFAST: Final = str(Path(__file__).parents[2])
_LIBRARIES: Final = (
    _TORCH,
    _HOLDFAST,
    "<frozen ",
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


def rank_status() -> Message:
    """Return the status of this rank.

    ``waits``: what the training thread waits for (a window of `wait_windows`, else ``collective`` or ``backward`` from the stack), for
    ``seconds``. ``groups``: name, members, operations begun by kind, and those in flight. ``launched``: what NCCL's RAS says of groups that
    Holdfast does not manage. ``place``: the innermost line of the user's
    own code.
    """
    manager = installed()
    waits, seconds = process_waits().current()
    frames = _training_frames()
    if manager is not None and manager.device is not None:
        manager.device.adopt_thread()  # its events tell what the device has come to
    return {
        "step": link().step,
        "waits": waits or _wait_from_stack(frames),
        "seconds": round(seconds, 3),
        "groups": [_group_status(group) for group in (manager.groups if manager is not None and manager.dry_run is None else ())],
        "launched": nccl_ras.launch_counts(),
        "place": next((_line(one) for one in frames if not one.f_code.co_filename.startswith(_LIBRARIES)), ""),
        "stack": [_line(one) for one in frames[:MAX_FRAMES]],
    }


def answer_queries(forward: Callable[[Message], None] = lambda _command: None) -> Callable[[Message], None]:
    """Return a handler of commands that answers those in `QUERIES`, and passes all others to *forward*."""

    def handle(command: Message) -> None:
        answer = QUERIES.get(str(command.get("do")))
        if answer is None:
            forward(command)
            return
        try:
            answer(command)
        except Exception:  # a failing query must not end the thread that receives commands
            log.exception("the query '%s' failed", command["do"])

    return handle


QUERIES: Final[dict[str, Callable[[Message], None]]] = {"roll-call": lambda _query: link().report("status", **rank_status())}
"""Queries of the controller by name, and who answers them, in the thread that receives commands."""


def _group_status(group: ManagedGroup) -> Message:
    (counts, pending), ranks = group.in_flight.progress(), group.ranks
    # Members that are evenly spaced, as those of a mesh are, need fewer bytes.
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = stride > 0 and list(ranks) == list(range(ranks[0], ranks[0] + stride * len(ranks), stride))
    return {
        "name": group.group_name,
        "ranks": {"first": ranks[0], "stride": stride, "count": len(ranks)} if even else list(ranks),
        "counts": {_global_way(group, way): number for way, number in counts.items()},
        "pending": [_operation(group, mark) for mark in pending],
    }


def _operation(group: ManagedGroup, mark: OperationMark) -> Message:
    return {
        "way": _global_way(group, mark.channel),
        "number": mark.number,
        "name": mark.name.partition(">")[0].partition("<")[0],
        "size": mark.size,
        "kind": str(mark.dtype).removeprefix("torch.") if mark.dtype is not None else "",
        "seconds": round(time.perf_counter() - mark.since, 3),
    }


def _global_way(group: ManagedGroup, way: str) -> str:
    """Return *way* with the global rank of the peer."""
    if way == COLLECTIVES or not way[5:].isdigit():
        return way
    return f"{way[:5]}{group.ranks[int(way[5:])]}"


def _training_frames() -> list[FrameType]:
    """Return the frames of the training thread, the innermost first."""
    found = []
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (the only way to see another thread)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _wait_from_stack(frames: Sequence[FrameType]) -> str:
    """Return what a rank without recorded waits does according to its stack: a meeting of all ranks, a collective of torch, or backward."""
    for one in frames:
        file: Any = one.f_code.co_filename
        if file == control_tree.__file__ or file.startswith(f"{_TORCH}/distributed/"):
            return "collective"
        if file == f"{_TORCH}/autograd/graph.py":
            return "backward"
        if not file.startswith(_LIBRARIES):
            return ""
    return ""
