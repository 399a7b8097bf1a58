"""Snapshots from a device, over a runtime that counts what is pinned and whose copies arrive late: the logic, not the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from holdfast.memstore.shared_memory import SLICE_BYTES, Slot, Snapshot, labels
from holdfast.runtime.snapshots import copy_schedule
from holdfast.runtime.snapshots.checksum import fill, sum_of
from holdfast.runtime.snapshots.config import SnapshotPlace
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.copy_schedule import Profile, SnapshotLimits, plan
from holdfast.runtime.snapshots.device_runtime import CapturedStep, CopyEvent
from holdfast.runtime.snapshots.measurements import ENOUGH, REPLAN, StepMeasurements
from holdfast.runtime.snapshots.slice_copiers import DeviceCopier, Task
from holdfast.runtime.snapshots.snapshotter import SLOTS
from tests.mentions import mentions
from tests.runtime.counting_device import CountingRuntime
from tests.runtime.counting_device import Event as CopyPoint
from tests.runtime.device_stand_in import Event, StandIn
from tests.runtime.trainer import FIRST, Trainer, opened, restore, same, stored


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close what takes snapshots when a test has ended."""
    yield
    while opened:
        opened.pop().close()


def test_every_registration_is_undone_and_none_is_made_twice(tmp_path: Path) -> None:
    """A slot is mapped again at another size, and another rank's slots may come to lie where the old ones were."""
    runtime = CountingRuntime()
    trainer = Trainer(tmp_path, runtime=runtime)
    trainer.to(FIRST + 4)
    assert len(runtime.pinned_sizes) == len(runtime.registered) == SLOTS
    trainer.net.rest.append(torch.nn.Linear(3, 500))  # the state grows
    trainer.optimizer.add_param_group({"params": list(trainer.net.rest[-1].parameters())})
    trainer.to(FIRST + 9)
    sizes = {len(slot.data) for slot in trainer.snapshotter._slots}
    assert set(runtime.pinned_sizes.values()) == sizes != {runtime.registered[0]}
    assert len(runtime.registered) == 2 * SLOTS
    trainer.snapshotter.set_place(SnapshotPlace(1, 2, "net"), 2)  # another rank: these slots are closed
    assert runtime.pinned_sizes == {}
    trainer.to(FIRST + 14)
    assert len(runtime.pinned_sizes) == SLOTS
    for path in labels(tmp_path):
        with Snapshot(path) as one:
            one.verify()
    trainer.snapshotter.close()
    opened.remove(trainer.snapshotter)
    assert runtime.pinned_sizes == {}


def test_a_snapshot_of_a_device_is_the_step_it_names(tmp_path: Path) -> None:
    """Whatever arrives late: it is sealed when all of it lies on the host, and training changes the state after that."""
    runtime = CountingRuntime()
    trainer = Trainer(tmp_path, runtime=runtime)
    trainer.to(FIRST + 2)
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    assert runtime.held >= 3
    other = Trainer(tmp_path / "none")
    assert len(restore(other, tmp_path, FIRST + 2)) == 1
    assert same(other.state(), wanted)
    trainer.begin()
    trainer.snapshotter.give_up()  # nothing reads the state after that: the runtime would object
    trainer.end()
    trainer.to(FIRST + 5)
    assert max(stored(tmp_path)) == FIRST + 4
    assert trainer.snapshotter.counts.copied > 0


@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
def test_batches_of_slices_arrive_in_order_with_the_sums_of_their_sources(count: int) -> None:
    """Full batches, the last slice shorter, slices that span tensors, and some that lie on the host."""
    runtime = CountingRuntime()
    size = (count - 1) * SLICE_BYTES + 1001
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    tasks = []
    for begin in range(0, size, SLICE_BYTES):
        part = data[begin : begin + SLICE_BYTES]
        tasks.append(Task((part[:100], part[100:].clone()) if begin else (part,), begin, len(part)))
    copier, target, arrived = DeviceCopier(runtime), torch.zeros(size, dtype=torch.uint8), []
    for first in range(0, len(tasks), copier.batch):
        copier.submit(tasks[first : first + copier.batch], target)
        arrived += copier.arrived(wait=False)
    arrived += copier.arrived(wait=True)
    assert [task.begin for task, _ in arrived] == [task.begin for task in tasks]
    assert torch.equal(target, data)
    assert [checksum for _, checksum in arrived] == [sum_of(torch.cat(task.sources)) for task in tasks]


def _tasks(data: torch.Tensor) -> list[Task]:
    return [Task((part,), begin, len(part)) for begin, part in zip(range(0, len(data), SLICE_BYTES), data.split(SLICE_BYTES), strict=True)]


