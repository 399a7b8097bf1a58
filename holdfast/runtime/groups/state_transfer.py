"""Transfer of a rank's state from the ranks that hold it to the process that takes its place.

Tensors go over the groups' own connections, in slices, each sender a share of them; digests of all of it are compared on arrival.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed import Work

from holdfast.runtime.groups.backends import HOST, BackendGroup, BuildOptions, build, in_thread
from holdfast.runtime.groups.kv_store import GenerationStore
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.snapshots.device_runtime import DeviceRuntime, runtime_of
from holdfast.runtime.snapshots.restore_planner import RestorePlan, Transfer
from holdfast.runtime.state.pinned_ring import PinnedRing
from holdfast.runtime.state.tensors import bytes_of, fills_its_memory, local_of
from holdfast.runtime.state.training import Training
from holdfast.tensor_layout import contiguous

if TYPE_CHECKING:
    from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager

SLICE: Final = 32 * 2**20
"""Bytes of a slice: what one operation carries, and what is spread over the senders."""
_BLOCK: Final = 2**20
TAG: Final = 0x4D07


class TransferCorrupted(RuntimeError):
    """The received state is not the state that was sent."""


# -- tensors ----------------------------------------------------------------------------------------------------------


def slices(tensors: Sequence[Tensor], share: int, shares: int) -> Iterator[Tensor]:
    """Yield the slices of *share* out of *shares*, as flat uint8 views, in an order that both ends know."""
    number = 0
    for one in tensors:
        flat = bytes_of(one)
        for begin in range(0, flat.numel(), SLICE):
            if number % shares == share:
                yield flat[begin : begin + SLICE]
            number += 1


def digest(parts: Iterable[Tensor]) -> str:
    """Return a digest of *parts* in sequence: SHA-256 over the sum of each megabyte in 64-bit words.

    A sum detects any flipped bit or lost word at the speed of memory; SHA-256 over all bytes would take longer than the transfer.
    """
    total = hashlib.sha256()
    for part in parts:
        total.update(_sums(part))
    return total.hexdigest()


def _sums(part: Tensor) -> bytes:
    if part.storage_offset() % 8:  # a parameter that is a view into a flat buffer: words must be aligned
        part = part.clone()
    words = part.numel() // 8 * 8
    head = part[:words].view(torch.int64)
    blocks = head.numel() // (_BLOCK // 8) * (_BLOCK // 8)
    sums = [head[:blocks].view(-1, _BLOCK // 8).sum(1), head[blocks:].sum().reshape(1), part[words:].sum(dtype=torch.int64).reshape(1)]
    return torch.cat(sums).cpu().numpy().tobytes()


def _never() -> bool:
    return False


def _wait(work: Work, is_cancelled: Callable[[], bool]) -> None:
    """Wait for a message; raise `GenerationEnded` as soon as *is_cancelled*.

    The other end may have been stopped, and closes nothing then; and a cut connection does not wake who waits for the rest of a message.
    The wait that is left behind keeps its buffer.
    """
    in_thread(work.wait, is_cancelled)


def send(  # noqa: PLR0913 (one transfer)
    inner: BackendGroup,
    to: int,
    tensors: Sequence[Tensor],
    share: int,
    shares: int,
    *,
    runtime: DeviceRuntime | None = None,
    is_cancelled: Callable[[], bool] = _never,
) -> tuple[str, int]:
    """Send this sender's slices to member *to* of the group; return digest and bytes. Raise `GenerationEnded` as soon as *is_cancelled*.

    Those on a device go through a small ring of pinned buffers; *runtime*: that of the device, by default of the tensors' own.
    """
    parts = list(slices(tensors, share, shares))
    backend, runtime = inner.backend("cpu"), runtime or _runtime_of(parts)
    if runtime is None:
        works = [backend.send([part], to, TAG) for part in parts]
        sent = digest(parts)
        for work in works:
            _wait(work, is_cancelled)
        return sent, sum(part.numel() for part in parts)
    ring = PinnedRing(runtime, min(SLICE, max(part.numel() for part in parts)))

    def leaving() -> Iterator[Tensor]:
        for part in parts:
            buffer = ring.fetch(part) if part.device == runtime.device else ring.take(part.numel()).copy_(part)
            ring.hold(partial(_wait, backend.send([buffer], to, TAG), is_cancelled))
            yield buffer

    sent = digest(leaving())  # of what the device had, while it is sent
    ring.close()
    return sent, sum(part.numel() for part in parts)


Arrival = Generator[None, None, tuple[str, int]]
"""Receives a slice each time it is asked for the next one; its result is the digest and the number of bytes."""


def receive(  # noqa: PLR0913 (as above)
    inner: BackendGroup,
    source: int,
    tensors: Sequence[Tensor],
    share: int,
    shares: int,
    *,
    runtime: DeviceRuntime | None = None,
    is_cancelled: Callable[[], bool] = _never,
) -> Arrival:
    """Start to receive the slices of member *source*, to be finished by `finish`; *runtime*, *is_cancelled*: as those of `send`."""
    parts = list(slices(tensors, share, shares))
    backend, runtime = inner.backend("cpu"), runtime or _runtime_of(parts)
    if runtime is not None:
        return _through_ring(parts, runtime, lambda buffer: backend.recv([buffer], source, TAG), is_cancelled)
    works = [backend.recv([part], source, TAG) for part in parts]

    def arriving() -> Arrival:
        total = hashlib.sha256()
        for work, part in zip(works, parts, strict=True):
            _wait(work, is_cancelled)
            total.update(_sums(part))  # of what is there, while the rest still arrives
            yield
        return total.hexdigest(), sum(part.numel() for part in parts)

    return arriving()


def _through_ring(
    parts: Sequence[Tensor], runtime: DeviceRuntime, begin: Callable[[Tensor], Work], is_cancelled: Callable[[], bool]
) -> Arrival:
    """Receive *parts* one ahead of the other into pinned buffers, and copy each to its device from there."""
    total, ring = hashlib.sha256(), PinnedRing(runtime, min(SLICE, max(part.numel() for part in parts)))

    def ask(part: Tensor) -> tuple[Tensor, Work]:
        buffer = ring.take(part.numel())
        return buffer, begin(buffer)

    for part in parts:
        buffer, work = ask(part)
        _wait(work, is_cancelled)
        if part.device == runtime.device:
            ring.put(part, buffer)
        else:
            part.copy_(buffer)
        total.update(_sums(buffer))  # while it is copied
        yield
    ring.close()
    return total.hexdigest(), sum(part.numel() for part in parts)


def finish(arrivals: Sequence[Arrival]) -> list[tuple[str, int]]:
    """Return digest and bytes of each of *arrivals*, which take turns: all senders send at the same time."""
    results: dict[int, tuple[str, int]] = {}
    while len(results) < len(arrivals):
        for number, one in enumerate(arrivals):
            if number not in results:
                try:
                    next(one)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(arrivals))]


def _runtime_of(parts: Sequence[Tensor]) -> DeviceRuntime | None:
    return next((runtime_of(part.device) for part in parts if part.device.type != "cpu"), None)


def shape_of(tensor: Tensor) -> list[Any]:
    """Return shape, dtype and strides with which the local part of *tensor* is transferred."""
    local = local_of(tensor)
    strides = local.stride() if fills_its_memory(local) else contiguous(local.shape)
    return [list(local.shape), str(local.dtype).removeprefix("torch."), list(strides)]


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a receiver needs to allocate *tensors*: `shape_of` each, as JSON holds it."""
    return {key: shape_of(one) for key, one in tensors.items()}


