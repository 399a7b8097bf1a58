"""Which parts of a node a burn-in must exercise to lift a cordon: from fault kinds to parts, and from parts to checks.

A burn-in only proves the parts that its checks use. A node that is quarantined for a GPU and passes on its processors has proven nothing
about the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import Attribution, FaultKind
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.cordons import CordonedFault


class NodePart(StrEnum):
    """A part of a node that a check can exercise."""

    HOST = "operating system"
    PROCESSOR = "processors"
    MEMORY = "host memory"
    GPU = "GPU"
    NETWORK = "network"
    DISK = "disk"
    CLOCK = "clock"


EXERCISES: Final[Mapping[str, frozenset[NodePart]]] = {
    "compute": frozenset({NodePart.PROCESSOR, NodePart.HOST}),
    "matrix": frozenset({NodePart.PROCESSOR}),
    "memory": frozenset({NodePart.MEMORY}),
    "gpu": frozenset({NodePart.GPU}),
    "disk": frozenset({NodePart.DISK}),
    "clock": frozenset({NodePart.CLOCK}),
    "network": frozenset({NodePart.NETWORK}),
}
"""Parts that each check exercises. `gpu 3` is a `gpu` check."""

OF_COMPONENT: Final[Mapping[str, NodePart]] = {
    "gpu": NodePart.GPU,
    "gpu memory": NodePart.GPU,
    "cpu": NodePart.PROCESSOR,
    "memory module": NodePart.MEMORY,
    "host memory": NodePart.MEMORY,
    "memory": NodePart.MEMORY,
    "network": NodePart.NETWORK,
    "ethernet": NodePart.NETWORK,
    "storage": NodePart.DISK,
    "disk": NodePart.DISK,
    "raid": NodePart.DISK,
    "file system": NodePart.DISK,
    "clock": NodePart.CLOCK,
    "node": NodePart.HOST,
    "host": NodePart.HOST,
    "agent": NodePart.HOST,
    "kernel": NodePart.HOST,
    "service": NodePart.HOST,
    "limits": NodePart.HOST,
}
"""Part of a component, whatever the fault is attributed to."""

_SOFTWARE: Final = {
    Attribution.GPU: NodePart.GPU,
    Attribution.NETWORK: NodePart.NETWORK,
    Attribution.STORAGE: NodePart.DISK,
    Attribution.NODE: NodePart.HOST,
    Attribution.PROCESS: NodePart.HOST,
    Attribution.USER_CODE: NodePart.HOST,
    Attribution.NONE: NodePart.HOST,
}
_GPU_SOFTWARE: Final = _SOFTWARE | {Attribution.NODE: NodePart.GPU}
BY_ATTRIBUTION: Final[Mapping[str, Mapping[Attribution, NodePart]]] = {
    "cuda": _GPU_SOFTWARE,
    "driver": _GPU_SOFTWARE,
    "nccl": _GPU_SOFTWARE,
    "collectives": _GPU_SOFTWARE,
    **dict.fromkeys(("worker", "communication", "user code", "pytorch", "data loader", "job"), _SOFTWARE),
    "performance": {Attribution.GPU: NodePart.GPU, Attribution.NETWORK: NodePart.NETWORK},
    "pcie": {Attribution.GPU: NodePart.GPU},
}
"""Components that name the reporter of a fault: the attribution decides about the part."""

UNTESTED: Final[Mapping[str, str]] = {
    "nvlink": "GPUs are tested one by one, and not the links between them",
    "nvswitch": "GPUs are tested one by one, and not the links between them",
    "accelerator": "only NVIDIA GPUs are tested",
    "pcie": "the device behind the bus is not known",
    "power": "a minute of load does not test power supplies",
    "cooling": "a minute of load does not test fans",
    "board": "no check reads the board's sensors",
    "infiniband": "the network is tested by TCP, and not by RDMA",
    "rdma": "the network is tested by TCP, and not by RDMA",
    "network file system": "the server is another machine",
    "checkpoint": "the storage is another machine",
    "performance": "no check knows the required speed of this part",
    "container": "no check starts a container",
    "scheduler": "no check goes through the scheduler",
}
"""Components without a check, and why: a person returns the node, or `burn_in.accept_untested` names the component."""

OF_KIND: Final[Mapping[str, NodePart]] = {
    "memory-ecc-uncorrectable": NodePart.MEMORY,
    "node-partitioned": NodePart.NETWORK,
    "pairwise-partition": NodePart.NETWORK,
}
"""Kinds whose component is the node although one part has the fault."""

CURES: Final[Mapping[NodePart, str]] = {
    NodePart.GPU: "Repair the driver or the card",
    NodePart.NETWORK: "Test it together with another node that is in service, over the link that had the fault",
    NodePart.DISK: "Set `burn_in.folder` to a folder on the disk that had the fault",
    NodePart.MEMORY: "Free some of its memory",
}
OFF: Final[Mapping[NodePart, str]] = {NodePart.GPU: "`burn_in.torch` is off"}
"""Why a check did not run."""
_BUS: Final = re.compile(r"\b(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?\b", re.IGNORECASE)
_VAGUE: Final = frozenset({"", "node", "driver"})
"""Device fields that name no device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartToTest:
    """A part that a burn-in must exercise."""

    kind: str
    """Fault kind that the node is cordoned for."""
    component: str
    part: NodePart | None
    """None: no check exercises it."""
    device: str = ""
    """The faulty device, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """A part that a burn-in had to exercise and did not."""

    words: str
    cure: str

    def __str__(self) -> str:
        return self.words


def part_of(kind: FaultKind) -> NodePart | None:
    """Return the part of a node with faults of *kind*; None if no check exercises it."""
    by_attribution = BY_ATTRIBUTION.get(kind.component, {}).get(kind.attributed_to)
    return OF_KIND.get(kind.id) or OF_COMPONENT.get(kind.component) or by_attribution


def parts_to_test(faults: Iterable[CordonedFault], accepted: Collection[str] = ()) -> tuple[PartToTest, ...]:
    """Return the parts that a burn-in must exercise to lift a cordon for *faults*, except components *accepted* as untested.

    A kind that is not in the catalogue cannot be tested.
    """
    found = []
    for fault in faults:
        entry = CATALOGUE.get(fault.kind)
        component = entry.component if entry is not None else ""
        if component not in accepted:
            part = part_of(entry) if entry is not None else None
            found.append(PartToTest(kind=fault.kind, component=component, part=part, device=fault.device))
    return tuple(dict.fromkeys(found))


def unproven(wanted: Iterable[PartToTest], checks: Iterable[Check]) -> tuple[Unproven, ...]:
    """Return the *wanted* parts that no passed check exercised, each once."""
    checks = tuple(checks)
    return tuple({str(one): one for need in wanted if (one := _unproven(need, checks)) is not None}.values())


def _unproven(need: PartToTest, checks: tuple[Check, ...]) -> Unproven | None:
    if need.component == "pcie" and _BUS.search(need.device) is not None:
        return _unproven_on_bus(need, checks)
    if need.part is None:
        why = UNTESTED.get(need.component, "this version does not know the fault")
        words = f"no check exercises {need.component or 'what'} ({need.kind}): {why}"
        return Unproven(words=words, cure="Test the part by other means")
    mine = [check for check in checks if need.part in EXERCISES.get(check.name.partition(" ")[0], ())]
    passed = [check for check in mine if check.mark is CheckMark.PASSED]
    cure = CURES.get(need.part, "Run the burn-in again")
    if not passed:
        unreached = [check.words for check in checks if check.name == "reach"]
        why = "; ".join([check.words for check in mine] or unreached) or OFF.get(need.part, "the check did not run")
        return Unproven(words=f"no check could exercise the {need.part} ({why})", cure=cure)
    used = [device for check in passed for device in check.devices]
    if used and _is_a_name(need) and not any(_is_same(need.device, device) for device in used):
        words = f"the {need.part} check used {', '.join(dict.fromkeys(used))}, and the fault ({need.kind}) was on {need.device}"
        return Unproven(words=words, cure=cure)
    return None


def _unproven_on_bus(need: PartToTest, checks: tuple[Check, ...]) -> Unproven | None:
    """Check whether a passed check used the device that a PCIe fault names by its address."""
    used = [device for check in checks if check.mark is CheckMark.PASSED for device in check.devices if _BUS.search(device)]
    if any(_is_same(need.device, device) for device in used):
        return None
    words = f"no check used the PCIe device {need.device} ({need.kind}); the checks used {', '.join(used) or 'none that has an address'}"
    return Unproven(words=words, cure="Test the device by other means")


def _is_a_name(need: PartToTest) -> bool:
    """Return whether a fault names one of several devices of its part."""
    if need.device in _VAGUE:
        return False
    return need.part in {NodePart.NETWORK, NodePart.DISK} or (need.part is NodePart.GPU and _BUS.search(need.device) is not None)


def _is_same(wanted: str, used: str) -> bool:
    """Return whether two names mean the same device: PCI addresses in any form, and a disk and its partitions."""
    bus, other = _BUS.search(wanted), _BUS.search(used)
    if bus is not None and other is not None:
        return _address(bus) == _address(other)
    part = r"(?:n\d+)?(?:p\d+)?" if wanted[-1].isdigit() else r"\d*"
    return re.fullmatch(re.escape(wanted) + part, used) is not None


def _address(found: re.Match[str]) -> tuple[int, int, int]:
    domain, bus, device = found.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16)