def test_a_batch_is_collected_while_the_one_before_is_copied_and_no_buffer_is_filled_before_it_was() -> None:
    """Nobody waits on the host meanwhile. Each batch is copied by two calls, its checksums and its bytes."""
    runtime = CountingRuntime()
    copier, data = DeviceCopier(runtime), torch.randint(0, 256, (5 * SLICE_BYTES,), dtype=torch.uint8)
    target, tasks = torch.zeros_like(data), _tasks(data)
    for one in tasks:
        copier.submit([one], target)
    assert runtime.copying == [0, 2, 2, 2, 2]
    assert runtime.done == 6  # the first three batches, as their buffers were needed
    assert not target[3 * SLICE_BYTES :].any()
    arrived = copier.arrived(wait=True)
    assert torch.equal(target, data)
    assert [(task, checksum) for task, checksum in arrived] == [(one, sum_of(one.sources[0])) for one in tasks]


def test_batches_that_overlap_count_once() -> None:
    """The time of a batch begins where that of the batch before has ended."""
    runtime = CountingRuntime()
    copier, data = DeviceCopier(runtime), torch.zeros(2 * SLICE_BYTES, dtype=torch.uint8)
    target, begun = torch.zeros_like(data), time.perf_counter()
    for one in _tasks(data):
        copier.submit([one], target)
        time.sleep(COPYING)
    assert len(copier.arrived(wait=True)) == 2
    assert COPYING < copier.device_seconds() <= time.perf_counter() - begun
    assert copier.device_seconds() == 0.0


@pytest.mark.parametrize("ends", ["is given up", "cannot be launched"])
def test_a_snapshot_that_ends_with_two_batches_under_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """No half snapshot, no registered memory, and no copy that writes to memory which is gone. The next snapshot is whole."""
    monkeypatch.setattr(DeviceCopier, "batch", 1)
    monkeypatch.setattr(Copier, "_copy_if_allowed", lambda *_: False)  # the test copies
    runtime = CountingRuntime()
    trainer = Trainer(tmp_path, runtime=runtime)
    trainer.to(FIRST + 3)
    before = stored(tmp_path)
    trainer.begin()
    snapshotter = trainer.snapshotter
    draft = snapshotter._draft
    assert draft is not None
    launched = len(runtime._queue)
    for _ in range(2):
        snapshotter._copier._copy_slice(draft.work, len(draft.work.tasks), overlapped=False)
    assert len(runtime._queue) - runtime.done == 4
    if ends == "is given up":
        snapshotter.give_up()
    else:
        runtime.fails_at = launched + 5  # the checksums of the third batch are under way already
        trainer.end()
        assert [one for one in caplog.records if one.exc_info and "out of memory" in str(one.exc_info[1])]
        runtime.fails_at = -1
    assert runtime.done == len(runtime._queue) > launched
    assert FIRST + 3 not in stored(tmp_path)
    assert set(stored(tmp_path)) <= set(before)
    if ends == "is given up":
        trainer.end()
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    other = Trainer(tmp_path / "none")
    assert len(restore(other, tmp_path, FIRST + 4)) == 1
    assert same(other.state(), wanted)
    snapshotter.close()
    opened.remove(snapshotter)
    assert runtime.pinned_sizes == {}


def test_a_device_that_pins_no_memory_still_has_its_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once, with what to do."""
    runtime = CountingRuntime(refuses=True)
    trainer = Trainer(tmp_path, runtime=runtime)
    trainer.to(FIRST + 4)
    assert FIRST + 3 in stored(tmp_path)
    (message,) = [one.message for one in caplog.records if "pinned" in one.message]
    assert mentions(message, "ulimit -l", "cannot allocate memory")


def test_a_step_in_a_graph_is_refused(tmp_path: Path) -> None:
    """Its replays would change what a snapshot copies; the optimizer has not changed anything."""
    runtime = CountingRuntime()
    trainer = Trainer(tmp_path, runtime=runtime)
    trainer.to(FIRST + 1)
    trainer.begin()
    before = trainer.state()["net"]
    runtime.capturing = True
    with pytest.raises(CapturedStep) as raised:
        trainer.end()
    assert mentions(str(raised.value), "optimizer.step()", "CUDA graph", "interval: 0")
    assert same(
        {name: value for name, value in trainer.state()["net"].items() if "norm" not in name},
        {n: v for n, v in before.items() if "norm" not in n},
    )
    trainer.step += 1  # the snapshot of this one may be complete already, and is not taken again
    with pytest.raises(CapturedStep):
        trainer.begin()
    trainer.step -= 1
    runtime.capturing = False
    trainer.to(FIRST + 3)
    assert FIRST + 2 in stored(tmp_path)


def test_a_reader_of_a_slot_needs_no_device(tmp_path: Path) -> None:
    """Hooks are called once for each mapping, with all of it, and for a mapping that is replaced."""
    calls: list[tuple[str, int]] = []
    slot = Slot(
        tmp_path / "one", on_map=lambda data: calls.append(("map", len(data))), on_unmap=lambda data: calls.append(("unmap", len(data)))
    )
    for size in (8192, 4096, 0):
        slot._resize(size)
    slot.close()
    assert calls == [("map", 8192), ("unmap", 8192), ("map", 4096), ("unmap", 4096)]


def lived(step: float) -> Profile:
    """Return the profile of steps without a visible wait."""
    profile = Profile()
    for _ in range(8):
        profile.add(step, [])
    return profile


def test_the_limit_of_overhead_holds_on_devices() -> None:
    """A copy that is longer than a step, and one that is shorter and pauses training all the same."""
    limits = SnapshotLimits(overhead=0.01, concurrent=True)
    fits = plan(lived(1.0), [SLICE_BYTES] * 100, 1e9, limits)
    assert (fits.every, fits.pause, fits.spread) == (1, 0.0, 0.8)
    long = plan(lived(0.1), [SLICE_BYTES] * 100, 1e9, limits)
    assert long.spread == pytest.approx(0.08)  # the rest of it is copied beside training all the same
    assert long.pause == pytest.approx(100 * SLICE_BYTES / 1e9 - 0.08)
    assert long.every == 25
    assert long.overhead <= 0.01
    planning = StepMeasurements(limits)
    planning.profile = lived(1.0)
    planning.add_copy(SLICE_BYTES, SLICE_BYTES / 1e9)
    assert planning.plan_for([SLICE_BYTES] * 100).every == 1
    planning.pauses.extend([0.05] * ENOUGH)
    late = [planning.plan_for([SLICE_BYTES] * 100) for _ in range(REPLAN)][-1]
    assert late.every == 5
    assert planning.wanted == 5
    assert copy_schedule.plan(lived(1.0), [SLICE_BYTES], 1e9, limits, paused=0.0005).every == 1  # too short to skip one


@dataclass
class TrainingEvent:
    """A place in the stand-in's queue of computation."""

    event: Event

    def query(self) -> bool:
        """Return whether the stand-in has come here."""
        return self.event.query()

    def synchronize(self) -> None:
        """Wait for it."""
        self.event.passed.wait()

    def milliseconds_until(self, end: CopyEvent) -> float:
        """Return the time from here to *end*."""
        assert self.event.passed.is_set(), "an event was read that had not passed"
        assert isinstance(end, CopyPoint)
        return (end.at - self.event.at) * 1000