def laid_out(tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> list[Tensor]:
    """Return *tensors* in the layout *wanted* (see `shapes`) and its order: themselves where they lie so, else copies.

    All senders of one state, and its receiver, must agree on the place of each byte. Raise `TransferCorrupted` when it is another state.
    """
    found = []
    for key, (shape, kind, strides) in wanted.items():
        present = tensors.get(key)
        if present is None or shape_of(present)[:2] != [shape, kind]:
            raise TransferCorrupted(f"'{key}' is wanted with the shape {shape} and type {kind}, and this rank does not hold it so")
        local = local_of(present)
        if list(local.stride()) != strides or not fills_its_memory(local):
            local = torch.empty_strided(shape, strides, dtype=local.dtype, device=local.device).copy_(local)
        found.append(local)
    return found


def places_for(wanted: Mapping[str, Any], own: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a tensor for each of *wanted*: this process's own where it fits, else a new one on *device*."""
    found = {}
    for key, (shape, kind, strides) in wanted.items():
        present = own.get(key)
        if present is not None and shape_of(present) == [shape, kind, strides] and fills_its_memory(present):
            found[key] = present
        else:
            found[key] = torch.empty_strided(shape, strides, dtype=getattr(torch, kind), device=device)
    return found


# -- ranks ------------------------------------------------------------------------------------------------------------


class StateTransfer:
    """This rank's part in the transfers of one generation."""

    def __init__(
        self, training: Training, membership: MembershipManager, generation: GroupGeneration, store: GenerationStore | None = None
    ) -> None:
        """*store*: that of *generation*, where it is not the current one."""
        self._training, self._membership, self._generation = training, membership, generation
        opened = store or membership.generation_store
        assert opened is not None
        self._store, self._host = opened.prefixed("transferable_state"), opened.host
        self._temporary: list[BackendGroup] = []
        self._is_cancelled = membership.is_cancelled(generation.number)

    def execute(
        self, plan: RestorePlan, rank_states: Mapping[int, Mapping[int, bytes]], apply: Callable[[bytes], None]
    ) -> tuple[int, float]:
        """Send and receive as *plan* says, and *apply* this rank's own state; return bytes and seconds. Raise `TransferCorrupted`."""
        me, begin, size = self._generation.rank, time.monotonic(), 0
        outgoing = [one for one in plan.transfers if one.source == me]
        incoming = [one for one in plan.transfers if one.target == me]
        for source, target in plan.rank_states:
            if source == me and source != target:
                self.put(f"rank-state/{target}", rank_states[target][plan.step])
        try:
            for one in sorted(outgoing, key=lambda move: (move.target, move.share)):
                size += self._send(one)
            if incoming:
                size += self._receive(incoming)
        finally:
            for inner in self._temporary:
                inner.close()
        if me in {target for _, target in plan.rank_states}:
            apply(self.take(f"rank-state/{me}"))
        return size, time.monotonic() - begin if size else 0.0

    def _send(self, move: Transfer) -> int:
        inner, place = self._between(move.source, move.target, move.target)
        return self.send(inner, place, move.target, move.share, move.shares)

    def send(self, inner: BackendGroup, place: int, target: int, share: int, shares: int) -> int:
        """Send a share of this rank's state to member *place* of *inner*, which becomes rank *target*; return the bytes."""
        tensors, rest = self._training.transferable_state()
        if share == 0:
            wanted = shapes(tensors)
            self.put(f"tree/{target}", rest)
            self._store.set(f"shapes/{target}", json.dumps(wanted))
        else:  # copies of one state may lie differently in memory
            wanted = json.loads(self.get(f"shapes/{target}"))
        sent, size = send(inner, place, laid_out(tensors, wanted), share, shares, is_cancelled=self._is_cancelled)
        self._store.set(f"digest/{target}/{share}", sent)
        return size

    def _receive(self, moves: list[Transfer]) -> int:
        return self.receive([(*self._between(one.source, one.target, one.source), one.source, one.share, one.shares) for one in moves])

    def receive(self, senders: list[tuple[BackendGroup, int, int, int, int]]) -> int:
        """Receive this rank's state; return the bytes. Each sender: connections, its index in them, its rank, its share, all shares."""
        me = self._generation.rank
        own, _ = self._training.transferable_state()
        device = next((one.device for one in self._training.model.parameters()), torch.device("cpu"))
        found = places_for(json.loads(self.get(f"shapes/{me}")), own, device)
        tensors = list(found.values())
        cancelled = self._is_cancelled
        started = [receive(inner, place, tensors, share, of, is_cancelled=cancelled) for inner, place, _, share, of in senders]
        total = 0
        for (_, _, source, share, _), (received, size) in zip(senders, finish(started), strict=True):
            total += size
            if received != self.get(f"digest/{me}/{share}").decode():
                raise TransferCorrupted(f"the state that rank {source} sent to rank {me} was corrupted on the way")
        self._training.load_state(self.take(f"tree/{me}"), found)
        return total

    def put(self, key: str, value: bytes) -> None:
        """Store *value* for another rank."""
        self._store.set(key, base64.b64encode(value).decode())

    def take(self, key: str) -> bytes:
        """Return what another rank has `put`."""
        return base64.b64decode(self.get(key))

    def get(self, key: str) -> bytes:
        """Return what another rank stores under *key*; raise `GenerationEnded` when the generation ends meanwhile."""
        return in_thread(lambda: bytes(self._store.get(key)), self._is_cancelled)

    def _between(self, source: int, target: int, other: int) -> tuple[BackendGroup, int]:
        """Return connections that join *source* and *target*, and the index of *other* in them."""
        common = [
            group
            for group in self._membership.groups
            if {source, target} <= set(group.ranks) and group.inner is not None and HOST in group.inner.backends
        ]
        if common:
            best: ManagedGroup = min(common, key=lambda group: (len(group.ranks), group.group_name))
            assert best.inner is not None
            return best.inner, best.ranks.index(other)
        pair = sorted((source, target))
        inner = self.pair(f"pair-{pair[0]}-{pair[1]}", pair.index(self._generation.rank))
        self._temporary.append(inner)
        return inner, pair.index(other)

    def pair(self, name: str, place: int) -> BackendGroup:
        """Build connections between two processes, of which this one has the index *place*."""
        return build(
            self._store,
            name,
            place,
            2,
            options=BuildOptions(devices=(HOST,), timeout=self._membership.groups[0].timeout, host=self._host),
            is_cancelled=self._is_cancelled,
        )
