"""How a step's batch is divided: each sample is computed once, and the weights give one mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import holdfast
from holdfast.runtime.data.batch_shards import BatchShard, BatchSplit, split

DEALS = st.tuples(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(1, 12))


@given(DEALS)
def test_every_sample_is_computed_once_and_weighs_the_same(deal: tuple[int, int, int | None]) -> None:
    """Whatever the batch, the copies and the bound: the mean over the copies of weighted means is the mean over the samples."""
    size, copies, most = deal
    values = [float(number) for number in range(size)]
    found = [split(values, BatchSplit(place=place, copies=copies, max_samples=most)) for place in range(copies)]
    assert [one for parts in found for samples, split_of in parts for one in samples if split_of.samples] == values
    assert len({len(parts) for parts in found}) == 1, "ranks that compute other numbers of shares would wait for each other"
    assert all(split_of.last is (number == len(parts)) for parts in found for number, (_, split_of) in enumerate(parts, 1))
    assert all(len(samples) <= (most or math.inf) for parts in found for samples, _ in parts)
    mean = sum(split_of.weight * sum(samples) / len(samples) for parts in found for samples, split_of in parts) / copies
    assert mean == pytest.approx(sum(values) / size)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 9))
def test_micro_batches_of_one_size_are_not_cut(units: int, most: int, copies: int) -> None:
    """What is built for one size never sees another; each sample counts once, and all copies have equally many parts."""
    values = [float(number) for number in range(units * most)]
    found = [split(values, BatchSplit(place=place, copies=copies, max_samples=most, equal_size=True)) for place in range(copies)]
    assert {len(samples) for parts in found for samples, _ in parts} == {most}
    assert len({len(parts) for parts in found}) == 1
    assert [one for parts in found for samples, split_of in parts for one in samples if split_of.samples] == values
    mean = sum(split_of.weight * sum(samples) / len(samples) for parts in found for samples, split_of in parts) / copies
    assert mean == pytest.approx(sum(values) / len(values))


def test_equal_micro_batches_have_the_weight_one() -> None:
    """With all copies there and a batch that they divide nothing is scaled: losses stay what they are to the bit."""
    assert [
        split_of.weight for place in range(4) for _, split_of in split(list(range(32)), BatchSplit(place=place, copies=4, max_samples=8))
    ] == [1.0] * 4
    assert BatchShard(samples=5, of=16, copies=3, last=True).weight == 15 / 16


def a_loader(workers: int = 0, *, endless: bool = True) -> holdfast.Loader:
    """Return a loader of the numbers 0 to 19, six a step."""
    data = TensorDataset(torch.arange(20))
    order = torch.Generator().manual_seed(2)
    return holdfast.Loader(DataLoader(data, 6, shuffle=True, generator=order, num_workers=workers), endless=endless)


def steps(loader: holdfast.Loader, deal: BatchSplit, count: int) -> list[list[int]]:
    """Return the samples that a copy computes in so many steps."""
    found: list[list[int]] = []
    for _ in range(count):
        loader.split_batches(deal)
        found.append([one for share in loader.micro_batches() if share.weight for one in share.batch[0].tolist()])
    return found


def together(*copies: list[list[int]]) -> list[list[int]]:
    """Return the samples of each step that the *copies* computed."""
    return [sorted(one for part in parts for one in part) for parts in zip(*copies, strict=True)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_has_its_samples_whoever_computes_them(workers: int) -> None:
    """Three copies for two steps, then two in the middle of the epoch, then three again over its end: as one copy alone has them."""
    alone = together(steps(a_loader(), BatchSplit(place=0, copies=1), 9))
    loaders = [a_loader(workers) for _ in range(3)]
    first = together(*(steps(one, BatchSplit(place=place, copies=3, max_samples=2), 2) for place, one in enumerate(loaders)))
    state = loaders[0].state_dict()
    second = together(*(steps(one, BatchSplit(place=place, copies=2, max_samples=2), 1) for place, one in enumerate(loaders[1:])))
    loaders[0].load_state_dict(loaders[1].state_dict())
    third = together(*(steps(one, BatchSplit(place=place, copies=3, max_samples=2), 6) for place, one in enumerate(loaders)))
    assert first + second + third == alone
    assert (state["epoch"], state["consumed"]) == (0, 2)


def test_the_last_batch_of_an_epoch_is_divided_too() -> None:
    """The last batch has two samples for three copies: one of them computes at a weight of nothing, and none is missing."""
    found = together(*(steps(a_loader(endless=False), BatchSplit(place=place, copies=3), 4) for place in range(3)))
    assert [len(step) for step in found] == [6, 6, 6, 2]
    assert sorted(one for step in found for one in step) == list(range(20))


class Endless(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


DATA = TensorDataset(torch.arange(20))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(DATA, 6, shuffle=True), "a generator that is seeded equally everywhere"),
        (lambda: DataLoader(DATA, 6, sampler=DistributedSampler(DATA, 2, 0)), "remove the DistributedSampler"),
        (lambda: DataLoader(Endless(), 6), "a dataset with a length"),
        (lambda: DataLoader(DATA, None), "a DataLoader with a batch size"),
        (lambda: DataLoader(DATA, 6, in_order=False), "remove in_order=False"),
    ],
    ids=["another order on each rank", "shared out already", "no length", "no batch", "out of order"],
)
def test_a_loader_that_cannot_be_divided_is_refused(loader: Callable[[], DataLoader[Any]], words: str) -> None:
    """The error names the cure."""
    with pytest.raises(ValueError, match=words):
        holdfast.Loader(loader()).split_batches(BatchSplit(place=0, copies=2))


def test_divided_batches_are_not_given_otherwise() -> None:
    """A loop that takes batches both ways would see wrong samples."""
    loader = a_loader()
    steps(loader, BatchSplit(place=0, copies=2), 1)
    with pytest.raises(RuntimeError, match="batches only from"):
        next(iter(loader))
