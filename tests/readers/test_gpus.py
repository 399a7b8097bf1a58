"""GPUs through the real pynvml, over a stand-in of NVIDIA's library, and judged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.gpu_readings import Ecc, Fabric, Gpu, GpuProcess, GpuReading, Heat, Pcie, RemappedRows
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.readings import KernelLine, KernelReading, NodeReading
from holdfast.probe.readers.gpus import read_gpus
from tests.readers.conftest import StandIn

FIRST = "0000:18:00.0"


def looked(reading: GpuReading, at: float = 0.0) -> NodeReading:
    """Return a reading with only the GPUs of a node."""
    return NodeReading(node="n0", at=at, gpus=reading)


def kinds(faults: list[Fault]) -> list[str]:
    """Return the kinds of *faults*."""
    return [fault.kind for fault in faults]


def blinds(gpu: Gpu) -> set[str]:
    """Return the fields of *gpu* that could not be read."""
    return {name for name in Gpu.__slots__ if isinstance(getattr(gpu, name), Unknown)}


def test_a_healthy_gpu_is_read_completely_and_has_no_fault(stand_in: StandIn) -> None:
    """Nothing that the readers ask is left open, and what they have is what NVML said, in its units."""
    reading = stand_in.reading()
    first, second = stand_in.gpus()
    assert blinds(first) == set()
    assert (first.bus, second.bus, first.uuid, first.name) == (FIRST, "0000:28:00.0", "GPU-0", "NVIDIA Stand-in")
    assert first.heat == Heat(gpu=45, memory=55, slowdown_at=87, shutdown_at=92)
    assert first.pcie == Pcie(generation=5, generation_most=5, width=16, width_most=16, replays=0)
    assert first.fabric == Fabric(state=3, status=0)
    assert not isinstance(first.links, Unknown)
    assert [link.link for link in first.links] == [0, 1, 2, 3]
    assert reading.driver_version == "550.54.15"
    assert judge(looked(reading)) == []


def test_the_program_for_nodes_reads_the_same(stand_in: StandIn) -> None:
    """Started by itself, without any module of ours to import."""
    stand_in.say("gpu1.rows_failed 1")
    assert stand_in.reading_of_the_program() == stand_in.reading()


UNHEALTHY = {
    "gpu-off-bus": ("gpu0.fail 15",),
    "gpu-reset-required": ("gpu0.recovery_action 2",),
    "gpu-unusable": ("gpu0.nvmlDeviceGetHandleByIndex_v2 999",),
    "gpu-ecc-uncorrectable": ("gpu0.volatile_uncorrected 2", "gpu0.aggregate_uncorrected 5"),
    "gpu-row-remap-pending": ("gpu0.rows_pending 1", "gpu0.rows_uncorrected 1"),
    "gpu-row-remap-failed": ("gpu0.rows_failed 1",),
    "gpu-pages-retired": ("gpu0.pages_single 60", "gpu0.pages_double 3"),
    "gpu-thermal-throttle": ("gpu0.reasons 0x48", "gpu0.temperature 91"),
    "gpu-power-brake": ("gpu0.reasons 0x88",),
    "gpu-slowdown": ("gpu0.reasons 0x8",),
    "gpu-power-capped": ("gpu0.power_limit 450000",),
    "nvlink-down": ("gpu0.link2.active 0",),
    "pcie-degraded": ("gpu0.pcie_generation 3",),
    "fabric-not-ready": ("gpu0.fabric_state 2",),
    "driver-mismatch": ("init 18",),
}


@pytest.mark.parametrize("kind", UNHEALTHY)
def test_each_nvml_value_becomes_its_fault(stand_in: StandIn, kind: str) -> None:
    """One thing is wrong with one GPU (or the driver): that fault is seen, it names the GPU, and no other is seen."""
    stand_in.say(*UNHEALTHY[kind])
    (fault,) = judge(looked(stand_in.reading()))
    assert fault.kind == kind
    assert "init" in UNHEALTHY[kind][0] or FIRST in fault.quote or "GPU 0" in fault.quote


GROWS = {
    "pcie-replays": ("gpu0.pcie_replays {}", 100, 109),
    "nvlink-errors": ("gpu0.link1.recoveries {}", 5, 6),
    "gpu-ecc-uncorrectable": ("gpu0.volatile_uncorrected {}", 1, 2),
}


@pytest.mark.parametrize("kind", GROWS)
def test_only_counters_that_grew_since_the_last_reading_count(stand_in: StandIn, kind: str) -> None:
    """What a counter had when the generation began does not count; one that was reset counts from zero."""
    line, old, new = GROWS[kind]
    stand_in.say(line.format(old))
    before = looked(stand_in.reading())
    stand_in.say(line.format(new))
    now = looked(stand_in.reading(), at=60.0)
    assert judge(looked(before.gpus, at=60.0), before) == []  # type: ignore[arg-type]
    assert kinds(judge(now, before)) == [kind]


def test_a_gpu_that_disappeared_has_fallen_off(stand_in: StandIn) -> None:
    """After some drivers' resets a lost GPU is simply no longer counted."""
    before = looked(stand_in.reading())
    stand_in.say("count 1")
    (fault,) = judge(looked(stand_in.reading(), at=60.0), before)
    assert (fault.kind, "0000:28:00.0" in fault.quote) == ("gpu-off-bus", True)


