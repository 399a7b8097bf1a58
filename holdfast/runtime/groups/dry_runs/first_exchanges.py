"""What the ranks exchanged before their first step: recorded by every rank, kept by others, and replayed to a process that replaces one.

A process that takes a rank over runs the beginning of the script alone. Every operation that it starts there is answered with what the rank
before it received in the same place, so that it continues with the values of the other ranks. Where that is impossible the process is
not let in, and all ranks restart.
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

from holdfast.runtime.groups.operations import skip_compilation
from holdfast.runtime.state import tree

MAX_RECORD: Final = 16 * 2**20
"""Bytes of results that a rank records; larger results are recorded without their values."""
MAX_COMPARED: Final = 64 * 2**10
"""Bytes of inputs up to which they are compared with those of the process before."""
MAX_NOTES: Final = 20

OBJECTS: Final = frozenset({
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"),
})  # fmt: skip
_PADDED: Final = frozenset({"all_gather_object", "gather_object", "scatter_object_list"})
"""Functions of torch that send pickles padded with uninitialised memory: their inputs cannot be compared."""

Ended = Callable[..., None]


class NotRepeatable(RuntimeError):
    """A process that takes a rank over cannot be given what the ranks exchanged before their first step."""


@dataclass(slots=True)
class RecordedExchange:
    """One operation as one rank saw it."""

    key: str
    values: list[Tensor] | None
    """Its outputs afterwards; for the root of a broadcast, what it sent. None: not recorded."""
    given: str = ""
    """A digest of this rank's inputs, where they can be compared."""
    source: int = 0
    """The sender, for a receive from any source."""
    lost: str = ""
    """Why it cannot be replayed; empty where it can, or need not be, as the session restores its results."""
    where: str = ""
    """The script's line that started it."""
    claims: list[StorageWeakRef] = field(default_factory=list)
    """The memory that holds its results: whether the session restores it is known later."""


@dataclass(slots=True)
class FirstExchanges:
    """The record of one rank."""

    generation: int
    """The generation in which the ranks started together."""
    entries: list[list[RecordedExchange]]
    """By the index of the group among the rank's groups, in the order of the operations."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        rows = [[[one.key, one.values, one.given, one.source, one.lost, one.where] for one in entries] for entries in self.entries]
        return tree.pickled({"generation": self.generation, "entries": rows})

    @classmethod
    def of(cls, data: bytes) -> FirstExchanges:
        """Return the record in *data*; code in it is refused."""
        unpacked = tree.unpickled(data)
        return cls(int(unpacked["generation"]), [[RecordedExchange(*row) for row in rows] for rows in unpacked["entries"]])

    def digest(self) -> str:
        """Return a digest of all results: equal digests mean that two ranks received the same."""
        found = hashlib.sha256()
        for place, entries in enumerate(self.entries):
            for one in entries:
                key = one.key.replace("broadcast!", "broadcast", 1)  # its root holds what the others receive
                found.update(f"{place} {key} {one.source} {bool(one.lost)} ".encode())
                found.update(_digest(one.values or []).encode())
        return found.hexdigest()

    @property
    def lost(self) -> list[RecordedExchange]:
        """Return the operations that cannot be replayed."""
        return [one for entries in self.entries for one in entries if one.lost]


def shapes_of(outputs: list[Tensor], inputs: list[Tensor]) -> str:
    """Return shapes and types of an operation's outputs, or of its inputs where it has no outputs."""
    return ";".join(f"{tuple(one.shape)}{str(one.dtype).removeprefix('torch.')}" for one in (outputs or inputs))


