"""Xids through NVML's event set: real pynvml, a stand-in library, and an error that happens during a wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, KERNEL_LOG, TAKES_NODE_OUT
from holdfast.detectors.confirmation import confirmed
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import HangLimits, LogLine, WorkerException, WorkerExit
from holdfast.detectors.log_lines.kernel_lines import finding_of
from holdfast.detectors.nodes.gpu_readings import Xid, XidEvent
from holdfast.detectors.nodes.readings import KernelLine
from tests.readers.conftest import StandIn

ROOT = Path(__file__).parent.parent.parent
LISTEN = """
import json, sys
from holdfast.probe.readers.nvml import listening
with listening() as watch:
    print(json.dumps(sorted(watch.unwatched)), flush=True)
    for line in sys.stdin:
        print(json.dumps(repr(watch.wait(float(line)))), flush=True)
"""
"""Waits as long as each line of its input says, and prints what was received."""


@pytest.fixture
def listener(stand_in: StandIn) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a process that listens to the GPUs."""
    with ExitStack() as stack:

        def start() -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", LISTEN]
            return stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True))

        yield start


def next_line(child: subprocess.Popen[str]) -> object:
    """Return the next line of *child*."""
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def ask(child: subprocess.Popen[str], seconds: float) -> None:
    """Have *child* wait."""
    assert child.stdin is not None
    child.stdin.write(f"{seconds}\n")
    child.stdin.flush()


def test_an_xid_is_received_while_waiting(stand_in: StandIn, listener: Callable[[], subprocess.Popen[str]]) -> None:
    """With the PCI address of its GPU; where nothing happens, nothing is received."""
    child = listener()
    assert next_line(child) == []
    ask(child, 0.01)
    assert next_line(child) == "None"
    ask(child, 60)
    stand_in.happens(1, 79)
    assert next_line(child) == repr(Xid(code=79, bus="0000:28:00.0"))
    child.communicate()
    assert child.returncode == 0


def test_a_gpu_that_cannot_be_watched_does_not_affect_the_others(stand_in: StandIn, listener: Callable[[], subprocess.Popen[str]]) -> None:
    """The first GPU refuses; the second one's error is received."""
    stand_in.say("gpu0.nvmlDeviceRegisterEvents 3")
    child = listener()
    assert next_line(child) == [0]
    ask(child, 60)
    stand_in.happens(1, 48)
    assert "code=48" in str(next_line(child))


def test_a_wait_that_fails_is_reported(stand_in: StandIn, listener: Callable[[], subprocess.Popen[str]]) -> None:
    """A GPU that is lost during the wait is not silence."""
    child = listener()
    next_line(child)
    stand_in.say("wait 15")
    ask(child, 60)
    assert "GPU is lost" in str(next_line(child))


def test_without_an_event_set_there_is_an_error(stand_in: StandIn, listener: Callable[[], subprocess.Popen[str]]) -> None:
    """Without it no Xid can be received."""
    stand_in.say("nvmlEventSetCreate 3")
    child = listener()
    assert child.stderr is not None
    assert "NoNvml: NVML's events: Not Supported" in child.stderr.read()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(79, "gpu-off-bus"), (48, "gpu-memory-double-bit"), (74, "gpu-nvlink"), (13, "gpu-engine-exception"), (201, "gpu-xid-other")],
)
def test_an_xid_is_named_by_its_code(code: int, kind: str) -> None:
    """Those with a kind of their own have that kind, from whatever source."""
    (fault,) = see([XidEvent(node="n0", at=5.0, xid=Xid(code=code, bus="0000:28:00.0"))], HangLimits())
    assert (fault.kind, fault.quote, fault.at) == (kind, f"Xid (PCI:0000:28:00.0): {code}", 5.0)


@pytest.mark.parametrize(("code", "proven"), [(46, False), (74, False), (110, False), (171, False), (79, True), (95, True), (48, True)])
def test_a_number_without_its_line_proves_what_any_line_with_that_number_does(code: int, *, proven: bool) -> None:
    """Where the line decides, NVML's event is shown: the line in the kernel log is no second signal, a lost peer is one."""
    at: dict[str, Any] = {"node": "n0", "at": 5.0}
    (fault,) = see([XidEvent(**at, xid=Xid(code=code, bus="0000:28:00.0"))], HangLimits())
    assert fault.is_proven == proven
    assert (CATALOGUE_ACTIONS.of(fault) in TAKES_NODE_OUT) == proven
    assert fault.needs_proof != proven
    line = LogLine(text=f"NVRM: Xid (PCI:0000:28:00): {code}, pid=7, name=python, Ch 00000014", log=KERNEL_LOG, **at)
    assert confirmed([fault, *see([line], HangLimits())]) == {}
    lost = WorkerException(type="RuntimeError", message="Connection reset by peer", peer_lost=True)
    end = WorkerExit(rank=0, code=1, raised=lost, **at)
    takes_out = fault.entry.recommended_action in TAKES_NODE_OUT
    assert bool(confirmed([fault, *see([end], HangLimits())])) == (takes_out and not proven)


def test_an_xid_of_nvlink_that_its_line_calls_fatal_is_proven_as_it_is_quoted() -> None:
    """The expression that proves it is for lines of the kernel log."""
    text = (
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE {} XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)"
    )
    for severity, proven in (("Fatal", True), ("Nonfatal", False)):
        found = finding_of(KernelLine(sequence=1, microseconds=1, level=3, text=text.format(severity)))
        assert found is not None
        assert CATALOGUE[found.kind].proves(found.quote) == proven


def test_an_xid_that_is_no_fault_is_ignored() -> None:
    """A circuit that works again is no news."""
    assert see([XidEvent(node="n0", at=5.0, xid=Xid(code=162, bus="0000:28:00.0"))], HangLimits()) == []
