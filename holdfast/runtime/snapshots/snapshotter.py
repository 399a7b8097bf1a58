"""Take snapshots of one rank's training: what, when, into which slot.

From the end of one step to the moment when the next is applied nothing changes parameters and optimizer state: that is when they are
copied. All that may change sooner (buffers, generators, the position in the data, whatever is small) is taken at once.

A rank ends its snapshot of step k before it votes for step k + 1. So if any rank has applied that step, all have step k whole: a fault
costs one step at most. (Where there is no vote, before it applies the step: then it may be one more.) Three slots take turns: the one in
work, and the newest two whole ones; so even where there is no vote all ranks have one step in common, for who overwrites step k - 2 has
heard from all others since they applied step k - 1.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from holdfast.memstore import notification, shared_memory, store_folders, write_requests
from holdfast.memstore.file_names import own_name
from holdfast.memstore.replication_progress import replicated
from holdfast.memstore.shared_memory import Entry, Label, Slot
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.snapshots import copy_schedule
from holdfast.runtime.snapshots.config import SnapshotConfig, SnapshotPlace, WriteWish
from holdfast.runtime.snapshots.contention import RunDelay
from holdfast.runtime.snapshots.copier import Copier, CopyWork, Task, slot_tensor
from holdfast.runtime.snapshots.measurements import StepMeasurements
from holdfast.runtime.snapshots.overhead import is_control
from holdfast.runtime.snapshots.stats import Lived, SnapshotCounts
from holdfast.runtime.state.state_layout import StateLayout
from holdfast.runtime.state.tensors import bytes_of, local_of
from holdfast.runtime.state.training import Training
from holdfast.runtime.telemetry.wait_windows import WaitWindows, process_waits
from holdfast.tensor_layout import contiguous

SLOTS: Final = 3
"""Files of a rank; there is one more while one of them is being written to disk."""
HELD: Final = 10
"""Snapshots left out for slow replicas from which on it is worth a word."""
AGAIN: Final = 100
"""Steps after which it is tried again when there was no memory."""
NOTICEABLE: Final = 3e-4
"""Seconds; who waits for so long for the others' votes was not the last to vote."""
OPERATIONS: Final = 2000
"""Operations of a step that are kept."""


Readiness = Literal["ready", "busy", "unable"]


@dataclass(slots=True)
class _Draft:
    """A snapshot in work."""

    label: Label
    entries: list[Entry]
    blobs: dict[str, bytes]
    work: CopyWork
    wish: WriteWish | None
    """It is to be put on disk."""
    slot: int | None = None
    """The slot that it goes to, once that is open."""


@dataclass(slots=True)
class _Step:
    """The step in work."""

    copied: bool = False
    """A snapshot was begun in it."""
    spent: float = 0.0
    """Seconds of the training thread for snapshots before it began."""
    used: float = 0.0
    """Seconds of processors that this process had used by then, without those of copies."""


def _bell() -> socket.socket:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)  # noqa: FBT003 (its only argument)
    return bell


