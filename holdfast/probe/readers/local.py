"""A look at the node that this process runs on, by the same program that travels to others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from detectors.codec import Misshapen, unpacked
from detectors.evidence import Blind
from detectors.readings import NodeReading
from holdfast.probe.readers.bundle import OPTIONS, program

START: Final = 20.0
"""Seconds that an interpreter may need to start and to end on a busy node, beyond the deadline of the look itself."""


def read_node(node: str, *, seconds: float = 10.0, root: Path = Path("/"), python: str = sys.executable) -> NodeReading:
    """Return one look at this node within *seconds*; where none could be had, every part says why."""
    found = seen(node, seconds=seconds, root=root, python=python)
    return dark(node, found.why) if isinstance(found, Blind) else found


def seen(node: str, *, seconds: float = 10.0, root: Path = Path("/"), python: str = sys.executable) -> NodeReading | Blind:
    """Return one look at this node within *seconds*, or why there is none."""
    asked = program([f"--node={node}", f"--root={root}", f"--seconds={seconds}"])
    try:
        done = subprocess.run([python, *OPTIONS], input=asked, capture_output=True, text=True, check=False, timeout=seconds + START)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Blind(f"the readers could not be run: {error}")
    return told(done.stdout, done.stderr)


def told(answer: str, complaint: str = "") -> NodeReading | Blind:
    """Return the look that a program of readers printed, wherever it ran; where it is none, why: in the last words of *complaint*."""
    try:
        said = json.loads(answer)
        refused = unpacked(Blind, {"why": said["blind"]}) if isinstance(said, dict) and set(said) == {"blind"} else None
        return refused or unpacked(NodeReading, said)
    except (ValueError, Misshapen) as error:
        last = (complaint.strip().splitlines() or [str(error)])[-1]
        return Blind(f"the readers gave no answer: {last}")


def dark(node: str, why: str) -> NodeReading:
    """Return a look that saw nothing."""
    not_seen = Blind(why)
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
