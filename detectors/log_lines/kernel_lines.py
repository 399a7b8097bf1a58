"""Faults in lines of the kernel log, with the affected part of the node. Loads all log signatures."""

from __future__ import annotations

import re
from typing import Final

from holdfast.detectors.catalogue import CATALOGUE, TAKES_NODE_OUT
from holdfast.detectors.log_lines import classification as logs
from holdfast.detectors.log_lines import xids
from holdfast.detectors.nodes import storage
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.readings import KernelLine

WARNING: Final = 4
"""Kernel log level from which on the heuristic about words applies; less severe lines need a matching signature."""

_PART: Final = re.compile(
    r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b"
    r"|\b(?:sd[a-z]+\d*|nvme\d+(?:n\d+(?:p\d+)?)?|md\d+|dm-\d+|loop\d+|z?ram\d+|sr\d+|fd\d+"
    r"|eth\d+|en[opsx]\w+|ib\d+|ibs\w+|bond\d+|mlx5_\d+|CPU ?\d+)\b"
)
"""Device names in kernel messages: PCI address, disk, link, adapter, processor."""
_REMOVABLE: Final = re.compile(r"\b(?:sr|fd)\d+\b")
"""Drives whose medium can be taken out: that it cannot be read is no fault of the node."""
_NO_DISK: Final = re.compile(r"(?:loop|ram|zram|sr|fd)\d+\b")
"""Block devices that are no disks of the node: files, memory, removable media. Images of packages and of containers are mounted so."""


def finding_of(line: KernelLine) -> FaultFinding | None:
    """Return the fault in *line*; None if there is none."""
    xid = xids.xid_of(line.text)
    if xid is not None:
        return xids.finding(xid)
    if (found := storage.KERNEL_LINE.search(line.text)) and not _REMOVABLE.search(line.text):
        return FaultFinding(kind=storage.IO_ERRORS.id, part=next(filter(None, found.groups())), quote=line.text)
    name = logs.judge(line.text, words=line.level <= WARNING)
    if name is None:
        return None
    found = _PART.search(line.text)
    part = found[0] if found else "node"
    if _NO_DISK.match(part) and CATALOGUE[name].recommended_action in TAKES_NODE_OUT:
        name = storage.IO_ERRORS.id  # shown, and no reason to leave the node: where a disk is the cause, the kernel names that too
    return FaultFinding(kind=name, part=part, quote=line.text)
