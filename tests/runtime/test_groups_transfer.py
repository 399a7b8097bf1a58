"""State transfer: every byte is sent once, and corruption is detected."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from holdfast.runtime.groups import state_transfer
from holdfast.runtime.groups.backends import BuildOptions, GenerationEnded, build
from holdfast.runtime.state.tensors import bytes_of
from tests.runtime.counting_device import CountingRuntime

MEGABYTE = 2**20


def some(size: int) -> torch.Tensor:
    """Return *size* random bytes."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [1, 7, 8, 9, MEGABYTE - 1, MEGABYTE, 3 * MEGABYTE + 13])
def test_a_digest_detects_a_flipped_bit_anywhere(size: int) -> None:
    """In the first byte, in the last and in the middle; in complete words and in the remainder."""
    part = some(size)
    digest = state_transfer.digest([part])
    assert digest == state_transfer.digest([part.clone()])
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128):
            damaged = part.clone()
            damaged[place] ^= bit
            assert state_transfer.digest([damaged]) != digest


def test_a_digest_detects_swapped_blocks_and_parts() -> None:
    """Sums alone would not."""
    part = some(2 * MEGABYTE)
    one, other = part[:MEGABYTE], part[MEGABYTE:]
    assert state_transfer.digest([torch.cat([other, one])]) != state_transfer.digest([part])
    assert state_transfer.digest([other, one]) != state_transfer.digest([one, other])


def test_a_digest_does_not_depend_on_where_bytes_lie_in_memory() -> None:
    """A parameter may be a view into a flat buffer, at any offset."""
    buffer = some(100)
    assert state_transfer.digest([buffer[3:83]]) == state_transfer.digest([buffer[3:83].clone()])


@pytest.mark.parametrize("shares", [1, 2, 3, 8])
def test_shares_cover_every_byte_once(monkeypatch: pytest.MonkeyPatch, shares: int) -> None:
    """For any number of senders: large tensors, scalars and empty ones."""
    monkeypatch.setattr(state_transfer, "SLICE", 64)
    tensors = [torch.zeros(100), torch.zeros((), dtype=torch.int64), torch.zeros(0), torch.zeros(3, 5, dtype=torch.bfloat16)]
    for share in range(shares):
        for part in state_transfer.slices(tensors, share, shares):
            assert part.numel() <= 64
            part.add_(1)
    assert all(bool((bytes_of(one) == 1).all()) for one in tensors)


def test_a_receiver_uses_its_own_tensors_where_they_fit() -> None:
    """Tensors of another shape or type, and missing ones, are new."""
    own = {"fits": torch.zeros(3), "shape": torch.zeros(4), "kind": torch.zeros(3)}
    wanted = {"fits": torch.zeros(3), "shape": torch.zeros(2, 2), "kind": torch.zeros(3, dtype=torch.int32), "new": torch.zeros(())}
    found = state_transfer.places_for(state_transfer.shapes(wanted), own, torch.device("cpu"))
    assert found["fits"] is own["fits"]
    assert state_transfer.shapes(found) == state_transfer.shapes(wanted)
    assert not {id(one) for name, one in found.items() if name != "fits"} & {id(one) for one in own.values()}


class Wire:
    """Two ends of a connection in this process: what is sent is what the buffer holds when its turn comes."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def backend(self, _device: str) -> Wire:
        """Return itself."""
        return self

    def send(self, tensors: list[torch.Tensor], _to: int, _tag: int) -> Wire:
        """Keep the bytes."""
        self.sent.append(tensors[0].clone())
        return self

    def recv(self, tensors: list[torch.Tensor], _source: int, _tag: int) -> Wire:
        """Give the next bytes."""
        tensors[0].copy_(self.sent.pop(0))
        return self

    def wait(self) -> None:
        """Nothing is under way."""


def test_a_device_sends_and_receives_through_a_few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is used again before its copy to the device has arrived; two senders take turns."""
    monkeypatch.setattr(state_transfer, "SLICE", 64)
    tensors, wires = [some(1000), some(3)], [Wire(), Wire()]
    sent = [state_transfer.send(wire, 1, tensors, n, 2, runtime=CountingRuntime()) for n, wire in enumerate(wires)]  # type: ignore[arg-type]
    there, runtimes = [torch.zeros_like(one) for one in tensors], [CountingRuntime(), CountingRuntime()]
    arrivals = [state_transfer.receive(wire, 0, there, n, 2, runtime=runtimes[n]) for n, wire in enumerate(wires)]  # type: ignore[arg-type]
    assert state_transfer.finish(arrivals) == sent
    assert all(map(torch.equal, there, tensors))
    assert [one.held for one in runtimes] == [1, 1]


@pytest.mark.parametrize("runtime", [None, CountingRuntime()], ids=["host", "device"])
def test_a_transfer_ends_with_its_generation_though_the_other_end_is_silent(
    monkeypatch: pytest.MonkeyPatch, runtime: CountingRuntime | None
) -> None:
    """Over real connections that stay open: the sender was stopped after the first of two slices, and a receiver takes nothing."""
    store, options = dist.HashStore(), BuildOptions(devices=("cpu",), timeout=timedelta(minutes=5), host="127.0.0.1", first=True)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: build(store, "pair", rank, 2, options=options, is_cancelled=lambda: False), range(2)))
    first, ended = some(MEGABYTE), threading.Event()
    monkeypatch.setattr(state_transfer, "SLICE", MEGABYTE)
    sending = ends[0].backend("cpu").send([first], 1, state_transfer.TAG)
    into = torch.zeros(2 * MEGABYTE, dtype=torch.uint8)
    arrival = state_transfer.receive(ends[1], 0, [into], 0, 1, runtime=runtime, is_cancelled=ended.is_set)
    next(arrival)
    sending.wait()
    assert torch.equal(into[: len(first)], first) or runtime is not None  # there the copy to the device is under way
    ended.set()
    with pytest.raises(GenerationEnded):
        state_transfer.finish([arrival])
    with pytest.raises(GenerationEnded):
        state_transfer.send(ends[0], 1, [into, into], 0, 1, runtime=runtime, is_cancelled=ended.is_set)
    for end in ends:
        end.close()
