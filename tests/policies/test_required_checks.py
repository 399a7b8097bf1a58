"""What a burn-in has to exercise for which fault: by the catalogue's own kinds, and by checks as nodes send them."""

from __future__ import annotations

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import COMPONENTS, RecommendedAction
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.burn_in import explain_still_isolated, outcome
from holdfast.policies.nodes.cordons import CordonedFault
from holdfast.policies.nodes.required_checks import (
    BY_ATTRIBUTION,
    EXERCISES,
    OF_COMPONENT,
    UNTESTED,
    NodePart,
    part_of,
    parts_to_test,
    unproven,
)
from tests.mentions import mentions

SOUND = tuple(Check(name=name, mark=CheckMark.PASSED, words="fine") for name in ("compute", "memory", "disk", "clock", "network"))
NO_GPU = Check(name="gpu", mark=CheckMark.SKIPPED, words="no NVIDIA device is visible", needed=False)
GPU_0 = Check(name="gpu 0", mark=CheckMark.PASSED, words="every product is the same", devices=("0000:18:00.0",))


def network_of(*devices: str) -> Check:
    """Return a network check that passed over those devices."""
    return Check(name="network", mark=CheckMark.PASSED, words="well with node-1", devices=devices)


def disk_of(*devices: str) -> Check:
    """Return a disk check that passed on those devices."""
    return Check(name="disk", mark=CheckMark.PASSED, words="every block was read as it was written", devices=devices)


