"""Probe the node that this process runs on, by the same program that runs on other nodes."""

from __future__ import annotations

import importlib.util
import sys
import time
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.detectors.codec import MalformedData, unpacked
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.probe.remote import bundle
from holdfast.probe.remote.program import ChildInterpreter, NoAnswer, RemoteProgram

START_SECONDS: Final = 20.0
"""Time for an interpreter to start and to end on a busy node, in addition to the deadline of the probe."""
EVIDENCE: Final = (
    "holdfast.detectors.evidence",
    "holdfast.detectors.nodes.gpu_readings",
    "holdfast.detectors.codec",
    "holdfast.detectors.nodes.readings",
)
"""The modules of detectors that readers need."""
NOT_CARRIED: Final = frozenset({"local", "__init__"})
"""Modules of this package that do not run on the node."""
ENTRY: Final = "holdfast.probe.readers.collect"


@cache
def program() -> str:
    """Return the source of a program that probes its node once for each question, whose fields are those of `collect.answer`.

    Starting an interpreter and unpacking the readers takes some tenths of a second of a core, a probe itself a fraction of that.
    """
    return bundle.program(sources(), ENTRY)


def sources() -> dict[str, str]:
    """Return the source of each module that the readers need.

    pynvml is one of them where it is installed here: it works with older drivers, while an older one on the node may lack functions.
    """
    readers = [f"holdfast.probe.readers.{file.stem}" for file in sorted(Path(__file__).parent.glob("*.py")) if file.stem not in NOT_CARRIED]
    found = importlib.util.find_spec("pynvml")
    pynvml = {"pynvml": Path(found.origin).read_text(encoding="utf-8")} if found is not None and found.origin else {}
    return {**{name: bundle.source_of(name) for name in (*EVIDENCE, *readers)}, **pynvml}


def read_node(node: str, *, seconds: float = 10.0, root: Path = Path("/"), python: str = sys.executable) -> NodeReading:
    """Return one reading of this node within *seconds*; where none could be made, every part says why."""
    found = probe_here(node, seconds=seconds, root=root, python=python)
    if not isinstance(found, Unknown):
        return found
    return NodeReading(
        node=node,
        at=time.time(),
        gpus=found,
        kernel=found,
        network=found,
        storage=found,
        host=found,
        clock=found,
        services=found,
        processes=found,
        kubernetes=found,
        dcgm=found,
    )


def probe_here(node: str, *, seconds: float = 10.0, root: Path = Path("/"), python: str = sys.executable) -> NodeReading | Unknown:
    """Return one reading of this node within *seconds*, or why there is none."""
    until = time.monotonic() + seconds + START_SECONDS
    try:
        with closing(ChildInterpreter(python)) as interpreter:
            answer = RemoteProgram(interpreter, program(), until).ask(until, node=node, root=str(root.absolute()), seconds=seconds)
    except OSError as error:
        return Unknown(f"the readers could not be run: {error}")
    except NoAnswer as error:
        return Unknown(f"the readers gave no answer: {error}")
    return reading_of(answer)


def reading_of(answer: object) -> NodeReading | Unknown:
    """Return the reading that a program of readers answered with, wherever it ran, or why it is none."""
    try:
        return unpacked(NodeReading, answer)
    except MalformedData as error:
        return Unknown(f"the readers gave no answer: {error}")
