"""Take snapshots of one rank's training state: which state, when, and into which slot.

From the end of one step until the next is applied nothing changes parameters and optimizer state: that is when they are copied. What may
change sooner (buffers, generators, the position in the data, small values) is copied at once.

A rank completes its snapshot of step k before it votes for step k + 1. So if any rank has applied that step, all have a complete step k: a
fault costs at most one step. (Without a vote, a rank completes it before it applies the step: a fault may cost one more.) Three slots take
turns: the one being written and the newest two complete ones. So even without a vote all ranks have one step in common: a rank that
overwrites step k - 2 has received something from all others since they applied step k - 1.

The optimizers announce each change of the state, by torch's hook. A process takes no snapshot before they have done so once. If the state
changes without it, the newest snapshot may have been copied meanwhile: it is discarded, and no other one is taken before the next hook.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from holdfast.memstore import notification, shared_memory, store_folders, write_requests
from holdfast.memstore.shared_memory import Entry, Label, Slot
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.snapshots import copy_schedule
from holdfast.runtime.snapshots.config import PendingWrite, SnapshotConfig, SnapshotCounts, SnapshotPlace, StepTrace
from holdfast.runtime.snapshots.copier import Copier, CopyWork, slot_tensor
from holdfast.runtime.snapshots.device_runtime import CapturedStep, DeviceRuntime, runtime_of
from holdfast.runtime.snapshots.measurements import RunDelay, StepMeasurements
from holdfast.runtime.snapshots.overhead import is_control
from holdfast.runtime.snapshots.slice_copiers import Task
from holdfast.runtime.snapshots.state_sample import StateSample
from holdfast.runtime.state.state_layout import StateLayout
from holdfast.runtime.state.tensors import bytes_of, local_of
from holdfast.runtime.state.training import Training
from holdfast.runtime.telemetry.wait_windows import WaitWindows, process_waits
from holdfast.tensor_layout import contiguous

_log = logging.getLogger("holdfast.runtime")

SLOTS: Final = 3
"""Files of a rank; there is one more while one of them is being written to disk."""
REPORT_SKIPPED: Final = 10
"""Snapshots skipped for slow replicas from which on it is reported."""
RETRY_STEPS: Final = 100
"""Steps before the next attempt when there was not enough memory."""
NOTICEABLE: Final = 3e-4
"""Seconds; a rank that waits this long for the others' votes was not the last to vote."""
MAX_OPERATIONS: Final = 2000
"""Operations of a step that are kept."""
UNANNOUNCED: Final = (
    "the training state changed without a call of the session's `optimizer.step()`, before which a snapshot must be complete. Replays of a "
    "CUDA graph with the optimizer in it do so: call the optimizer outside of the graph; or turn snapshots off "
    "(`checkpoint: {memory: {interval: 0}}`)"
)
"""Why no snapshots are taken where nobody says when the state changes."""

Readiness = Literal["ready", "busy", "unable"]


@dataclass(slots=True)
class _Draft:
    """A snapshot being written."""

    label: Label
    entries: list[Entry]
    blobs: dict[str, bytes]
    work: CopyWork
    write: PendingWrite | None
    """It is to be written to disk."""
    slot: int | None = None
    """The slot that it goes to, once that is open."""


@dataclass(slots=True)
class _Step:
    """The current step."""

    copied: bool = False
    """A snapshot was begun in it."""
    spent: float = 0.0
    """Seconds that the training thread had spent on snapshots before it."""
    used: float = 0.0
    """Processor seconds of this process before it, without those of copies."""


