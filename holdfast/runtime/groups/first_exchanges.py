"""What the ranks exchanged before their first step: recorded by every rank, kept by others, and replayed to a process that takes its place.

A process that takes a rank over runs the beginning of the script alone. Every operation that it begins there is answered with what the rank
before it received in the same place, so that it goes on with the values that the living ranks have. What cannot be answered so is refused:
then all ranks start again.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.runtime.state import tree

MOST: Final = 16 * 2**20
"""Bytes of results that a rank records; of what is larger only the place is known."""
SMALL: Final = 64 * 2**10
"""Bytes of inputs up to which they are compared with those of the process before."""
MOST_NOTES: Final = 20

OBJECTS: Final = frozenset({
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"),
})  # fmt: skip
_PADDED: Final = frozenset({"all_gather_object", "gather_object", "scatter_object_list"})
"""Functions of torch that send pickles padded with whatever lies in memory: their inputs cannot be compared."""

Ended = Callable[..., None]


class NotRepeatable(RuntimeError):
    """A process that takes a rank over cannot be given what the ranks exchanged before their first step."""


@dataclass(slots=True)
class RecordedExchange:
    """One operation as one rank saw it."""

    key: str
    values: list[Tensor] | None
    """What was in its outputs afterwards; for the root of a broadcast, what it sent. None: not recorded."""
    given: str = ""
    """A digest of what the rank put in, where that can be compared."""
    source: int = 0
    """Who sent, for an operation that takes from anybody."""
    lost: str = ""
    """Why it cannot be replayed; empty where it can be, or need not be, as the session restores what it brought."""
    where: str = ""
    """The script's line that began it."""
    claims: list[StorageWeakRef] = field(default_factory=list)
    """The memory that holds its results: whether the session restores it is known later."""


@dataclass(slots=True)
class FirstExchanges:
    """The record of one rank."""

    born: int
    """The generation in which the ranks began together."""
    entries: list[list[RecordedExchange]]
    """By the place of the group among the rank's groups, in the order of the operations."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        rows = [[[one.key, one.values, one.given, one.source, one.lost, one.where] for one in entries] for entries in self.entries]
        return tree.pickled({"born": self.born, "entries": rows})

    @classmethod
    def of(cls, data: bytes) -> FirstExchanges:
        """Return the record in *data*; code in it is refused."""
        told = tree.unpickled(data)
        return cls(int(told["born"]), [[RecordedExchange(*row) for row in rows] for rows in told["entries"]])

    def digest(self) -> str:
        """Return a digest of all results: two ranks with the same one were given the same."""
        told = hashlib.sha256()
        for place, entries in enumerate(self.entries):
            for one in entries:
                key = one.key.replace("broadcast!", "broadcast", 1)  # its root has what the others are given
                told.update(f"{place} {key} {one.source} {bool(one.lost)} ".encode())
                told.update(_digest(one.values or []).encode())
        return told.hexdigest()

    @property
    def lost(self) -> list[RecordedExchange]:
        """Return the operations that cannot be replayed."""
        return [one for entries in self.entries for one in entries if one.lost]


def key_of(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> str:
    """Return what an operation is recognised by: its name, and the shapes and types of its tensors."""
    shapes = ";".join(f"{tuple(one.shape)}{str(one.dtype).removeprefix('torch.')}" for one in (outputs or inputs))
    return f"{name}{'' if outputs else '!'}/{shapes}"


def results_of(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the result of an operation on this rank: the root of a broadcast has it already."""
    return outputs or (inputs if name == "broadcast" else [])


# -- recording --------------------------------------------------------------------------------------------------------

_syncing: list[Sequence[Tensor]] = []
"""The parameters and buffers that DDP is just giving to all ranks."""
_scratch: list[bool] = []
"""Whether what is exchanged now is thrown away: DDP's gradients of zero while its buckets are settled."""


