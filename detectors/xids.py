"""Xids: what NVIDIA's driver reports, in the kernel's log or through NVML's event set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from detectors import gpu
from detectors.catalogue import Blame, Fault, FaultKind, Level, kind
from detectors.evidence import HangLimits, Sample
from detectors.gpu_readings import Xid, XidEvent
from detectors.readings import KernelLine, KernelReading, NodeReading
from detectors.sightings import Sighting

REFERENCE: Final = "https://docs.nvidia.com/deploy/xid-errors/"

KINDS: Final[Mapping[int, str]] = {
    48: gpu.ECC.id,  # double bit error
    63: gpu.REMAP_PENDING.id,  # row remapping or page retirement recorded
    64: gpu.REMAP_FAILED.id,  # row remapping or page retirement failed
    74: gpu.NVLINK_ERRORS.id,  # NVLink error
    79: gpu.OFF_BUS.id,  # fallen off the bus
    95: gpu.ECC.id,  # uncontained memory error
    119: gpu.RESET_REQUIRED.id,  # GSP no longer answers
    120: gpu.RESET_REQUIRED.id,  # GSP error
}
"""Xids that are a kind of their own, as NVIDIA's catalogue of them has it; every other is a `gpu-xid`."""

_LINE: Final = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?P<text>.*)")


def _logged(text: str) -> NodeReading:
    line = KernelLine(sequence=1, microseconds=1_000_000, level=3, text=text)
    return NodeReading(node="n0", at=0.0, kernel=KernelReading(lines=(line,)))


OTHER: Final = kind(
    FaultKind(
        id="gpu-xid",
        title="NVIDIA's driver reported an error (Xid) that is no kind of its own here",
        component="gpu",
        source="kernel log, NVML events",
        level=Level.WATCH,
        blame=Blame.GPU,
        action="look the number up; many are a program's own doing",
        reference=REFERENCE,
        sick=Sample(evidence=_logged("NVRM: Xid (PCI:0000:18:00): 31, pid=4242, name=python, Ch 00000008, MMU Fault")),
        healthy=Sample(evidence=_logged("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15")),
        weight=55,
    )
)


def xid_of(text: str) -> Xid | None:
    """Return the Xid that a line of the kernel's log tells of; it leaves the GPU's function out, which is always 0."""
    found = _LINE.search(text)
    if found is None:
        return None
    bus = found["bus"].lower()
    return Xid(code=int(found["code"]), bus=bus if "." in bus else f"{bus}.0", text=found["text"].strip(" ,"))


def sighting(xid: Xid) -> Sighting:
    """Return what an Xid is; those without a kind of their own are told apart by their number."""
    kind_seen = KINDS.get(xid.code, OTHER.id)
    part = f"GPU {xid.bus}" + (f" Xid {xid.code}" if kind_seen == OTHER.id else "")
    return Sighting(kind=kind_seen, part=part, quote=f"GPU {xid.bus}: Xid {xid.code}" + (f", {xid.text}" if xid.text else ""))


def see_xid(seen: XidEvent, _limits: HangLimits) -> Fault:
    """Name an Xid that was told as it happened."""
    found = sighting(seen.xid)
    return Fault(kind=found.kind, at=seen.at, node=seen.node, quote=found.quote, signature=f"{found.kind} {found.part}")
