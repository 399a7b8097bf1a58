"""Xid errors of the NVIDIA driver, from the kernel log or from NVML events. `signatures/xid.toml` defines their kinds."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.evidence import HangLimits
from holdfast.detectors.nodes.findings import FaultFinding
from holdfast.detectors.nodes.gpu_readings import Xid, XidEvent

_LINE: Final = re.compile(r"NVRM: (?:GPU at )?Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)(?: GPU-[CI:\d -]+)?\): (?P<code>\d+)(?P<text>.*)")


def xid_of(text: str) -> Xid | None:
    """Return the Xid in a line of the kernel log, which omits the PCI function (always 0) and may name an instance of a divided GPU."""
    found = _LINE.search(text)
    if found is None:
        return None
    bus = found["bus"].lower()
    return Xid(code=int(found["code"]), bus=bus if "." in bus else f"{bus}.0", text=found["text"].strip(" ,"))


def finding(xid: Xid) -> FaultFinding | None:
    """Return the fault of an Xid; None if it is none. Xids of kind `gpu-xid-other` are distinguished by their number.

    It is quoted as in the kernel log: what proves its kind is an expression for such lines.
    """
    name = kind_of(xid.code, xid.text)
    if name is None:
        return None
    quote = f"Xid (PCI:{xid.bus}): {xid.code}" + (f", {xid.text}" if xid.text else "")
    return FaultFinding(kind=name, part=f"GPU {xid.bus}" + (f" Xid {xid.code}" if name == OTHER else ""), quote=quote)


UNUSABLE: Final = frozenset({
    "gpu-off-bus", "gpu-memory-double-bit", "gpu-memory-uncontained", "gpu-memory-unrecovered", "gpu-gsp-timeout", "gpu-gsp-crashed",
    "gpu-controller-halted", "gpu-init-failed",
})  # fmt: skip
"""Kinds after which a GPU does no more work (Xids 79, 48, 95, 140, 119, 120, 62 and 143): a rank on it never reaches its next
collective, and its own timeout may be minutes away."""
OTHER: Final = "gpu-xid-other"
"""The kind of Xids without a kind of their own."""


@lru_cache(maxsize=1024)
def kind_of(code: int, text: str = "") -> str | None:
    """Return the fault kind of an Xid, by the corresponding line in the kernel log; None if it is none."""
    from holdfast.detectors.signatures import XIDS  # noqa: PLC0415 (loads a thousand signatures, only if there is an Xid)

    line = f"NVRM: Xid (PCI:0000:00:00): {code}, {text}"
    for signature in XIDS:
        if found := signature.regex.search(line):
            return signature.kind_of(found)
    return OTHER


def see_xid(seen: XidEvent, _limits: HangLimits) -> Fault | None:
    """Return the fault of an Xid event; None if it is none."""
    found = finding(seen.xid)
    if found is None:
        return None
    return Fault(
        kind=found.kind, at=seen.at, node=seen.node, quote=found.quote, signature=f"{found.kind} {found.part}", device=seen.xid.bus
    )
