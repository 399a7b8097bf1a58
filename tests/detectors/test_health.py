"""What two probes of a node show beside what one does, and what is reported of what was not seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.detectors.catalogue import CATALOGUE
from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.findings import HOUR, THRESHOLDS, ReadingPair, grown, growths
from holdfast.detectors.nodes.gpu_readings import Gpu, GpuReading
from holdfast.detectors.nodes.health import JUDGES, judge, unknown_signals
from holdfast.detectors.nodes.readings import CounterGrowth, KernelLine, KernelReading, NodeReading

PARTS = {field.name for field in dataclasses.fields(NodeReading)} - {"node", "at"}
DARK = Unknown("nobody could look")


def test_every_part_of_a_look_has_a_judge() -> None:
    """The kernel's log is judged line by line."""
    assert set(JUDGES) | {"kernel"} == PARTS


def test_a_look_that_saw_nothing_has_no_fault() -> None:
    """Not seen is neither healthy nor a fault, in either of two looks."""
    dark = NodeReading(node="n0", at=60.0, **dict.fromkeys(PARTS, DARK))
    assert judge(dark) == []
    assert judge(dark, dark) == []


SAMPLES = {
    name: entry.unhealthy.evidence for name, entry in CATALOGUE.items() if isinstance(entry.unhealthy.evidence, NodeReading | CounterGrowth)
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_look_before_that_saw_nothing_takes_nothing_away(name: str) -> None:
    """What one look shows is a fault still; what two are needed for is none, and never an end."""
    sample = SAMPLES[name]
    now = sample.now if isinstance(sample, CounterGrowth) else sample
    dark = NodeReading(node="n0", at=now.at - 60.0, **dict.fromkeys(PARTS, DARK))
    assert {fault.kind for fault in judge(now, dark)} == ({name} if isinstance(sample, NodeReading) else set())


LASTING = {name: sample for name, sample in SAMPLES.items() if isinstance(sample, NodeReading)}


@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_lasts_is_known_again(name: str) -> None:
    """A minute later it has the same signature: that names its place, and nothing that was measured."""
    now = LASTING[name]
    later = dataclasses.replace(now, at=now.at + 60.0)
    assert {fault.signature for fault in judge(later)} == {fault.signature for fault in judge(now)}
    assert all(fault.signature.startswith(f"{name} ") for fault in judge(now))


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(3, 5, 2), (5, 5, 0), (5, 2, 2), (None, 5, None), (DARK, 5, None), (5, DARK, None)]
)
def test_what_a_counter_grew_by(before: int | Unknown | None, now: int | Unknown, expected: int | None) -> None:
    """One that is smaller than before began anew."""
    assert grown(before, now) == expected


def test_only_counters_that_both_looks_have_are_compared() -> None:
    """A driver that counts more than before has not had all of it since."""
    assert growths({"a": 1, "b": 1}, {"a": 2, "b": 1, "c": 9}, ["a", "b", "c"]) == {"a": 1}
    assert growths(DARK, {"a": 2}, ["a"]) == {}


@pytest.mark.parametrize(
    ("seconds", "growth", "rate"), [(7200.0, 100, 50.0), (3600.0, 100, 100.0), (1.0, 3, 3.0), (0.0, 3, 3.0), (-5.0, 3, 3.0)]
)
def test_a_few_errors_in_a_short_time_make_no_rate(seconds: float, growth: int, rate: float) -> None:
    """Three in a second are not ten thousand an hour; a clock that was set back does no harm."""
    assert ReadingPair(now=None, seconds=seconds, limits=THRESHOLDS).rate(growth, HOUR) == rate


def test_unknown_values_are_reported_by_path() -> None:
    """What nobody asked for is no blind spot."""
    gpus = GpuReading(on_bus=(), driver_version=DARK, gpus=(Gpu(index=3, bus="0000:18:00.0", rows=DARK, heat=NOT_REQUESTED),))
    assert list(unknown_signals(NodeReading(node="n0", at=0.0, gpus=gpus, clock=DARK))) == [
        ("gpus.driver_version", DARK.why),
        ("gpus.gpus[3].rows", DARK.why),
        ("clock", DARK.why),
    ]


def test_of_the_lines_of_one_kind_the_one_that_proves_it_is_reported() -> None:
    """A line before it that only looks like it does not hide it."""
    texts = (
        "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, Non-fatal, Link 30 LTSSM Fault Up",
        "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 31 LTSSM Fault Up",
        "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, Non-fatal, Link 32 LTSSM Fault Up",
    )
    lines = tuple(KernelLine(sequence=number, microseconds=number, level=3, text=text) for number, text in enumerate(texts))
    parts: dict[str, Any] = {**dict.fromkeys(PARTS, DARK), "kernel": KernelReading(lines=lines)}
    (fault,) = judge(NodeReading(node="n0", at=60.0, **parts))
    assert fault.quote == texts[1]
    assert fault.is_proven