def test_a_fault_that_nvml_and_the_kernel_report_is_one(stand_in: StandIn) -> None:
    """Xid 79 in the log, and a GPU that NVML calls lost; another error of that GPU is another fault."""
    said = ("79, pid=7, GPU has fallen off the bus.", "45, pid=7, Ch 00000008")
    lines = [KernelLine(sequence=1, microseconds=1, level=3, text=f"NVRM: Xid (PCI:0000:18:00): {text}") for text in said]
    stand_in.say("gpu0.nvmlDeviceGetTemperature 15")
    now = dataclasses.replace(looked(stand_in.reading()), kernel=KernelReading(lines=tuple(lines)))
    assert kinds(judge(now)) == ["gpu-off-bus", "gpu-channel-cleanup"]


def test_only_what_a_gpu_does_not_support_is_unknown(stand_in: StandIn) -> None:
    """A card without NVLink, error correction and fabric has no fault for it."""
    refused = ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetGpuFabricInfoV")
    stand_in.say(*(f"gpu0.{function} 3" for function in refused), "count 1")
    (gpu,) = stand_in.gpus()
    assert blinds(gpu) == {"links", "rows", "fabric"}
    assert isinstance(gpu.ecc, Ecc)
    assert isinstance(gpu.ecc.volatile_uncorrected, Unknown)
    assert "nvmlDeviceGetTotalEccErrors" in gpu.ecc.volatile_uncorrected.why
    assert judge(looked(stand_in.reading())) == []


def test_a_lost_gpu_does_not_affect_the_other_one(stand_in: StandIn) -> None:
    """Its own fields are unknown, not zero."""
    stand_in.say("gpu0.fail 15")
    lost, other = stand_in.gpus()
    assert (lost.failed, other.failed) == (15, 0)
    assert {"bus", "heat", "ecc"} - blinds(lost) == {"heat", "ecc"}  # whose parts are
    assert isinstance(lost.heat, Heat)
    assert isinstance(lost.heat.gpu, Unknown)
    assert blinds(other) == set()


def test_an_older_library_lacks_functions_and_the_rest_is_read(
    stand_in: StandIn, old_nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pynvml reports that a function is not found: that is unknown too, and no error."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old_nvml_library))
    found = stand_in.reading_of_the_program().gpus
    assert not isinstance(found, Unknown)
    gpu = found[0]
    assert blinds(gpu) == {"fabric"}
    assert isinstance(gpu.rows, RemappedRows)
    assert isinstance(gpu.rows.banks_without_spares, Unknown)
    assert "Function Not Found" in gpu.rows.banks_without_spares.why


def test_an_unknown_failure_of_the_driver_is_a_fault_and_a_missing_library_is_not(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is NVML's report about this node; the second only means that it could not be asked."""
    stand_in.say("init 999")
    assert kinds(judge(looked(stand_in.reading()))) == ["gpu-unusable"]
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in.root))
    nobody = stand_in.reading_of_the_program()
    assert isinstance(nobody.gpus, Unknown)
    assert "Library Not Found" in nobody.gpus.why
    assert judge(looked(nobody)) == []


@pytest.mark.parametrize(("vendor", "expected"), [("0x10de", ["driver-not-loaded"]), ("0x8086", [])])
def test_a_driver_that_is_not_loaded_is_a_fault_where_there_is_a_gpu(stand_in: StandIn, vendor: str, expected: list[str]) -> None:
    """The PCI bus shows it without any driver."""
    device = stand_in.root / "sys/bus/pci/devices/0000:18:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor)
    (device / "class").write_text("0x030200")
    stand_in.say("init 9")
    assert kinds(judge(looked(stand_in.reading()))) == expected


def test_a_process_on_a_gpu_is_read_with_its_job(stand_in: StandIn) -> None:
    """What an agent started carries the job's name; whose environment cannot be read is not called a stranger."""
    (stand_in.root / "proc/10").mkdir(parents=True)
    (stand_in.root / "proc/10/environ").write_bytes(b"PATH=/bin\0HOLDFAST_JOB=gpt\0RANK=3\0")
    stand_in.say("gpu0.process 10", "gpu1.process 11")
    first, second = stand_in.gpus()
    assert first.processes == (GpuProcess(pid=10, memory=1 << 30, job="gpt"),)
    assert not isinstance(second.processes, Unknown)
    assert isinstance(second.processes[0].job, Unknown)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given() -> None:
    """The real library is not there, and nothing is claimed about GPUs."""
    reading = read_gpus()
    assert isinstance(reading.gpus, Unknown)
    assert reading.gpus.why
    assert judge(looked(reading)) == []