class Snapshotter:
    """Takes one rank's snapshots."""

    def __init__(self, training: Training, config: SnapshotConfig, *, windows: WaitWindows | None = None) -> None:
        device = next((one.device for one in training.model.parameters()), torch.device("cpu"))
        self._training, self._config = training, config
        self._idle = windows or process_waits()
        self._copier = Copier(self._idle, device=device)
        self._slots: list[Slot] = []
        self._sealed: dict[int, tuple[int, int]] = {}
        """Slot to the moment of the whole snapshot in it."""
        self._place: SnapshotPlace | None = None
        self._draft: _Draft | None = None
        self._outline: StateLayout | None = None
        self._entries: list[Entry] = []
        self._index = 0
        """Bytes of their JSON."""
        self._tasks: list[Task] = []
        self._bell = _bell()
        self._teller = StorageErrorReporter()
        self._not_before = 0
        self._wish: WriteWish | None = None
        self._lag_told = False
        self.held = False
        """Some rank's replicas are behind: the snapshot that they have is not to be overwritten, so no other one is begun."""
        self.planning = StepMeasurements(replace(config.terms, beside=device.type == "cuda"))
        self.every = max(1, config.terms.every)
        """Steps between two snapshots, as the ranks have agreed."""
        self.control = 0
        """Every how many steps some are left without a snapshot to compare with, as the ranks have agreed; 0: never."""
        self._present, self._delay = _Step(), RunDelay()
        self.lineage = 0
        self.counts = SnapshotCounts()
        self.newest: Lived | None = None
        """The newest step that is over."""
        self.spans: list[tuple[float, float, bool]] = []
        """When the newest snapshot was copied: begin, end (`time.perf_counter`), and whether training waited."""
        self._tail = 0.0
        """Seconds of the training thread to end the newest snapshot."""
        self._tail_copied = 0.0
        """Seconds of copying in them."""
        self.enabled = True
        """Benchmarks turn it off for single steps."""
        for optimizer in training.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.finish())

    def close(self) -> None:
        """Take no more; what is whole stays."""
        self.give_up()
        self._leave_slots()
        self._bell.close()
        self._delay.close()

    # -- where ----------------------------------------------------------------------------------------------------------

    def sit(self, place: SnapshotPlace, lineage: int) -> None:
        """Take snapshots as *place* from now on."""
        self.lineage = lineage
        if place == self._place:
            return
        self.give_up()
        moved = self._place is None or (place.rank, place.world) != (self._place.rank, self._place.world)
        self._place, self._outline = place, None
        self.planning.forget()
        if moved:
            self._leave_slots()

    def _leave_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots, self._sealed = [], {}

    def _open_slots(self, place: SnapshotPlace) -> None:
        """Open this rank's files; what a process before has left whole in them stays until its turn comes."""
        known = shared_memory.labels(self._config.memstore)
        while len(self._slots) < SLOTS or self._path_of(place, len(self._slots)) in known:
            path = self._open_slot(place)
            if path in known:
                self._sealed[len(self._slots) - 1] = known[path].moment

    def _open_slot(self, place: SnapshotPlace) -> Path:
        path = self._path_of(place, len(self._slots))
        self._slots.append(Slot(path))
        write_requests.drop(path)  # of a process before: who was to carry it out may never have heard of it
        return path

    def _path_of(self, place: SnapshotPlace, number: int) -> Path:
        return self._config.memstore / own_name(place.rank, number)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a step begins: what the one before was like."""
        began = self._idle.step_began
        took, windows, operations = self._idle.begin_step()
        self.counts.steps += 1
        used = time.process_time() - self.counts.copied
        if self.counts.steps > 1:
            self.counts.trained += took
            if not self.enabled:
                self.planning.overhead.interrupt()
            else:
                self.planning.lived(took, windows, copied=self._present.copied, delay=self._delay.since(), used=used - self._present.used)
            found = self.planning.overhead.measured if self._present.copied else None
            spent = self.counts.paused + self.counts.prepared - self._present.spent
            # As measured, and at least what the training thread itself has spent.
            self.counts.slowed += max(0.0, spent, found.seconds if found is not None else 0.0)
            copies = [(begin - began, end - began, waited) for begin, end, waited in self.spans if end > began]
            self.newest = Lived(began=time.time() - took, took=took, windows=windows, operations=operations[:OPERATIONS], copies=copies)

        self._present = _Step(spent=self.counts.paused + self.counts.prepared, used=used)

    def due(self, step: int) -> bool:
        """Tell whether it is time for a snapshot of the state after *step*."""
        wished = self._wish is not None and self._wish.step == step
        left_out = step % self.every or is_control(step, self.every, self.control)
        if self._place is None or not self.enabled or (left_out and not wished) or step < self._first:
            return False
        if (step, self.lineage) in self._sealed.values():  # an attempt that did not count begins the same step again
            return False
        if self.held and not wished:
            self._hold(step)
            return False
        return True

    def _hold(self, step: int) -> None:
        self.counts.held += 1
        if self.counts.held >= HELD and not self._lag_told and self.behind():  # all ranks wait; those that are waited for tell of it
            self._lag_told = True
            slow = "replicas do not reach the other node as fast as snapshots are taken"
            why = f"{self.counts.held} snapshots were left out by step {step}: {slow}"
            self._teller.tell(StorageError("replica-behind", why), step, self._config.memstore)

    def behind(self) -> bool:
        """Tell whether the next snapshot would take the place of the last one that is whole on another node.

        The two newest whole ones stay while the next is written. If the older of them is replicated, a node that is lost and all that live
        have a step in common. The same must hold on all ranks, so they ask this in their vote.
        """
        newest = sorted(self._sealed.values())[-2:]
        if len(newest) < 2 or self._place is None:  # noqa: PLR2004 (two)
            return False
        there = replicated(self._config.memstore, self._place.rank)
        return there is not None and there < newest[0]

    @property
    def _first(self) -> int:
        return max(self._not_before, copy_schedule.PROFILE)

    def readiness(self, step: int) -> Readiness:
        """Tell whether the snapshot of *step* could be written to disk out of memory: not while the one before still is."""
        served = self._config.has_writer and link().attached and not write_requests.is_closed(self._config.memstore)
        if not served or self._place is None or not self.enabled or step < self._first:
            return "unable"
        if any(write_requests.is_wanted(slot.path) for slot in self._slots):
            return "busy"
        if not self._slots:
            return "unable"
        limit, size = self._config.limit, max(len(slot.data) for slot in self._slots)
        roomy = len(self._slots) > SLOTS or not limit or store_folders.usage(self._config.memstore) + size <= limit
        return "ready" if roomy else "unable"

    def wish(self, wish: WriteWish) -> None:
        """Have the next snapshot, which is the one of the wish's step, put on disk."""
        self._wish = wish

    @property
    def owes(self) -> bool:
        """Tell whether a snapshot that is wanted on disk is not whole yet."""
        return self._wish is not None or (self._draft is not None and self._draft.wish is not None)

    def take(self, step: int, rank_state: bytes, small: Mapping[str, Tensor]) -> None:
        """Begin a snapshot of the state after *step*, which is `due`; *small*: tensors that may change before the next step is applied.

        Training is kept from its work only for what may change at any moment. The slot is opened when the first slice is copied, which is
        when training waits.
        """
        begin, place, self._present.copied = time.perf_counter(), self._place, True
        assert place is not None
        tasks = self._laid_out(place)
        assert self._outline is not None
        blobs = {"static": self._outline.static, "dynamic": self._outline.dynamic(small), "rank_state": rank_state}
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
            cut=shared_memory.SLICE_BYTES,
            time=time.time(),
            tail=shared_memory.tail_limit(size, self._index, blobs),
        )
        wish, self._wish = self._wish, None
        plan = self.planning.plan_for([task.size for task in tasks])
        work = CopyWork(tasks, self._opened, self._news, self._ended, gate=plan.gate, beside=plan.beside)
        self._draft = _Draft(label, self._entries, blobs, work, wish if wish is not None and wish.step == step else None)
        self._copier.begin(work)
        self.counts.prepared += time.perf_counter() - begin

    def _laid_out(self, place: SnapshotPlace) -> list[Task]:
        """Return the slices of this rank's part; the same as last time unless a tensor has moved."""
        if self._outline is not None and self._outline.fits():
            return self._tasks
        self._outline = StateLayout(self._training)
        flats = [bytes_of(one) for one in self._outline.tensors.values()]
        self._entries = [
            Entry(key, tuple(local_of(one).shape), str(one.dtype).removeprefix("torch."), data.numel(), _strides(local_of(one)))
            for (key, one), data in zip(self._outline.tensors.items(), flats, strict=True)
        ]
        self._index = len(json.dumps(self._entries))
        tasks, there = [], 0
        for met in shared_memory.slices_of_part([entry.size for entry in self._entries], place.part, place.parts):
            size = sum(one.length for one in met)
            tasks.append(Task(tuple(flats[one.tensor][one.begin : one.begin + one.length] for one in met), there, size))
            there += size
        self._tasks = tasks
        return tasks

    def _free_slot(self) -> int | None:
        """Return a slot that holds neither of the newest two whole snapshots, and that nobody reads or is still to read."""
        newest = sorted(self._sealed, key=lambda number: self._sealed[number])[-3 if self.held else -2 :]
        kept = [number for number, slot in enumerate(self._slots) if number not in newest and write_requests.is_wanted(slot.path)]
        free = (number for number, slot in enumerate(self._slots) if number not in (*newest, *kept) and not slot.busy())
        found = next(free, None)
        if found is None and (kept or self.held) and len(self._slots) == SLOTS:
            assert self._place is not None
            self._open_slot(self._place)
            return SLOTS
        return found

    def _check_limit(self, number: int, label: Label) -> None:
        """Refuse to take more memory than the node may give: for the slot *number*, and for those that were never written.

        What a process before has left in these files is part of what is used.
        """
        limit, need = self._config.limit, shared_memory.PAGE + label.size + label.tail
        growing = [slot for place, slot in enumerate(self._slots) if place == number or not len(slot.data)]
        missing = sum(max(0, need - slot.path.stat().st_size) for slot in growing) if limit else 0
        if not missing:
            return
        used = store_folders.usage(self._config.memstore)
        if used + missing > limit:
            raise OSError(
                None,
                f"{missing >> 20} MiB more would exceed the node's limit of {limit >> 20} MiB, of which {used >> 20} MiB are used. "
                "Raise checkpoint.memory.limit, or shard the optimizer",
            )

    def finish(self) -> None:
        """Have the snapshot in work end: the state is about to change."""
        draft = self._draft
        if draft is None:
            return
        begin = time.perf_counter()
        terms = self._config.terms
        seconds = terms.pause if terms.policy == "pause" else None
        whole = self._copier.finish(seconds if draft.wish is None else None)
        self._tail, self._tail_copied = time.perf_counter() - begin, draft.work.tail
        self.counts.paused += self._tail
        self._draft = None
        if not whole:
            self.counts.given_up += 1
            self._discard(draft)
            return
        self._account(draft.work)
        self.planning.pauses.append(self._tail)
        if draft.wish is not None:
            self._request_write(draft, draft.wish)

    def _request_write(self, draft: _Draft, wish: WriteWish) -> None:
        """Have a whole snapshot put on disk; what was to be copied beyond the idle time is part of what that costs."""
        assert draft.slot is not None
        label, slot = draft.label, self._slots[draft.slot]
        request = WriteRequest(
            snapshot=slot.path.name,
            step=label.step,
            lineage=label.lineage,
            rank=label.rank,
            world=label.world,
            generation=link().generation,
            directory=str(wish.directory),
            keep=wish.keep,
            loss=wish.loss,
            stood=wish.stood + self._tail,
            bandwidth=self._config.bandwidth,
        )
        try:
            request.write(self._config.memstore)
        except OSError as error:
            self._teller.tell(
                StorageError("snapshot-no-memory", f"no checkpoint out of memory: {error.strerror}"), label.step, wish.directory
            )
        else:
            link().want_written()

    def waited(self, seconds: float) -> None:
        """Learn how long this rank waited for the others after `finish`: if it did, what it copied last has kept nobody waiting."""
        if self._tail and seconds >= NOTICEABLE:
            self.counts.paused -= self._tail
            self.planning.pauses[-1] = 0.0
            self.counts.overlapped += self._tail_copied
            self.spans = [(begin, end, True) for begin, end, _ in self.spans]
        self._tail = 0.0

    def give_up(self) -> None:
        """Give up the snapshot in work: the state is about to be replaced."""
        draft, self._draft = self._draft, None
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
        self.planning.measured(size, work.seconds)
        self.spans = work.spans

    # -- in the copying thread ------------------------------------------------------------------------------------------

    def _opened(self, work: CopyWork) -> Tensor | None:
        """Open a slot for the snapshot in work; return its data, or nothing where none can be had."""
        draft = self._draft
        if draft is None or draft.work is not work:
            return None
        try:
            return self._open(draft)
        except BlockingIOError:  # a reader came in this very moment
            return None
        except OSError as error:
            self._no_memory(draft, error)
            self._not_before = draft.label.step + AGAIN
            return None

    def _open(self, draft: _Draft) -> Tensor | None:
        place = self._place
        assert place is not None
        if not self._slots:
            self._open_slots(place)
        number = self._free_slot()
        if number is None:
            return None
        self._check_limit(number, draft.label)
        self._sealed.pop(number, None)
        self._slots[number].begin(draft.label)
        draft.slot = number
        notification.notify(self._config.memstore, self._bell)
        return slot_tensor(self._slots[number].data)

    def _no_memory(self, draft: _Draft, error: OSError) -> None:
        trouble = StorageError("snapshot-no-memory", f"no snapshots in memory: {error.strerror or error}")
        self._teller.tell(trouble, draft.label.step, self._config.memstore)

    def _news(self, size: int) -> None:
        draft = self._draft
        if draft is not None and draft.slot is not None:
            self._slots[draft.slot].progress(size)
            notification.notify(self._config.memstore, self._bell)

    def _ended(self, work: CopyWork) -> None:
        """Seal the snapshot: all is copied."""
        draft = self._draft
        if draft is None or draft.slot is None or draft.work is not work:
            return
        try:
            self._slots[draft.slot].seal(draft.label, work.sums, draft.entries, draft.blobs)
        except OSError as error:
            work.given_up, work.done = True, False
            self._no_memory(draft, error)
            return
        self._sealed[draft.slot] = draft.label.moment
        self.counts.taken += 1
        self.counts.newest, self.counts.newest_at = draft.label.step, draft.label.time
        notification.notify(self._config.memstore, self._bell)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of *tensor*; none where they are those of any contiguous one."""
    strides = tuple(tensor.stride())
    return () if strides == contiguous(tensor.shape) else strides
