"""NVML as node checks and the agents' monitor ask it: a real card where there is one, and the library's stand-in where not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.gpu_readings import Clocks, Ecc, Gpu, GpuReading, Heat, Power
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.probe.readers.gpus import read_gpus
from holdfast.probe.readers.local import read_node
from tests.mentions import mentions
from tests.readers.conftest import StandIn, looker, nvml_library, stand_in  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"))]
    ),
]
ROOT = Path(__file__).parents[2]
BUS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
WATCH = """
from holdfast.probe.readers.nvml import listening
with listening() as watch:
    print([why.why for why in watch.unwatched.values()], watch.wait(0.05))
"""
UNUSABLE = {"gpu-off-bus", "gpu-reset-required", "gpu-unusable", "driver-mismatch"}


@pytest.fixture
def reading(device: str, request: pytest.FixtureRequest) -> Callable[[], GpuReading]:
    """Give what reads the GPUs."""
    if device == "cuda":
        return read_gpus
    library: StandIn = request.getfixturevalue("stand_in")
    return library.reading


def gpu_of(reading: GpuReading) -> Gpu:
    """Return the first GPU of *reading*."""
    assert not isinstance(reading.gpus, Unknown), reading.gpus.why
    assert reading.gpus
    return reading.gpus[0]


def is_uuid(gpu: Gpu, uuid: object) -> bool:
    """Return whether torch means *gpu* by *uuid*: it leaves the prefix out, as far as is known."""
    return str(gpu.uuid).removeprefix("GPU-") == str(uuid).removeprefix("GPU-")


def is_read(value: object, least: int = 0) -> bool:
    """Return whether *value* is a number of at least *least*, or NVML has said why there is none."""
    return bool(value.why) if isinstance(value, Unknown) else isinstance(value, int) and value >= least


def test_a_gpu_has_an_identity(device: str, reading: Callable[[], GpuReading]) -> None:
    """Address, UUID and name: on a card those that CUDA gives it."""
    found = reading()
    first = gpu_of(found)
    assert first.failed == 0
    assert isinstance(found.driver_version, str)
    assert BUS.fullmatch(str(first.bus)), first.bus
    assert str(first.uuid).startswith("GPU-")
    if device == "cuda":
        assert not isinstance(found.gpus, Unknown)
        card: Any = torch.cuda.get_device_properties(0)
        (same,) = [one for one in found.gpus if is_uuid(one, card.uuid)]
        assert same.name == card.name
        if not isinstance(found.on_bus, Unknown):  # a container may hide the bus
            assert same.bus in found.on_bus


def test_ecc_errors_throttle_reasons_and_limits_are_numbers_or_say_why_not(device: str, reading: Callable[[], GpuReading]) -> None:
    """In the units of the readings; a sound GPU has no fault that makes it unusable."""
    found = reading()
    first = gpu_of(found)
    assert isinstance(first.ecc, Ecc)
    assert isinstance(first.ecc_on, bool | Unknown)
    errors = [getattr(first.ecc, name) for name in Ecc.__slots__]
    assert all(map(is_read, errors)), errors
    assert not any(isinstance(one, Unknown) for one in errors) or first.ecc_on is not True, errors
    assert isinstance(first.clocks, Clocks)
    assert isinstance(first.clocks.reasons, int), first.clocks.reasons
    assert is_read(first.clocks.sm, 1)
    assert isinstance(first.heat, Heat)
    assert isinstance(first.heat.gpu, int)
    assert 0 < first.heat.gpu < 120  # degrees
    assert isinstance(first.power, Power)
    assert is_read(first.power.draw, 1000)  # milliwatts
    faults = {fault.kind for fault in judge(NodeReading(node="n0", at=0.0, gpus=found))}
    assert not faults & UNUSABLE, faults


def test_the_program_that_nodes_run_reads_the_same_gpus(device: str, reading: Callable[[], GpuReading], tmp_path: Path) -> None:
    """It carries its own pynvml, and imports nothing of ours."""
    found = read_node("n0", root=Path("/") if device == "cuda" else tmp_path / "root").gpus
    assert isinstance(found, GpuReading), found
    ours, theirs = gpu_of(reading()), gpu_of(found)
    assert (theirs.bus, theirs.uuid, theirs.name, theirs.ecc_on) == (ours.bus, ours.uuid, ours.name, ours.ecc_on)


def test_xid_events_of_every_gpu_are_registered(device: str, reading: Callable[[], GpuReading]) -> None:
    """In a process of its own, as the monitor has one. A sound card reports none while it is watched."""
    gpu_of(reading())
    ended = subprocess.run([sys.executable, "-c", WATCH], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    if device == "cuda" and mentions(ended.stdout, "Not Supported"):
        pytest.skip(f"this card has no Xid events: {ended.stdout.strip()}")
    assert ended.stdout == "[] None\n"


def test_what_is_allocated_on_a_gpu_shows_in_its_memory(device: str, reading: Callable[[], GpuReading]) -> None:
    """A reading is of now, and of the card that this process computes on."""
    if device == "cpu":
        assert is_read(gpu_of(reading()).memory_used)
        return

    def used() -> int:
        card: Any = torch.cuda.get_device_properties(0)
        gpus = reading().gpus
        assert not isinstance(gpus, Unknown)
        (value,) = [one.memory_used for one in gpus if is_uuid(one, card.uuid)]
        assert isinstance(value, int)
        return value

    torch.ones(1, device="cuda")
    before, size = used(), 512 * 2**20
    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert used() - before >= size // 2, block.shape  # other processes may free memory meanwhile
