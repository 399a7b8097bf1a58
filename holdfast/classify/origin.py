"""Tell which log a line is from: by its beginning, as what it says may be a quotation."""

from __future__ import annotations

import re
from typing import Final

from holdfast.detectors.catalogue import KERNEL_LOG, SYSTEM_LOG, WORKER_OUTPUT, FaultKind
from holdfast.detectors.confirmation import acts_alone

NAMES: Final = {"kernel": KERNEL_LOG, "output": WORKER_OUTPUT, "other": SYSTEM_LOG}
"""The logs as users name them."""
PLACES: Final = {KERNEL_LOG: "the kernel log", WORKER_OUTPUT: "a worker's output", SYSTEM_LOG: "the log of a service"}
"""The logs within a sentence."""
_DATE: Final = r"(?:[A-Z][a-z]{2} +\d{1,2} [\d:.]{8,15}|\d{4}-\d\d-\d\d[T ][\d:.,]{8,15}\S{0,6})"
_KERNEL: Final = re.compile(
    r"(?:<\d{1,3}>)?(?:"
    r"\[ *\d+\.\d+\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\]|kern *:[ \w]{1,8}:|"  # as dmesg prints it
    rf"(?:{_DATE} +)?(?:[\w.-]+ +)?kernel: |{_DATE} +(?:[\w.-]+ +)?\[ *\d+\.\d+\]|"  # as syslog and the journal write it
    # as a driver begins its lines
    r"(?:NVRM|(?:nvidia|amdgpu|pcieport|mlx\d_core|hl|habanalabs)(?:-\w+)?(?: [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?: \w+)?)?"
    r"|EDAC \w+|mce|(?:\{\d+\})?\[Hardware Error\]): )",
    re.ASCII,
)


def log_of(line: str) -> str:
    """Return the kernel log if *line* begins as its lines do; else nothing, as it may be from any log, or from a text about one."""
    return KERNEL_LOG if _KERNEL.match(line.lstrip()) else ""


def acts_in(kind: FaultKind, text: str, log: str) -> bool:
    """Return whether *text* takes a node out by itself, in *log* or, if that is not known, in the one that it shows to be from."""
    return acts_alone(kind, text) and (log or log_of(text)) in kind.logs


def places_of(kind: FaultKind) -> str:
    """Return the logs whose writers can know of *kind*, within a sentence."""
    return " or ".join(PLACES[log] for log in kind.logs)
