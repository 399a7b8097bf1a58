"""Ask DCGM's host engine for the health of all GPUs, by `dcgmi`.

`dcgmi health --check` evaluates samples that the host engine has, and changes nothing in it. What it samples is a setting, of which others
may rely on: it is not changed here. Format: `dcgmi/Health.cpp` and `dcgmi/DcgmiOutput.cpp` of https://github.com/NVIDIA/DCGM.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.readings import DcgmIncident, DcgmReading
from holdfast.probe.readers.gpus import gpus_on_bus
from holdfast.probe.readers.nvml import bus_of
from holdfast.probe.readers.services import PROGRAMS, all_processes

HOST_ENGINE: Final = "nv-hostengine"
SECONDS: Final = 5
"""How long `dcgmi` may take, in all: it answers within milliseconds, or not for minutes while a GPU that degrades is busy."""
END_SECONDS: Final = 0.5
"""How long it may take to end once it was killed."""
MAX_BYTES: Final = 1 << 20
"""Bytes of its answer: DCGM reports 64 incidents at most, each with a text of a few hundred letters."""
MAX_INCIDENTS: Final = 128
MAX_TEXT: Final = 2048
"""Letters that are kept of the messages of one incident."""
OVERALL: Final = "Overall Health"
NOT_WATCHED: Final = "Health watches not enabled"
WATCH: Final = "dcgmi health --set a"
_BUS: Final = re.compile(r"PCI Bus ID: *([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")


def read_dcgm(root: Path = Path("/")) -> DcgmReading | Unknown:
    """Return what DCGM says of the GPUs; `NOT_REQUESTED` where no host engine can be seen, or `dcgmi` is not installed."""
    engine = next((process for process in all_processes(root) if process.name == HOST_ENGINE), None)
    program = next((path for place in PROGRAMS if (path := root / place / "dcgmi").exists()), None)
    if engine is None or program is None:
        return NOT_REQUESTED
    until, host = time.monotonic() + SECONDS, _address(root / "proc" / str(engine.pid) / "cmdline")
    answer = _run([str(program), "health", "--check", "--json", *host], until)
    if isinstance(answer, Unknown):
        return answer
    found = _parsed(answer)
    if isinstance(found, Unknown) or not found.incidents:
        return found
    listed = _run([str(program), "discovery", "--list", *host], until)
    on_bus = gpus_on_bus(root)
    if isinstance(listed, Unknown) or isinstance(on_bus, Unknown):
        return found  # without a device of the node, nothing follows from an incident
    gpus = {number: bus for number, bus in _discovered(listed).items() if bus in on_bus}
    return DcgmReading(overall=found.overall, incidents=found.incidents, gpus=gpus)


def _address(command: Path) -> list[str]:
    """Return the options by which `dcgmi` finds a host engine that was not started on its default port."""
    try:
        arguments = command.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    for option, value in pairwise(arguments):
        if option in {"-d", "--domain-socket"} and value.startswith("/"):
            return ["--host", f"unix://{value}"]
        if option in {"-p", "--port"} and value.isdecimal():
            return ["--host", f"localhost:{value}"]
    return []


def _run(command: Sequence[str], until: float) -> str | Unknown:
    """Return what *command* prints, whatever its exit status, until a time (monotonic).

    The alarm is for the case that this process is ended first: then nothing else ends *command*.
    """
    late = Unknown(f"`{command[0]} {command[1]}` gave no answer within {SECONDS} s")
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.alarm(SECONDS + 1),  # noqa: PLW1509 (this process has one thread)
        )
    except OSError as error:
        return Unknown(f"{command[0]} cannot be run: {error.strerror or error}")
    assert child.stdout is not None
    output, pipe = bytearray(), child.stdout.fileno()
    try:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            more = os.read(pipe, 1 << 16)
            output += more
            if len(output) > MAX_BYTES:
                return Unknown(f"`{command[0]} {command[1]}` printed more than {MAX_BYTES >> 20} MiB")
            if not more:
                return output.decode(errors="replace")
        return late
    finally:
        child.stdout.close()
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits for the driver ends when the kernel lets it
            child.wait(END_SECONDS)


def _parsed(answer: str) -> DcgmReading | Unknown:
    """Return the reading in what `dcgmi health --check --json` prints, without addresses of GPUs."""
    if NOT_WATCHED in answer:
        return Unknown(
            f"DCGM watches the health of no GPU in its group of all GPUs: `{WATCH}` on the node has it watch (Holdfast leaves this setting "
            "of its host engine as it is)"
        )
    try:
        body = json.JSONDecoder().raw_decode(answer[answer.index("{") :])[0]["body"]
        incidents = [one for group in body if group != OVERALL for one in _incidents(group, body[group])]
        return DcgmReading(overall=_text(body[OVERALL]["value"]), incidents=tuple(incidents[:MAX_INCIDENTS]), gpus={})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        lines = [line.strip() for line in answer.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("Error")), lines[0] if lines else "nothing")
        return Unknown(f"`dcgmi health --check --json` does not say how the GPUs are, but: {said[:200]}")


def _incidents(group: str, found: Any) -> list[DcgmIncident]:  # noqa: ANN401 (any JSON)
    """Return the incidents of all devices of a kind; raise an error of lookups and types for what is none."""
    return [
        DcgmIncident(
            entity=_text(f"{group} {number}"),
            system=_text(system),
            health=_text(one.get("value") or ""),
            message=_text(" ".join(one.get("overflow") or [])),  # DCGM breaks a text into parts
        )
        for number, entity in (found.get("children") or {}).items()
        for system, one in ((entity.get("children") or {}).get("Errors", {}).get("children") or {}).items()
    ]


def _text(value: Any) -> str:  # noqa: ANN401 (any JSON)
    """Return *value* as one line; raise ``TypeError`` where it is no text."""
    if not isinstance(value, str):
        raise TypeError(value)
    return " ".join(value[:MAX_TEXT].split())


def _discovered(table: str) -> dict[str, str]:
    """Return PCI addresses by DCGM's numbers of GPUs, from what `dcgmi discovery --list` prints; other devices have other tables."""
    found: dict[str, str] = {}
    kind = number = ""
    for line in table.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        left, _, right = (part.strip() for part in line.strip().strip("|").partition("|"))
        if left and not left.isdecimal():
            kind, number = left, ""
        number = left or number
        if kind == "GPU ID" and number.isdecimal() and (bus := _BUS.search(right)) is not None:
            found[number] = bus_of(bus[1])
    return found
