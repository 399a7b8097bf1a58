"""What a line of the kernel's log tells of, and of which part of the node. Brings all signatures of logs with it."""

from __future__ import annotations

import re
from typing import Final

from detectors import logs, storage, xids
from detectors.findings import FaultFinding
from detectors.readings import KernelLine

WARNING: Final = 4
"""The kernel's level from which on words of trouble count that no signature knows; what is said more quietly is trouble only by name."""

_PART: Final = re.compile(
    r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b"
    r"|\b(?:sd[a-z]+\d*|nvme\d+(?:n\d+)?|md\d+|dm-\d+|loop\d+|eth\d+|en[opsx]\w+|ib\d+|ibs\w+|bond\d+|mlx5_\d+|CPU ?\d+)\b"
)
"""How the kernel names a device: by its PCI address, or as a disk, a link, an adapter, a processor."""


def finding_of(line: KernelLine) -> FaultFinding | None:
    """Return the fault that *line* tells of; None: of none."""
    xid = xids.xid_of(line.text)
    if xid is not None:
        return xids.finding(xid)
    if found := storage.KERNEL_LINE.search(line.text):
        return FaultFinding(kind=storage.IO_ERRORS.id, part=next(filter(None, found.groups())), quote=line.text)
    name = logs.judge(line.text, words=line.level <= WARNING)
    if name is None:
        return None
    part = _PART.search(line.text)
    return FaultFinding(kind=name, part=part[0] if part else "node", quote=line.text)
