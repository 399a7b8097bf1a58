"""A look at the node that this process runs on, by the same program that travels to others."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from detectors.codec import MalformedData, unpacked
from detectors.evidence import Unknown
from detectors.readings import NodeReading
from holdfast.probe.readers.bundle import program
from holdfast.probe.remote.child import ChildInterpreter
from holdfast.probe.remote.errors import NoAnswer
from holdfast.probe.remote.program import RemoteProgram

START: Final = 20.0
"""Seconds that an interpreter may need to start and to end on a busy node, beyond the deadline of the look itself."""


def read_node(node: str, *, seconds: float = 10.0, root: Path = Path("/"), python: str = sys.executable) -> NodeReading:
    """Return one look at this node within *seconds*; where none could be had, every part says why."""
    found = seen(node, seconds=seconds, root=root, python=python)
    return dark(node, found.why) if isinstance(found, Unknown) else found


def seen(node: str, *, seconds: float = 10.0, root: Path = Path("/"), python: str = sys.executable) -> NodeReading | Unknown:
    """Return one look at this node within *seconds*, or why there is none."""
    until = time.monotonic() + seconds + START
    try:
        with closing(ChildInterpreter(python)) as interpreter:
            answer = RemoteProgram(interpreter, program(), until).ask(until, node=node, root=str(root.absolute()), seconds=seconds)
    except OSError as error:
        return Unknown(f"the readers could not be run: {error}")
    except NoAnswer as error:
        return Unknown(f"the readers gave no answer: {error}")
    return reading_of(answer)


def reading_of(answer: object) -> NodeReading | Unknown:
    """Return the look that a program of readers answered with, wherever it ran; where it is none, why."""
    try:
        return unpacked(NodeReading, answer)
    except MalformedData as error:
        return Unknown(f"the readers gave no answer: {error}")


def dark(node: str, why: str) -> NodeReading:
    """Return a look that saw nothing."""
    not_seen = Unknown(why)
    return NodeReading(
        node=node,
        at=time.time(),
        gpus=not_seen,
        kernel=not_seen,
        network=not_seen,
        storage=not_seen,
        host=not_seen,
        clock=not_seen,
        services=not_seen,
        processes=not_seen,
    )