@dataclass
class BesideTraining(CountingRuntime):
    """Copies take their time, beside what the stand-in computes."""

    computing: StandIn = field(default_factory=StandIn)
    meanwhile: Callable[[], object] = int
    """Called while copies are under way."""

    def record_training(self) -> CopyEvent:
        """Return the end of the queue of computation."""
        return TrainingEvent(self.computing.record())

    def run(self, upto: int) -> None:
        """Take `COPYING` seconds before `meanwhile`, and again after it."""
        if upto > self.done:
            time.sleep(COPYING)
            self.meanwhile()
            time.sleep(COPYING)
        super().run(upto)


COPYING = 0.05


@pytest.mark.parametrize("comes", ["before the copies begin", "while they run", "after they have ended"])
def test_a_pause_is_what_the_device_waits_and_not_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str) -> None:
    """The host comes to the optimizer's step while the device has forward and backward to do still: copies until then cost nothing."""
    monkeypatch.setattr(Copier, "_copy_if_allowed", lambda *_: False)  # all is copied at the end
    runtime = BesideTraining()
    trainer = Trainer(tmp_path, runtime=runtime)
    trainer.to(FIRST + 1)
    snapshotter = trainer.snapshotter
    counts, stalled = replace(snapshotter.counts), runtime.computing.stall()
    trainer.begin()
    if comes == "before the copies begin":
        stalled.set()
        runtime.computing.synchronize()
    elif comes == "while they run":

        def come() -> None:
            stalled.set()
            runtime.computing.synchronize()

        runtime.meanwhile = come
    begun = time.perf_counter()
    snapshotter.before_change()
    waited = time.perf_counter() - begun
    stalled.set()
    assert waited >= 2 * COPYING
    paused = snapshotter.counts.paused - counts.paused
    assert list(snapshotter.planning.pauses)[-1] == paused
    copied, overlapped = snapshotter.counts.copied - counts.copied, snapshotter.counts.overlapped - counts.overlapped
    assert copied > 0
    if comes == "after they have ended":
        assert paused == 0.0
        assert overlapped == pytest.approx(copied)
        return
    assert overlapped == 0.0
    if comes == "before the copies begin":
        assert 2 * COPYING <= paused <= waited
    else:
        assert COPYING <= paused <= waited - COPYING


def test_a_snapshot_is_loaded_onto_a_device_through_a_few_buffers(tmp_path: Path) -> None:
    """Bit by bit, and training waits for the last copy."""
    trainer, runtime = Trainer(tmp_path), CountingRuntime()
    trainer.to(FIRST + 2)
    path = max(labels(tmp_path).items(), key=lambda item: item[1].step)[0]
    with Snapshot(path) as one:
        direct, ringed = ([torch.zeros(entry.size, dtype=torch.uint8) for entry in one.entries] for _ in range(2))
        assert fill(ringed, one, runtime=runtime) == fill(direct, one) == one.label.size
    assert all(map(torch.equal, ringed, direct))
    assert any(bool(each.any()) for each in ringed)
    assert runtime.held == 1