PARTS: dict[str, NodePart | None] = {
    "cuda-uncorrectable-ecc": NodePart.GPU,
    "gpu-off-bus": NodePart.GPU,
    "driver-not-loaded": NodePart.GPU,
    "cuda-no-device": NodePart.GPU,
    "pcie-degraded": NodePart.GPU,
    "cpu-machine-check": NodePart.PROCESSOR,
    "memory-uncorrected": NodePart.MEMORY,
    "memory-ecc-uncorrectable": NodePart.MEMORY,
    "nvme-media-error": NodePart.DISK,
    "filesystem-read-only": NodePart.DISK,
    "link-down": NodePart.NETWORK,
    "node-partitioned": NodePart.NETWORK,
    "nccl-unreachable": NodePart.NETWORK,
    "clocksource-unstable": NodePart.CLOCK,
    "kernel-oops": NodePart.HOST,
    "worker-sigsegv": NodePart.HOST,
    "psu-failed": None,
    "fan-failed": None,
    "nvlink-error": None,
    "nvswitch-fatal": None,
    "pcie-fatal": None,
    "port-buffer-overrun": None,
    "amd-bad-pages": None,
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_fault_is_of_the_part_that_its_component_says(kind: str) -> None:
    """Of a part that no check exercises, the table says why."""
    entry = CATALOGUE[kind]
    assert part_of(entry) is PARTS[kind]
    assert PARTS[kind] or entry.component in UNTESTED


def test_every_component_and_every_part_has_its_place() -> None:
    """A new component of the catalogue has to say how it is tested, and no kind is without a part or a reason."""
    listed = OF_COMPONENT.keys() | BY_ATTRIBUTION.keys() | UNTESTED.keys()
    assert listed == {component for components in COMPONENTS.values() for component in components}
    assert {part for parts in EXERCISES.values() for part in parts} == set(NodePart)
    nowhere = [kind.id for kind in CATALOGUE.values() if part_of(kind) is None and kind.component not in UNTESTED]
    assert nowhere == []


def test_most_kinds_that_take_a_node_out_can_be_tested() -> None:
    """The rest is a person's to return, or a setting's: links between devices, power, cooling, and other vendors' accelerators."""
    out = [
        kind
        for kind in CATALOGUE.values()
        if kind.recommended_action in {RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT}
    ]
    tested = [kind for kind in out if part_of(kind) is not None]
    assert len(tested) > len(out) / 2


@pytest.mark.parametrize(
    ("kind", "device", "checks", "words"),
    [
        ("cuda-uncorrectable-ecc", "", (NO_GPU,), ("GPU", NO_GPU.words)),
        ("cuda-uncorrectable-ecc", "", (), ("GPU", "`burn_in.torch`")),
        ("cuda-uncorrectable-ecc", "", (GPU_0,), ()),
        ("gpu-off-bus", "0000:18:00", (GPU_0,), ()),
        ("gpu-off-bus", "00000000:18:00.0", (GPU_0,), ()),
        ("gpu-off-bus", "0000:2a:00", (GPU_0,), ("GPU", "0000:18:00.0", "gpu-off-bus", "0000:2a:00")),
        ("driver-not-loaded", "driver", (GPU_0,), ()),
        ("link-down", "eth1", (network_of("eth0"),), ("link-down", "eth1")),
        ("link-down", "eth1", (network_of("eth1", "0000:5e:00.0"),), ()),
        ("link-down", "eth1", (network_of("eth10"),), ("link-down", "eth1")),
        ("link-down", "node", SOUND, ()),
        ("nvme-media-error", "nvme0", (disk_of("/", "nvme0n1p2", "nvme0n1"),), ()),
        ("disk-io-error", "sda", (disk_of("/", "sda1"),), ()),
        ("disk-io-error", "sdb", (disk_of("/", "sda1"),), ("disk-io-error", "sdb")),
        ("filesystem-read-only", "/data", (disk_of("/", "sda1"),), ("/data",)),
        ("pcie-fatal", "0000:01:00.0", (disk_of("/", "nvme0n1", "0000:01:00.0"),), ()),
        ("pcie-fatal", "0000:00:01.0", (GPU_0,), ("PCIe device 0000:00:01.0", "pcie-fatal", "0000:18:00.0")),
        ("pcie-fatal", "node", (GPU_0,), ("pcie", "pcie-fatal", "not known")),
        ("cpu-machine-check", "CPU 3", SOUND, ()),
        ("psu-failed", "", SOUND, ("power", "psu-failed")),
        ("of-another-version", "", SOUND, ("this version", "not know")),
    ],
)
def test_only_a_passed_check_that_used_the_device_proves_anything(
    kind: str, device: str, checks: tuple[Check, ...], words: tuple[str, ...]
) -> None:
    """A check that was skipped, or that used another device, does not."""
    found = unproven(parts_to_test([CordonedFault(kind=kind, device=device)]), checks)
    assert mentions("; ".join(map(str, found)), *words) if words else found == ()


def test_a_part_that_could_not_be_tested_keeps_the_node_isolated_and_says_what_to_do() -> None:
    """A failure goes before; without a fault to prove wrong the same checks pass."""
    wanted = parts_to_test([CordonedFault(kind="cuda-uncorrectable-ecc")])
    found = outcome("node-0", (*SOUND, NO_GPU), wanted)
    assert found.mark is CheckMark.SKIPPED
    words = explain_still_isolated(found, "quarantined")
    assert mentions(words, "node-0", "quarantined", "GPU", "holdfast node return node-0 --reason")
    assert outcome("node-0", (*SOUND, NO_GPU)).mark is CheckMark.PASSED
    assert outcome("node-0", (*SOUND, GPU_0), wanted).mark is CheckMark.PASSED
    bad = Check(name="disk", mark=CheckMark.FAILED, words="a block was read wrong")
    assert outcome("node-0", (*SOUND, bad, NO_GPU), wanted).mark is CheckMark.FAILED


def test_a_cluster_may_accept_what_no_check_can_test() -> None:
    """By component, and nothing else with it."""
    faults = [CordonedFault(kind="psu-failed"), CordonedFault(kind="fan-failed")]
    assert [one.kind for one in parts_to_test(faults, ["power"])] == ["fan-failed"]
    assert parts_to_test(faults, ["power", "cooling"]) == ()