def index_of(groups: Sequence[Any], group: Any) -> int:  # noqa: ANN401 (a ManagedGroup)
    """Return the index of *group* among *groups*; the one that is being made comes next."""
    return next((index for index, one in enumerate(groups) if one is group), len(groups))


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the memory of *tensors*."""
    return {_claim(one).cdata for one in tensors}


def script_line() -> str:
    """Return the script's line that led to the current operation."""
    found = next((frame for frame in _frames() if frame.f_globals.get("__name__") == "__main__"), None)
    return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def calling_function() -> str:
    """Return the function of `OBJECTS` that starts the current operation, if one does."""
    names = (frame.f_code.co_name for frame in _frames() if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed."))
    return next((name for name in names if name in OBJECTS), "")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (the interpreter's own)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _key_of(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> str:
    return f"{name}{'' if outputs else '!'}/{shapes_of(outputs, inputs)}"


def _results_of(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the result of an operation on this rank: the root of a broadcast has it from the start."""
    return outputs or (inputs if name == "broadcast" else [])


def _digest_of_inputs(name: str, outputs: list[Tensor], inputs: list[Tensor]) -> str:
    """Return a digest of this rank's inputs; nothing where they are large or cannot be compared."""
    if not inputs or (name == "broadcast" and outputs) or sum(one.numel() * one.element_size() for one in inputs) > MAX_COMPARED:
        return ""
    if all(one.dtype == torch.uint8 for one in inputs) and calling_function() in _PADDED:
        return ""
    return _digest(inputs)


def _digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for one in tensors:
        found.update(f"{tuple(one.shape)}{one.dtype}".encode())
        if one.numel():
            dense = one.detach().cpu() if one.layout is torch.strided else one.detach().cpu().to_dense()
            found.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _claim(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())


def _claims_of(results: list[Tensor]) -> list[StorageWeakRef]:
    """Return the memory whose restoration makes *results* unnecessary: the model's own where DDP broadcasts copies of it."""
    return [_claim(one) for one in (_syncing[-1] if _syncing else results) if one.numel() and one.layout is torch.strided]


def _are_restored(claims: list[StorageWeakRef], restored: set[int]) -> bool:
    return all(not claim.expired() and claim.cdata in restored for claim in claims)


# -- recording --------------------------------------------------------------------------------------------------------

_syncing: list[Sequence[Tensor]] = []
"""The parameters and buffers that DDP is broadcasting to all ranks now."""
_scratch: list[bool] = []
"""Not empty while results are thrown away: DDP's zero gradients while its buckets are settled."""


def watch() -> None:
    """From now on know which parameters and buffers DDP broadcasts when it is made."""
    real = dist._broadcast_coalesced  # noqa: SLF001 (the one function through which DDP does it)
    if getattr(real, "of_holdfast", False):
        return

    def broadcast_coalesced(group: Any, tensors: list[Tensor], *more: Any, **named: Any) -> Any:  # noqa: ANN401 (torch's own)
        _syncing.append(tensors)
        try:
            return real(group, tensors, *more, **named)
        finally:
            _syncing.pop()

    skip_compilation(broadcast_coalesced)
    broadcast_coalesced.of_holdfast = True  # type: ignore[attr-defined]
    dist._broadcast_coalesced = broadcast_coalesced  # type: ignore[assignment]  # noqa: SLF001


@contextmanager
def scratch() -> Iterator[None]:
    """Run exchanges whose results are thrown away."""
    _scratch.append(True)
    try:
        yield
    finally:
        _scratch.pop()


class ExchangeRecorder:
    """Records the results of a rank's operations before its first step."""

    def __init__(self, groups: Sequence[Any], generation: int) -> None:
        self._groups, self._generation = groups, generation
        self._entries: dict[int, list[RecordedExchange]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def started(self, group: Any, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> Ended | None:  # noqa: ANN401 (a ManagedGroup)
        """Record the start of an operation; return the callback for its end."""
        results = _results_of(name, outputs, inputs)
        entry = RecordedExchange(_key_of(name, outputs, inputs), None, _digest_of_inputs(name, outputs, inputs), where=script_line())
        with self._lock:
            self._entries.setdefault(index_of(self._groups, group), []).append(entry)
            if not results or _scratch:
                return None
            size = sum(one.numel() * one.element_size() for one in results)
            entry.claims = _claims_of(results)
            if self._size + size > MAX_RECORD:
                entry.lost = f"its result has {size / 2**20:.1f} MiB, and a rank records at most {MAX_RECORD // 2**20} MiB before step 1"
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
        """End the record. Results in memory that the session restores (*restored*) need not be kept."""
        with self._lock:
            places = range(max(self._entries, default=-1) + 1)
            entries = [self._entries.get(place, []) for place in places]
        for one in [one for some in entries for one in some if one.claims]:
            if _are_restored(one.claims, restored):
                one.values, one.lost = None, ""
            one.claims = []
        return FirstExchanges(self._generation, entries)


# -- replaying --------------------------------------------------------------------------------------------------------


class ReplayDiverged(Exception):
    """The record does not answer an operation."""

    def __init__(self, why: str, *, continues: bool = False) -> None:
        super().__init__(why, continues)
        self.why, self.continues = why, continues
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
        """Fill *outputs* with what the rank before received; return whether that is on record, and who sent it.

        Results that the session restores are not on record: the outputs stay as they are. Raise `ReplayDiverged` without an answer.
        """
        key, recorded = _key_of(name, outputs, inputs), self.record.entries[place] if place < len(self.record.entries) else []
        number = self._next[place] if recorded else 0
        if number >= len(recorded):
            raise ReplayDiverged(f"{script_line() or 'it'} starts '{key}', and the process before it started nothing there before step 1")
        entry = recorded[number]
        if entry.key != key:
            raise ReplayDiverged(f"{script_line() or 'it'} starts '{key}' where the process before started '{entry.key}' ({entry.where})")
        self._next[place] = number + 1
        if entry.lost:
            raise ReplayDiverged(f"'{key}' at {entry.where or 'an unknown line'} cannot be replayed: {entry.lost}")
        self._compare(entry, name, outputs, inputs)
        results = _results_of(name, outputs, inputs)
        if entry.values is None:
            if results and not _scratch:
                self._unanswered.append((entry, _claims_of(results)))
            return False, entry.source
        with torch.no_grad():
            for one, value in zip(results, entry.values, strict=True):
                one.detach().copy_(value)
        return True, entry.source

    def _compare(self, entry: RecordedExchange, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Note where this process gives another value than the one before it did; refuse where its own copy cannot be corrected."""
        given = _digest_of_inputs(name, outputs, inputs)
        if not given or not entry.given or given == entry.given:
            return
        if name == "broadcast" and calling_function() == "broadcast_object_list":
            why = f"{entry.where}: this process sends other objects than the one before it sent, which the other ranks have"
            raise ReplayDiverged(why, continues=True)
        if len(self.notes) < MAX_NOTES:
            self.notes.append(f"{entry.where or 'before step 1'}: gave other values to '{entry.key}' than the process before it")

    def end(self, restored: set[int]) -> None:
        """Check that all was repeated, and that the session restores what was not on record; raise `ReplayDiverged` otherwise."""
        for place, number in enumerate(self._next):
            if number < len(self.record.entries[place]):
                entry = self.record.entries[place][number]
                raise ReplayDiverged(f"it did not start '{entry.key}' as the process before it did ({entry.where or 'before step 1'})")
        for entry, claims in self._unanswered:
            if not _are_restored(claims, restored):
                raise ReplayDiverged(
                    f"'{entry.key}' at {entry.where or 'an unknown line'} is not on record, and the session does not restore it"
                )
