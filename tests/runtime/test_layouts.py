"""Tensors as they lie in memory: what fills it goes as it lies, all else as a copy, and a state arrives with its strides and devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import tensor_layout
from holdfast.memstore.shared_memory import SLICE_BYTES, Entry, Label, Slot, Snapshot, UnusableSnapshot, labels, word_sum
from holdfast.runtime.checkpoint_writer.rank_shard import boxes
from holdfast.runtime.groups import state_transfer
from holdfast.runtime.snapshots.config import SnapshotConfig, SnapshotPlace
from holdfast.runtime.snapshots.copy_schedule import SnapshotLimits
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state import tree
from holdfast.runtime.state.state_layout import StateLayout, load_state
from holdfast.runtime.state.tensors import bytes_of, local_of
from holdfast.runtime.state.training import ON_DEVICE, Training, on_device

FILLING: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(3, 4).t(),
    "of one channel": lambda: torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
    "inside of another": lambda: torch.randn(5, 6, 7)[2].transpose(0, 1),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16().t(),
    "no dimensions": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(3, 0, 2),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "with gaps": lambda: torch.randn(6, 4)[:, ::2],
    "a column": lambda: torch.randn(6, 4)[:, 1],
    "expanded": lambda: torch.randn(4, 1).expand(4, 3),
    "windows": lambda: torch.randn(9).unfold(0, 3, 1),
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
}


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_layout_is_dense_when_torch_says_so(shape: list[int], data: st.DataObject) -> None:
    """For any strides: torch has an operator of its own for that."""
    strides = data.draw(
        st.lists(st.integers(0, 16), min_size=len(shape), max_size=len(shape)) | st.just(list(tensor_layout.contiguous(shape)))
    )
    one = torch.empty_strided(shape, strides)
    assert tensor_layout.is_dense(shape, strides) is bool(torch.ops.aten.is_non_overlapping_and_dense(one)) or 0 in shape
    assert tensor_layout.contiguous(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("name", FILLING)
def test_what_fills_its_memory_is_seen_as_it_lies_there(name: str) -> None:
    """The view is of the very memory: whatever is written through it, the tensor has."""
    one = FILLING[name]()
    other = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
    flat = bytes_of(other)
    assert flat.numel() == one.numel() * one.itemsize
    flat.copy_(bytes_of(one))
    assert torch.equal(other, one)


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_is_never_taken_for_memory(name: str) -> None:
    """It has no flat view, and is treated as the contiguous tensor that a copy of it is."""
    one = OTHERS[name]()
    with pytest.raises(ValueError, match="copy it first"):
        bytes_of(one)
    shape, _, strides = state_transfer.shape_of(one)
    assert strides == list(tensor_layout.contiguous(shape))


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", [*FILLING, *OTHERS])
def test_a_tensor_arrives_as_it_was_wherever_it_lay(name: str, shares: int) -> None:
    """From senders of which each has it in another order, by the bytes of their shares, into a process that has none yet or its own."""
    value = (FILLING | OTHERS)[name]()
    wanted = json.loads(json.dumps(state_transfer.shapes({"x": value})))
    senders = [{"x": value}, {"x": value.resolve_conj().contiguous()}]
    for own in ({}, {"x": torch.zeros_like(value.resolve_conj())}, {"x": torch.zeros(2)}):
        found = state_transfer.places_for(wanted, own, torch.device("cpu"))
        parts = [list(state_transfer.slices(state_transfer.laid_out(senders[share], wanted), share, shares)) for share in range(shares)]
        for share, sent in enumerate(parts):
            places = list(state_transfer.slices(list(found.values()), share, shares))
            for into, part in zip(places, sent, strict=True):
                into.copy_(part)
        assert torch.equal(found["x"], value)
        assert state_transfer.shapes(found) == wanted


def test_a_sender_that_holds_another_state_says_so() -> None:
    """It would send bytes of which nobody knows what they are."""
    wanted = state_transfer.shapes({"x": torch.zeros(3), "y": torch.zeros(2)})
    with pytest.raises(state_transfer.TransferCorrupted, match="'y' is wanted"):
        state_transfer.laid_out({"x": torch.zeros(3)}, wanted)
    with pytest.raises(state_transfer.TransferCorrupted, match="'x' is wanted"):
        state_transfer.laid_out({"x": torch.zeros(4), "y": torch.zeros(2)}, wanted)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_stretch_of_memory_is_boxes_of_the_tensor_in_whatever_order_it_lies(shape: list[int], data: st.DataObject) -> None:
    """As a checkpoint on disk names them, out of a file that holds the memory."""
    order = data.draw(st.permutations(range(len(shape))))
    lying = torch.arange(torch.Size(shape).numel()).view([shape[dimension] for dimension in order])
    one = lying.permute([order.index(dimension) for dimension in range(len(order))])
    begin = data.draw(st.integers(0, one.numel()))
    end = data.draw(st.integers(begin, one.numel()))
    found = tensor_layout.memory_order(one.stride())
    numbers = []
    for box in boxes([shape[dimension] for dimension in found], begin, end):
        turned = box.transposed(found)
        shard = one[tuple(slice(at, at + size) for at, size in zip(turned.offsets, turned.sizes, strict=True))]
        numbers += shard.permute(found).reshape(-1).tolist()
    assert numbers == list(range(begin, end))


class Net(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.gaps = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.register_buffer("scale", torch.randn(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        """Pass *x* on."""
        return (self.image(x).flatten(1)[:, :5] @ self.turned).sum() + (self.gaps * self.scale).sum()  # type: ignore[no-any-return, operator]


def training(seed: int, *, steps: int, **settings: Any) -> Training:
    """Return one that has gone *steps* steps."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for _ in range(steps):
        model(torch.randn(2, 3, 8, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Training(model=model, optimizers=[optimizer])


def values_of(one: Training) -> dict[str, tuple[list[Any], tuple[int, ...]]]:
    """Return the values and the strides of all that *one* has."""
    state = {f"{number}.{key}": value for number, held in enumerate(one.optimizers[0].state.values()) for key, value in held.items()}
    whole = {**one.model.state_dict(), **state}
    return {key: (value.tolist(), value.stride()) for key, value in whole.items()}


def hand_over(one: Training, other: Training) -> None:
    """Give the state of *one* to *other*, as a rank does to one that has just been started."""
    sent, rest = one.transferable_state()
    wanted = state_transfer.shapes(sent)
    found = state_transfer.places_for(wanted, other.transferable_state()[0], torch.device("cpu"))
    for into, part in zip(found.values(), state_transfer.laid_out(sent, wanted), strict=True):
        bytes_of(into).copy_(bytes_of(part))
    other.load_state(rest, found)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_state_that_is_handed_over_has_its_bits_and_its_strides(settings: dict[str, Any]) -> None:
    """To a process that has just been started, and goes on as the other does."""
    one, other = training(1, steps=2, **settings), training(2, steps=0, **settings)
    hand_over(one, other)
    mine = values_of(one)
    assert values_of(other) == mine
    assert mine["image.weight"][1] == mine["2.exp_avg"][1] == (27, 1, 9, 3)
    for each in (one, other):
        torch.manual_seed(5)
        each.model(torch.randn(2, 3, 8, 8)).backward()
        each.optimizers[0].step()
    assert values_of(other) == values_of(one)


def test_a_snapshot_has_what_fills_its_memory_as_it_lies_and_pickles_none_of_it(tmp_path: Path) -> None:
    """A network in `channels_last` is copied slice by slice, as any other is: only what has gaps or overlaps goes into the tree."""
    one = training(1, steps=1)
    snapshotter = Snapshotter(one, SnapshotConfig(memstore=tmp_path, max_bytes=0, limits=SnapshotLimits()))
    snapshotter.set_place(SnapshotPlace(0, 1, "net"), 1)
    snapshotter.take(1, one.rank_state(), one.copied_buffers())
    snapshotter.finish()
    snapshotter.close()
    (path,) = labels(tmp_path)
    with Snapshot(path) as snapshot:
        entries = {entry.key: entry for entry in snapshot.entries}
        found = tree.unpickled(snapshot.blobs["dynamic"])["rest"]
    assert (entries["model.image.weight"].strides, entries["optimizer.0.state.image.weight.exp_avg"].strides) == ((27, 1, 9, 3),) * 2
    assert (entries["model.turned"].strides, entries["model.image.bias"].strides) == ((1, 5), ())
    assert set(found) == {"model.scale", "model.gaps"}


class Sharded(nn.Module):
    """A parameter and a buffer of which other ranks have parts, as tensor parallelism makes them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)]))
        self.gaps = nn.Parameter(DTensor.from_local(torch.randn(5, 8)[:, ::2], mesh, [Shard(1)]))
        self.register_buffer("cache", DTensor.from_local(torch.randn(6), mesh, [Replicate()]))


@pytest.mark.parametrize("way", ["from another rank", "from a snapshot"])
def test_a_sharded_buffer_arrives_with_its_bits(way: str) -> None:
    """Both ways give what this rank has of it, which is no DTensor."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        one, other = (Training(model=Sharded(mesh), optimizers=[]) for _ in range(2))
        if way == "from another rank":
            hand_over(one, other)
        else:
            layout = StateLayout(one)
            held = {key: local_of(value).clone() for key, value in layout.tensors.items()}
            load_state(other, layout.static, layout.dynamic(one.copied_buffers()), held, torch.device("cpu"))
        present = other.model.state_dict()
        for name, value in one.model.state_dict().items():
            assert isinstance(present[name], DTensor)
            assert torch.equal(local_of(value), local_of(present[name])), name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("strides", [[1, 5], [1, 1], [20, 1], [1], [0, 1], [-5, 1], [True, 1], [5.0, 1]], ids=str)
def test_an_index_whose_strides_do_not_fill_the_tensor_is_refused(tmp_path: Path, strides: list[Any]) -> None:
    """It comes from another node: whoever believed it would take any amount of memory, or read what is not there."""
    data = bytes(20)
    label = Label(step=1, lineage=1, rank=0, world=1, shard="p", part=0, parts=1, size=len(data), slice_bytes=SLICE_BYTES, time=0.0)
    fills = strides == [1, 5]
    with nullcontext() if fills else pytest.raises(UnusableSnapshot, match="its index is not one of this version") as caught:
        slot = Slot(tmp_path / "a.snap")
        slot.begin(label)
        slot.seal(label, [word_sum(data)], [Entry("w", (5, 4), "uint8", len(data), tuple(strides))], {})
        slot.close()
        Snapshot(tmp_path / "a.snap").close()
    assert caught is None or any(part in str(caught.value.__cause__) for part in ("strides", "not a count"))


def test_scalars_on_a_device_differ_from_those_on_the_host() -> None:
    """A count of steps that a kernel reads is where its parameter is; `meta` stands for a device that is not the host."""
    state: dict[str, dict[str, Any]] = {
        "w": {"step": torch.zeros((), device="meta"), "exp_avg": torch.zeros(3, device="meta")},
        "b": {"step": torch.zeros(()), "exp_avg": torch.zeros(3, device="meta")},
        "c": {"count": 3},
    }
    assert on_device(state) == {"w": ["step"]}


def test_a_scalar_of_a_fused_or_capturable_optimizer_lands_on_the_device_of_its_parameter() -> None:
    """And one that its owner kept on the host stays there, as does a learning rate that is a tensor; nothing changes its type."""
    model = nn.Linear(3, 2, device="meta", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    newcomer = Training(model=model, optimizers=[optimizer])
    held = {name: {"step": torch.tensor(4.0), "exp_avg": torch.zeros(2, device="meta")} for name in ("weight", "bias")}
    state = {**newcomer.named(optimizer), "state": held, ON_DEVICE: {"weight": ["step"]}}
    state["param_groups"][0]["lr"] = torch.tensor(0.2)
    newcomer.load_tree({"model": {}, "optimizers": [state], "schedulers": [], "extra": {}}, {})
    steps = [optimizer.state[parameter]["step"] for parameter in (model.weight, model.bias)]
    assert [(one.device.type, one.dtype) for one in steps] == [("meta", torch.float32), ("cpu", torch.float32)]
    assert optimizer.param_groups[0]["lr"].device.type == "meta"
