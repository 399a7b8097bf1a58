"""Where this rank stands, told when the flow calls the roll: what it has begun in each group, what it waits for, and in which line.

The thread that hears orders answers, so that a rank answers while its training thread waits in C++ or sleeps. One that cannot (it is
stopped, or something holds the interpreter's lock) is told by its silence.
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
from holdfast.runtime.groups.membership import membership
from holdfast.runtime.groups.operations import COLLECTIVES, OperationMark
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.telemetry.wait_windows import process_waits

log = logging.getLogger("holdfast.runtime")

DEEPEST: Final = 12
"""Frames of the training thread that are told, the innermost first."""
_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parents[2])
_LIBRARIES: Final = (
    _TORCH,
    _OURS,
    "<frozen ",
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


def status() -> Message:
    """Return where this rank stands: the fields of the word ``status``.

    ``waits``: what the training thread waits for (a window of `wait_windows`, else ``collective`` or ``backward`` as the stack has it), for
    ``seconds``. ``groups``: name, members, operations begun by their way, and those in work. ``place``: the innermost line of the user's
    own code.
    """
    ours = membership()
    waits, seconds = process_waits().present()
    frames = _frames()
    return {
        "step": link().step,
        "waits": waits or _by_stack(frames),
        "seconds": round(seconds, 3),
        "groups": [_in_group(group) for group in (ours.groups if ours is not None and ours.dry_run is None else ())],
        "place": next((_line(one) for one in frames if not one.f_code.co_filename.startswith(_LIBRARIES)), ""),
        "stack": [_line(one) for one in frames[:DEEPEST]],
    }


def answering(forward: Callable[[Message], None] = lambda _order: None) -> Callable[[Message], None]:
    """Return what hears orders: it answers `QUESTIONS`, and leaves all else to *forward*."""

    def hear(order: Message) -> None:
        answer = QUESTIONS.get(str(order.get("do")))
        if answer is None:
            forward(order)
            return
        try:
            answer(order)
        except Exception:  # a question that cannot be answered must not end the thread that hears orders
            log.exception("the question '%s' could not be answered", order["do"])

    return hear


QUESTIONS: Final[dict[str, Callable[[Message], None]]] = {"roll-call": lambda _question: link().report("status", **status())}
"""What a flow may ask, and who answers, in the thread that hears orders."""


def _in_group(group: ManagedGroup) -> Message:
    in_flight = group.in_flight
    return {
        "name": group.group_name,
        "ranks": _packed(group.ranks),
        "counts": {_way(group, way): number for way, number in list(in_flight.counts.items())},
        "pending": [_told(group, mark) for mark in list(in_flight.pending.values())],
    }


def _told(group: ManagedGroup, mark: OperationMark) -> Message:
    return {
        "way": _way(group, mark.channel),
        "number": mark.number,
        "name": mark.name.partition(">")[0].partition("<")[0],
        "size": mark.size,
        "kind": str(mark.dtype).removeprefix("torch.") if mark.dtype is not None else "",
        "seconds": round(time.perf_counter() - mark.since, 3),
    }


def _way(group: ManagedGroup, way: str) -> str:
    """Return *way* with the global rank of the other end."""
    if way == COLLECTIVES or not way[5:].isdigit():
        return way
    return f"{way[:5]}{group.ranks[int(way[5:])]}"


def _packed(ranks: Sequence[int]) -> dict[str, int] | list[int]:
    """Return the members in few bytes where they are evenly spaced, as those of a mesh are."""
    pace = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = pace > 0 and list(ranks) == list(range(ranks[0], ranks[0] + pace * len(ranks), pace))
    return {"first": ranks[0], "pace": pace, "count": len(ranks)} if even else list(ranks)


def _frames() -> list[FrameType]:
    """Return the frames of the training thread, the innermost first."""
    found = []
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (the only way to see another thread)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _by_stack(frames: Sequence[FrameType]) -> str:
    """Return what the stack of a rank whose waits nobody notes tells: that it is inside of one of torch's own collectives, or backward."""
    for one in frames:
        file: Any = one.f_code.co_filename
        if file.startswith(f"{_TORCH}/distributed/"):
            return "collective"
        if file == f"{_TORCH}/autograd/graph.py":
            return "backward"
        if not file.startswith(_LIBRARIES):
            return ""
    return ""