class Snapshotter:
    """Takes one rank's snapshots."""

    def __init__(  # noqa: PLR0915 (the state of a snapshotter)
        self,
        training: Training,
        config: SnapshotConfig,
        *,
        windows: WaitWindows | None = None,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        """*runtime*: that of the device on which *training* is; by default that of its parameters' device."""
        device = next((one.device for one in training.model.parameters()), torch.device("cpu"))
        runtime = runtime or runtime_of(device)
        self._training, self._config = training, config
        self._waits = windows or process_waits()
        self._copier = Copier(self._waits, runtime)
        self._slots: list[Slot] = []
        self._sealed: dict[int, tuple[int, int]] = {}
        """Slot to step and lineage of the complete snapshot in it."""
        self._place: SnapshotPlace | None = None
        self._draft: _Draft | None = None
        self._layout: StateLayout | None = None
        self._entries: list[Entry] = []
        self._index_size = 0
        """Bytes of the JSON of `_entries`."""
        self._tasks: list[Task] = []
        self._notify_socket = notification.notify_socket()
        self._reporter = StorageErrorReporter()
        self._not_before = 0
        self._write: PendingWrite | None = None
        self._lag_reported = False
        self.replicas_behind = False
        """Replicas of some rank are behind: the replicated snapshot must not be overwritten, so no other one is begun."""
        self.planning = StepMeasurements(replace(config.limits, concurrent=runtime is not None))
        self.every = max(1, config.limits.every)
        """Steps between two snapshots, agreed by all ranks."""
        self.control = 0
        """Steps between control steps, agreed by all ranks; 0: none."""
        self._step, self._delay = _Step(), RunDelay()
        self.lineage = 0
        self.counts = SnapshotCounts()
        self.newest: StepTrace | None = None
        """The newest step that is over."""
        self.spans: list[tuple[float, float, bool]] = []
        """Periods of copying the newest snapshot: begin, end (`time.perf_counter`), and whether training waited."""
        self._tail = 0.0
        """Seconds for which the newest snapshot held up training when the state was about to change."""
        self._tail_copied = 0.0
        """Seconds of copying in them."""
        self.enabled = True
        """Benchmarks turn it off for single steps."""
        self._announced = False
        """The newest change of the state was announced by an optimizer."""
        self._sample: StateSample | None = None
        """Some of the state as it must be until the next change is announced; None where nothing depends on that."""
        self._flats: list[Tensor] = []
        """The memory of the layout's tensors."""
        self.why = ""
        """Why it takes no snapshots now."""
        for optimizer in training.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.before_change())

    def close(self) -> None:
        """Take no more snapshots; complete ones stay."""
        self.give_up()
        self._close_slots()
        self._notify_socket.close()
        self._delay.close()

    # -- place and slots ------------------------------------------------------------------------------------------------

    def set_place(self, place: SnapshotPlace, lineage: int) -> None:
        """Take snapshots as *place* from now on."""
        self.lineage = lineage
        if place == self._place:
            return
        self.give_up()
        moved = self._place is None or (place.rank, place.world) != (self._place.rank, self._place.world)
        self._place, self._layout = place, None
        self.planning.reset()
        if moved:
            self._close_slots()

    def _close_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots, self._sealed = [], {}

    def _open_slots(self, place: SnapshotPlace) -> None:
        """Open this rank's files; complete snapshots of an earlier process stay until their turn comes."""
        known = shared_memory.labels(self._config.memstore)
        while len(self._slots) < SLOTS or self._path_of(place, len(self._slots)) in known:
            path = self._open_slot(place)
            if path in known:
                self._sealed[len(self._slots) - 1] = known[path].moment

    def _open_slot(self, place: SnapshotPlace) -> Path:
        path = self._path_of(place, len(self._slots))
        self._slots.append(Slot(path, on_map=self._copier.slices.pin, on_unmap=self._copier.slices.unpin))
        write_requests.drop(path)  # of an earlier process: the checkpoint writer may never have received it
        return path

    def _path_of(self, place: SnapshotPlace, number: int) -> Path:
        return self._config.memstore / store_folders.own_name(place.rank, number)

    def _free_slot(self) -> int | None:
        """Return a slot that holds none of the newest two complete snapshots, and that is neither read nor to be written to disk."""
        newest = sorted(self._sealed, key=lambda number: self._sealed[number])[-3 if self.replicas_behind else -2 :]
        pending = [number for number, slot in enumerate(self._slots) if number not in newest and write_requests.is_pending(slot.path)]
        free = (number for number, slot in enumerate(self._slots) if number not in (*newest, *pending) and not slot.busy())
        found = next(free, None)
        if found is None and (pending or self.replicas_behind) and len(self._slots) == SLOTS:
            assert self._place is not None
            self._open_slot(self._place)
            return SLOTS
        return found

    def _check_limit(self, number: int, label: Label) -> None:
        """Raise ``OSError`` when slot *number*, and those never written so far, would exceed the memory limit of the node.

        What an earlier process has left in these files counts as used.
        """
        limit, need = self._config.max_bytes, shared_memory.PAGE + label.size + label.tail
        growing = [slot for at, slot in enumerate(self._slots) if at == number or not len(slot.data)]
        missing = sum(max(0, need - slot.path.stat().st_size) for slot in growing) if limit else 0
        if not missing:
            return
        used = store_folders.usage(self._config.memstore)
        if used + missing > limit:
            raise OSError(
                None,
                f"{missing >> 20} MiB more would exceed the node's limit of {limit >> 20} MiB, of which {used >> 20} MiB are used. "
                "Raise checkpoint.memory.max_memory, or shard the optimizer",
            )

    # -- a step ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Record the step before: its length, its windows, and what a snapshot cost. Look whether the state has changed unannounced."""
        began = self._waits.step_began
        took, windows, operations = self._waits.begin_step()
        self.counts.steps += 1
        used = time.process_time() - self.counts.copied
        if self.counts.steps > 1:
            self.counts.trained += took
            if not self.enabled:
                self.planning.overhead.interrupt()
            else:
                delay = self._delay.since()
                self.planning.add_step(took, windows, copied=self._step.copied, delay=delay, used=used - self._step.used)
            found = self.planning.overhead.measured if self._step.copied else None
            spent = self.counts.paused + self.counts.prepared - self._step.spent
            # As measured, and at least what the training thread itself has spent.
            self.counts.slowed += max(0.0, spent, found.seconds if found is not None else 0.0)
            copies = [(begin - began, end - began, waited) for begin, end, waited in self.spans if end > began]
            operations = operations[:MAX_OPERATIONS]
            self.newest = StepTrace(began=time.time() - took, took=took, windows=windows, operations=operations, copies=copies)
        self._step = _Step(spent=self.counts.paused + self.counts.prepared, used=used)
        self._look_for_change()

    def _look_for_change(self) -> None:
        """Discard the newest snapshot if the state has changed and no optimizer has announced it: it may be torn.

        A step may well change nothing: an accumulation of gradients goes on, or a scaler of gradients skips it.
        """
        if self._copier.slices.is_capturing():  # what is launched now does not run
            return
        sample = self._sample
        if sample is not None and sample.has_changed():
            self.counts.given_up += sample.moment is not None
            self.give_up()
            self._announced = False
            self._withdraw(sample.moment)
            if not self.why:
                _log.warning("no snapshots in memory: %s", UNANNOUNCED)
            self.why = UNANNOUNCED
        elif sample is None and not self._announced and not self.why and self.counts.steps > 1:  # the first step's begin restores
            self._sample = StateSample.of(self._state_tensors())

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from self._training.model.parameters()
        for optimizer in self._training.optimizers:
            yield from (one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor))

    def _withdraw(self, moment: tuple[int, int] | None) -> None:
        """Discard the complete snapshot of *moment*, step and lineage, if there is one."""
        number = next((number for number, sealed in self._sealed.items() if sealed == moment), None)
        if number is None:
            return
        del self._sealed[number]
        write_requests.drop(self._slots[number].path)
        self._slots[number].discard()
        labels, own = shared_memory.labels(self._config.memstore), {slot.path for slot in self._slots}
        newest = max((label for path, label in labels.items() if path in own), key=lambda label: label.moment, default=None)
        self.counts.newest, self.counts.newest_at = (None, None) if newest is None else (newest.step, newest.time)

    def due(self, step: int) -> bool:
        """Return whether a snapshot of the state after *step* is to be taken now."""
        requested = self._write is not None and self._write.step == step
        skipped = step % self.every or is_control(step, self.every, self.control)
        if not self._can_take(step) or (skipped and not requested):
            return False
        if self._draft is not None and not requested and not self._copier.slices.is_capturing():  # which `take` refuses
            return False  # no optimizer has stepped since: the state is the same, and is being copied
        if (step, self.lineage) in self._sealed.values():  # an attempt that was rejected begins the same step again
            return False
        if self.replicas_behind and not requested:
            self._count_skipped(step)
            return False
        return True

    def _count_skipped(self, step: int) -> None:
        self.counts.skipped += 1
        if self.counts.skipped >= REPORT_SKIPPED and not self._lag_reported and self.behind():  # only the slow ranks report it
            self._lag_reported = True
            slow = "replicas do not reach the other node as fast as snapshots are taken"
            why = f"{self.counts.skipped} snapshots were skipped by step {step}: {slow}"
            self._reporter.report(StorageError("replica-lag", why), step, self._config.memstore)

    def behind(self) -> bool:
        """Return whether the next snapshot would overwrite the last one that is complete on another node.

        The newest two complete ones stay while the next is written. If the older of them is replicated, a lost node and all survivors
        have a step in common. The same must hold on all ranks, so they exchange this in their vote.
        """
        newest = sorted(self._sealed.values())[-2:]
        if len(newest) < 2 or self._place is None:  # noqa: PLR2004 (two)
            return False
        there = notification.replicated(self._config.memstore, self._place.rank)
        return there is not None and there < newest[0]

    def _can_take(self, step: int) -> bool:
        return self._place is not None and self.enabled and self._announced and step >= max(self._not_before, copy_schedule.PROFILE)

    def readiness(self, step: int) -> Readiness:
        """Return whether the snapshot of *step* could be written to disk; ``busy`` while the one before is being written."""
        served = self._config.has_writer and link().attached and not write_requests.is_closed(self._config.memstore)
        if not served or not self._can_take(step):
            return "unable"
        if any(write_requests.is_pending(slot.path) for slot in self._slots):
            return "busy"
        if not self._slots:
            return "unable"
        limit, size = self._config.max_bytes, max(len(slot.data) for slot in self._slots)
        has_room = len(self._slots) > SLOTS or not limit or store_folders.usage(self._config.memstore) + size <= limit
        return "ready" if has_room else "unable"

    def request_write(self, write: PendingWrite) -> None:
        """Have the next snapshot, which is that of the requested step, written to disk."""
        self._write = write

    @property
    def write_pending(self) -> bool:
        """Whether a snapshot that is to be written to disk is not complete yet."""
        return self._write is not None or (self._draft is not None and self._draft.write is not None)

    def take(self, step: int, rank_state: bytes, small: Mapping[str, Tensor]) -> None:
        """Begin a snapshot of the state after *step*, which is `due`; *small*: tensors that may change before the next step is applied.

        The training thread copies only what may change at any moment. The slot is opened with the first slice, while training waits.
        Raise `CapturedStep` where a CUDA graph is captured.
        """
        if self._copier.slices.is_capturing():
            raise CapturedStep("the beginning of a step")
        self.finish()  # of an earlier step, after which the state has not changed
        begin, place, self._step.copied = time.perf_counter(), self._place, True
        assert place is not None
        tasks = self._make_tasks(place)
        assert self._layout is not None
        blobs = {"static": self._layout.static, "dynamic": self._layout.dynamic(small), "rank_state": rank_state}
        size = sum(task.size for task in tasks)
        label = Label(
            step=step,
            lineage=self.lineage,
            rank=place.rank,
            world=place.world,
            shard=place.shard,
            part=place.part,
            parts=place.parts,
            size=size,
            slice_bytes=shared_memory.SLICE_BYTES,
            time=time.time(),
            tail=shared_memory.tail_limit(size, self._index_size, blobs),
        )
        write, self._write = self._write, None
        plan = self.planning.plan_for([task.size for task in tasks])
        work = CopyWork(tasks, self._open_target, self._on_progress, self._on_end, gate=plan.gate, spread=plan.spread)
        self._draft = _Draft(label, self._entries, blobs, work, write if write is not None and write.step == step else None)
        self._sample = StateSample(self._flats, label.moment)
        self._copier.begin(work)
        self.counts.prepared += time.perf_counter() - begin

    def _make_tasks(self, place: SnapshotPlace) -> list[Task]:
        """Return the slices of this rank's part; the same as last time unless a tensor has moved."""
        if self._layout is not None and self._layout.fits():
            return self._tasks
        self._layout = StateLayout(self._training)
        flats = self._flats = [bytes_of(one) for one in self._layout.tensors.values()]
        self._entries = []
        for (key, one), data in zip(self._layout.tensors.items(), flats, strict=True):
            local = local_of(one)
            shape, strides = tuple(local.shape), tuple(local.stride())
            dtype = str(one.dtype).removeprefix("torch.")
            self._entries.append(Entry(key, shape, dtype, data.numel(), () if strides == contiguous(shape) else strides))
        self._index_size = len(json.dumps(self._entries))
        self._tasks, offset = [], 0
        for spanned in shared_memory.slices_of_part([entry.size for entry in self._entries], place.part, place.parts):
            size = sum(one.length for one in spanned)
            self._tasks.append(Task(tuple(flats[one.tensor][one.begin : one.begin + one.length] for one in spanned), offset, size))
            offset += size
        return self._tasks

    def before_change(self) -> None:
        """Complete the current snapshot before an optimizer's step; raise `CapturedStep` where the step does not run now.

        In a captured step this would run once, and never at a replay: the copies of later snapshots would be torn, with right checksums.
        """
        if self._copier.slices.is_capturing():
            raise CapturedStep("`optimizer.step()`")
        self.finish()
        self._announced, self._sample, self.why = True, None, ""

    def finish(self) -> None:
        """Complete the current snapshot: the state is about to change."""
        draft = self._draft
        if draft is None:
            return
        limits = self._config.limits
        seconds = limits.pause if limits.policy == "pause" else None
        self._copier.slices.begin_pause()
        complete = self._copier.finish(seconds if draft.write is None else None)
        self._tail, self._tail_copied = self._copier.slices.pause(), draft.work.tail
        self.counts.paused += self._tail
        self._draft = None
        if not complete:
            self.counts.given_up += 1
            self._discard(draft)
            return
        self._account(draft.work)
        if not self._tail:
            self._count_as_overlapped()
        self.planning.pauses.append(self._tail)
        if draft.write is not None:
            self._write_to_disk(draft, draft.write)

    def _write_to_disk(self, draft: _Draft, write: PendingWrite) -> None:
        """Request that a complete snapshot is written to disk; what was copied outside of idle time is part of the pause for it."""
        assert draft.slot is not None
        label, slot = draft.label, self._slots[draft.slot]
        request = WriteRequest(
            snapshot=slot.path.name,
            step=label.step,
            lineage=label.lineage,
            rank=label.rank,
            world=label.world,
            generation=link().generation,
            directory=str(write.directory),
            keep=write.keep,
            loss=write.loss,
            paused=write.paused + self._tail,
            bandwidth=self._config.bandwidth,
        )
        try:
            request.write(self._config.memstore)
        except OSError as error:
            failure = StorageError("snapshot-no-memory", f"no checkpoint from memory: {error.strerror}")
            self._reporter.report(failure, label.step, write.directory)
        else:
            link().request_write()

    def waited(self, seconds: float) -> None:
        """Record how long this rank waited for the others after `finish`: if it did, its last copies delayed no other rank."""
        if self._tail and seconds >= NOTICEABLE:
            self.counts.paused -= self._tail
            self.planning.pauses[-1] = 0.0
            self._count_as_overlapped()
        self._tail = 0.0

    def _count_as_overlapped(self) -> None:
        """Count the last copies of the newest snapshot as those that were made while training waited, or computed: they held up nothing."""
        self.counts.overlapped += self._tail_copied
        self.spans = [(begin, end, True) for begin, end, _ in self.spans]

    def give_up(self) -> None:
        """Give up the current snapshot: the state is about to be replaced."""
        draft, self._draft, self._sample = self._draft, None, None
        if draft is not None:
            self._copier.give_up()
            if draft.work.done:
                self._account(draft.work)
            else:
                self._discard(draft)

    def _discard(self, draft: _Draft) -> None:
        if draft.slot is not None:
            self._slots[draft.slot].discard()

    def _account(self, work: CopyWork) -> None:
        counts, size = self.counts, sum(task.size for task in work.tasks)
        counts.copied += work.seconds
        counts.overlapped += work.overlapped
        counts.size = size
        self.planning.add_copy(size, work.seconds)
        self.spans = work.spans

    # -- in the copying thread ------------------------------------------------------------------------------------------

    def _open_target(self, work: CopyWork) -> Tensor | None:
        """Open a slot for the current snapshot; return its data, or None when no slot is available."""
        draft, place = self._draft, self._place
        if draft is None or draft.work is not work:
            return None
        assert place is not None
        try:
            if not self._slots:
                self._open_slots(place)
            number = self._free_slot()
            if number is None:
                return None
            self._check_limit(number, draft.label)
            self._sealed.pop(number, None)
            self._slots[number].begin(draft.label)
        except BlockingIOError:  # a reader has opened the file just now
            return None
        except OSError as error:
            self._report_no_memory(draft, error)
            self._not_before = draft.label.step + RETRY_STEPS
            return None
        draft.slot = number
        notification.notify(self._config.memstore, self._notify_socket)
        return slot_tensor(self._slots[number].data)

    def _report_no_memory(self, draft: _Draft, error: OSError) -> None:
        failure = StorageError("snapshot-no-memory", f"no snapshots in memory: {error.strerror or error}")
        self._reporter.report(failure, draft.label.step, self._config.memstore)

    def _on_progress(self, size: int) -> None:
        draft = self._draft
        if draft is not None and draft.slot is not None:
            self._slots[draft.slot].progress(size)
            notification.notify(self._config.memstore, self._notify_socket)

    def _on_end(self, work: CopyWork) -> None:
        """Seal the snapshot: everything is copied."""
        draft = self._draft
        if draft is None or draft.slot is None or draft.work is not work:
            return
        try:
            self._slots[draft.slot].seal(draft.label, work.sums, draft.entries, draft.blobs)
        except OSError as error:
            work.given_up, work.done = True, False
            self._report_no_memory(draft, error)
            return
        self._sealed[draft.slot] = draft.label.moment
        self.counts.taken += 1
        self.counts.newest, self.counts.newest_at = draft.label.step, draft.label.time
        notification.notify(self._config.memstore, self._notify_socket)