def watch() -> None:
    """Know from now on which parameters and buffers DDP gives to all ranks when it is made."""
    real = dist._broadcast_coalesced  # noqa: SLF001 (the one place through which DDP does it)
    if getattr(real, "of_holdfast", False):
        return

    def broadcast_coalesced(group: Any, tensors: list[Tensor], *more: Any, **named: Any) -> Any:  # noqa: ANN401 (torch's own)
        _syncing.append(tensors)
        try:
            return real(group, tensors, *more, **named)
        finally:
            _syncing.pop()

    broadcast_coalesced.of_holdfast = True  # type: ignore[attr-defined]
    dist._broadcast_coalesced = broadcast_coalesced  # type: ignore[assignment]  # noqa: SLF001


@contextmanager
def scratch() -> Iterator[None]:
    """Exchange what is thrown away."""
    _scratch.append(True)
    try:
        yield
    finally:
        _scratch.pop()


class ExchangeRecorder:
    """Records what a rank's operations bring before its first step."""

    def __init__(self, groups: Sequence[Any], born: int) -> None:
        self._groups, self._born = groups, born
        self._entries: dict[int, list[RecordedExchange]] = {}
        self._open: list[tuple[RecordedExchange, list[Tensor]]] = []
        self._size = 0
        self._lock = threading.Lock()

    def begun(self, group: Any, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Ended | None:  # noqa: ANN401 (a ManagedGroup)
        """Take note of an operation; return what is to be called with its end."""
        results = results_of(name, outputs, inputs)
        entry = RecordedExchange(key_of(name, outputs, inputs), None, given_of(name, outputs, inputs), where=script_line())
        place = place_of(self._groups, group)
        with self._lock:
            self._entries.setdefault(place, []).append(entry)
            if not results or _scratch:
                return None
            size = sum(one.numel() * one.element_size() for one in results)
            entry.claims = [_claim(one) for one in (_syncing[-1] if _syncing else results) if one.numel()]
            if self._size + size > MOST:
                entry.lost = (
                    f"it brought {size / 2**20:.1f} MiB, and a rank records {MOST // 2**20} MiB of what was exchanged before step 1"
                )
                return None
            self._size += size
            entry.lost = "nobody waited for its end before step 1"
        synced = bool(_syncing)

        def ended(source: int = 0) -> None:
            if entry.values is None:
                entry.values, entry.source, entry.lost = [one.detach().cpu().clone() for one in results], source, ""
                if not synced:
                    entry.claims = []

        return ended

    def close(self, restored: set[int]) -> FirstExchanges:
        """End the record. What lies in memory that the session restores (*restored*) need not be kept."""
        with self._lock:
            places = range(max(self._entries, default=-1) + 1)
            entries = [self._entries.get(place, []) for place in places]
        for one in [one for some in entries for one in some if one.claims]:
            if all(not claim.expired() and claim.cdata in restored for claim in one.claims):
                one.values, one.lost = None, ""
            one.claims = []
        return FirstExchanges(self._born, entries)


def place_of(groups: Sequence[Any], group: Any) -> int:  # noqa: ANN401 (a ManagedGroup)
    """Return the place of *group* among *groups*; the one that is just being made comes next."""
    return next((place for place, one in enumerate(groups) if one is group), len(groups))


def _claim(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return what the memory of *tensors* is known by."""
    return {getattr(one, "_local_tensor", one).untyped_storage()._cdata for one in tensors}  # noqa: SLF001 (torch's own identity of a storage)


def _digest(tensors: Sequence[Tensor]) -> str:
    told = hashlib.sha256()
    for one in tensors:
        told.update(f"{tuple(one.shape)}{one.dtype}".encode())
        if one.numel():
            told.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()[:16]


def given_of(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> str:
    """Return a digest of what this rank puts into an operation; nothing where that is large, or means nothing."""
    if not inputs or (name == "broadcast" and outputs) or sum(one.numel() * one.element_size() for one in inputs) > SMALL:
        return ""
    if all(one.dtype == torch.uint8 for one in inputs) and caller() in _PADDED:
        return ""
    return _digest(inputs)


def caller() -> str:
    """Return the function for objects of torch's that begins the present operation, if one does."""
    return next((frame.f_code.co_name for frame in _frames() if frame.f_code.co_name in OBJECTS and _of_torch(frame)), "")


def script_line() -> str:
    """Return the script's own line that leads to the present operation."""
    found = next((frame for frame in _frames() if frame.f_globals.get("__name__") == "__main__"), None)
    return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (the interpreter's own)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.")


# -- replaying --------------------------------------------------------------------------------------------------------


class ReplayDiverged(Exception):
    """An operation that the record does not answer."""

    def __init__(self, why: str, *, goes_on: bool = False) -> None:
        super().__init__(why, goes_on)
        self.why, self.goes_on = why, goes_on
        """Whether the operations that follow can be answered all the same."""

    def __str__(self) -> str:
        return self.why


class ExchangeReplay:
    """Answers the operations of a process that takes a rank over."""

    def __init__(self, record: FirstExchanges) -> None:
        self.record = record
        self.notes: list[str] = []
        """Where this process gave other values than the one before it."""
        self._next = [0] * len(record.entries)
        self._unanswered: list[tuple[RecordedExchange, list[StorageWeakRef]]] = []

    def answer(self, place: int, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> tuple[bool, int]:
        """Put into *outputs* what the rank before received; tell whether that is on record, and who sent it.

        What is not on record because the session restores it leaves the outputs alone. Raise `ReplayDiverged` where it has no answer.
        """
        key, there = key_of(name, outputs, inputs), self.record.entries[place] if place < len(self.record.entries) else []
        number = self._next[place] if there else 0
        if number >= len(there):
            raise ReplayDiverged(f"{script_line() or 'it'} begins '{key}', and the process before it began nothing there before step 1")
        entry = there[number]
        if entry.key != key:
            raise ReplayDiverged(f"{script_line() or 'it'} begins '{key}' where the process before it began '{entry.key}' ({entry.where})")
        self._next[place] = number + 1
        if entry.lost:
            raise ReplayDiverged(f"'{key}' at {entry.where or 'an unknown line'} cannot be replayed: {entry.lost}")
        self._compare(entry, name, outputs, inputs)
        results = results_of(name, outputs, inputs)
        if entry.values is None:
            if results and not _scratch:
                self._unanswered.append((entry, [_claim(one) for one in (_syncing[-1] if _syncing else results) if one.numel()]))
            return False, entry.source
        with torch.no_grad():
            for one, value in zip(results, entry.values, strict=True):
                one.detach().copy_(value)
        return True, entry.source

    def _compare(self, entry: RecordedExchange, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Note where this process gives another value than the one before it did; refuse where its own copy cannot be put right."""
        given = given_of(name, outputs, inputs)
        if not given or not entry.given or given == entry.given:
            return
        if name == "broadcast" and caller() == "broadcast_object_list":
            why = f"{entry.where}: this process sends other objects than the one before it sent, which the other ranks have"
            raise ReplayDiverged(why, goes_on=True)
        if len(self.notes) < MOST_NOTES:
            self.notes.append(f"{entry.where or 'before step 1'}: gave other values to '{entry.key}' than the process before it")

    def end(self, restored: set[int]) -> None:
        """Be sure that all was repeated and that the session restores what was not on record; raise `ReplayDiverged` otherwise."""
        for place, number in enumerate(self._next):
            if number < len(self.record.entries[place]):
                entry = self.record.entries[place][number]
                raise ReplayDiverged(f"it did not begin '{entry.key}' as the process before it did ({entry.where or 'before step 1'})")
        for entry, claims in self._unanswered:
            if not all(not claim.expired() and claim.cdata in restored for claim in claims):
                raise ReplayDiverged(
                    f"'{entry.key}' at {entry.where or 'an unknown line'} is not on record, and the session does not restore it"
                )
