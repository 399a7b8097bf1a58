"""A loader resumed anywhere gives what an undisturbed one gives."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import holdfast
from holdfast.runtime.data.batch_shards import BatchSplit
from holdfast.runtime.state import rng


class Counted(Dataset[Tensor]):
    """Numbers with noise from every generator, which also counts how often it was asked."""

    def __init__(self, size: int = 26, *, noise: bool = True) -> None:
        self.size, self.noise, self.asked = size, noise, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Tensor:
        self.asked += 1
        noise = random.random() + float(np.random.random()) + float(torch.rand(())) if self.noise else 0.0  # noqa: NPY002
        return torch.tensor([float(number), noise], dtype=torch.float64)


class Batched(Counted):
    """A dataset that returns complete batches."""

    def __getitems__(self, numbers: list[int]) -> list[Tensor]:
        return [self[number] + 100 for number in numbers]


class Stream(IterableDataset[Tensor]):
    """A dataset without an order."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20.0))


def own(seed: int) -> torch.Generator:
    """Make a generator that belongs to one loader."""
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Counted(), 4),
    "shuffled": lambda: DataLoader(Counted(), 4, shuffle=True),
    "shuffled, last dropped": lambda: DataLoader(Counted(), 4, shuffle=True, drop_last=True),
    "shuffled by workers": lambda: DataLoader(Counted(), 4, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(Counted(), 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3),
    "spawned workers": lambda: DataLoader(Counted(12), 4, shuffle=True, num_workers=1, multiprocessing_context="spawn"),
    "a generator of its own": lambda: DataLoader(Counted(), 4, shuffle=True, generator=own(5)),
    "a generator of its own, workers": lambda: DataLoader(Counted(), 4, shuffle=True, generator=own(5), num_workers=1),
    "two generators": lambda: DataLoader(Counted(), 4, sampler=RandomSampler(range(26), generator=own(1)), generator=own(2)),
    "with replacement": lambda: DataLoader(Counted(), 4, sampler=RandomSampler(range(26), replacement=True, num_samples=70)),
    "a subset": lambda: DataLoader(Counted(), 4, sampler=SubsetRandomSampler(range(3, 20))),
    "weighted": lambda: DataLoader(Counted(), 4, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 8, 22)),
    "a batch sampler": lambda: DataLoader(Counted(), batch_sampler=BatchSampler(RandomSampler(range(26)), 5, drop_last=False)),
    "single samples": lambda: DataLoader(Counted(9), batch_size=None, shuffle=True),
    "single samples, workers": lambda: DataLoader(Counted(9), batch_size=None, shuffle=True, num_workers=2),
    "one of three ranks": lambda: DataLoader(Counted(), 3, sampler=DistributedSampler(Counted(26), 3, 1, seed=4)),
    "one of three ranks, workers": lambda: DataLoader(Counted(), 3, sampler=DistributedSampler(Counted(26), 3, 1, seed=4), num_workers=1),
    "whole batches": lambda: DataLoader(Batched(), 4, shuffle=True),
    "whole batches, workers": lambda: DataLoader(Batched(), 4, shuffle=True, num_workers=2),
    "a stream": lambda: DataLoader(Stream(), 3),
    "a stream, workers": lambda: DataLoader(Stream(), 3, num_workers=2),
}


CASES = [
    pytest.param(name, before, marks=pytest.mark.long if name == "spawned workers" else ())
    for name in LOADERS
    for before in ((2,) if name == "spawned workers" else (1, 6, 7, 9))
]


def seeded() -> None:
    """Seed every generator."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)  # noqa: NPY002 (the global generator is the point)


def walk(loader: holdfast.Loader, count: int) -> list[Any]:
    """Take *count* batches as a training loop does, with random numbers drawn in between."""
    return [[batch.tolist(), float(torch.rand(())), random.random()] for batch in islice(loader, count)]


def kept(loader: holdfast.Loader) -> dict[str, Any]:
    """Return the loader's position as a checkpoint would give it back."""
    whole = io.BytesIO()
    torch.save(loader.state_dict(), whole)
    whole.seek(0)
    state: dict[str, Any] = torch.load(whole, weights_only=True)
    return state


@pytest.mark.parametrize(("name", "before"), CASES)
def test_a_resumed_loader_continues_as_an_undisturbed_one(name: str, before: int) -> None:
    """Order, noise and the generators themselves are the same, inside an epoch, at its end, and in the second."""
    seeded()
    undisturbed = holdfast.Loader(LOADERS[name]())
    whole = walk(undisturbed, before + (1 if name == "spawned workers" else 12))
    seeded()
    first = holdfast.Loader(LOADERS[name]())
    assert walk(first, before) == whole[:before]
    position, generators = kept(first), rng.capture()
    torch.manual_seed(99)
    random.seed(99)
    second = holdfast.Loader(LOADERS[name]())
    second.load_state_dict(position)
    rng.apply(generators)
    assert walk(second, len(whole) - before) == whole[before:]
    assert (second.epoch, second.consumed) == (undisturbed.epoch, undisturbed.consumed)


def test_batches_already_seen_are_not_loaded_again() -> None:
    """Ten batches are passed over by index: the dataset is asked for the eleventh alone."""
    first = holdfast.Loader(DataLoader(Counted(100), 4, shuffle=True))
    walk(first, 10)
    dataset = Counted(100)
    second = holdfast.Loader(DataLoader(dataset, 4, shuffle=True))
    second.load_state_dict(kept(first))
    next(iter(second))
    assert dataset.asked == 4


def test_an_epoch_at_a_time_ends_with_each_epoch() -> None:
    """With endless=False a for loop is one epoch, and the next loop the next one; len is the epoch's."""
    loader = holdfast.Loader(DataLoader(Counted(), 4), endless=False)
    assert [len(list(loader)) for _ in range(3)] == [7, 7, 7]
    assert (len(loader), loader.epoch, loader.consumed) == (7, 3, 0)


def test_a_loop_left_early_continues_where_it_was() -> None:
    """Breaking out of a loop and looping again misses and repeats nothing."""
    loader = holdfast.Loader(DataLoader(Counted(10, noise=False), 1))
    seen = [int(batch[0, 0]) for _ in range(5) for batch in islice(loader, 3)]
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_each_epoch_of_a_distributed_sampler_has_its_own_order() -> None:
    """set_epoch is called; the user need not."""
    loader = holdfast.Loader(DataLoader(Counted(24, noise=False), 4, sampler=DistributedSampler(Counted(24), 2, 0)), endless=False)
    first, second = (torch.cat(list(loader))[:, 0].tolist() for _ in range(2))
    assert first != second


def test_augmentation_does_not_depend_on_the_number_of_workers() -> None:
    """Each batch has its own seed, so one worker and two give the same noise."""
    seeded()
    one = [batch.tolist() for batch in islice(holdfast.Loader(DataLoader(Counted(), 4, shuffle=True, num_workers=1)), 7)]
    seeded()
    two = [batch.tolist() for batch in islice(holdfast.Loader(DataLoader(Counted(), 4, shuffle=True, num_workers=2)), 7)]
    assert one == two
    noise = [value for batch in one for _, value in batch]
    assert len(set(noise)) == len(noise)


def test_the_users_own_loader_stays_as_it_is() -> None:
    """Its samplers and dataset are not changed, and a worker sees the user's dataset through ours."""
    dataset = Counted()
    theirs = DataLoader(dataset, 4, num_workers=1, worker_init_fn=_silence)
    sampler = theirs.batch_sampler
    batch = next(iter(holdfast.Loader(theirs)))
    assert (theirs.dataset, theirs.batch_sampler) == (dataset, sampler)
    assert batch[:, 1].tolist() == [0.0] * 4


def _silence(_: int) -> None:
    """Switch the noise off, as scripts that set up their dataset in each worker do."""
    there = torch.utils.data.get_worker_info()
    assert there is not None
    there.dataset.noise = False  # type: ignore[attr-defined]


def test_wrong_use_is_reported_clearly() -> None:
    """Anything but a DataLoader, one without a batch, and the position of another loader."""
    with pytest.raises(TypeError, match=r"Loader\(...\) got a list"):
        holdfast.Loader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="smaller than a batch"):
        next(iter(holdfast.Loader(DataLoader(Counted(3), 4, drop_last=True))))
    with pytest.raises(ValueError, match="lacks batch, begin"):
        holdfast.Loader(DataLoader(Counted(3))).load_state_dict({"epoch": 1, "consumed": 1, "generators": [], "ranks": 1})
    state = holdfast.Loader(DataLoader(Counted(3), generator=own(1))).state_dict()
    with pytest.raises(ValueError, match=r"0 generators.*\b1\b"):
        holdfast.Loader(DataLoader(Counted(3))).load_state_dict(state)


@pytest.mark.parametrize("of_a_step", [1, 3])
def test_steps_are_done_without_their_batches_and_the_position_counts_them(of_a_step: int) -> None:
    """As many as the step before took; a later resume does not skip them again."""
    loader = holdfast.Loader(DataLoader(Counted(40, noise=False), 1))
    batches, seen = iter(loader), []
    for skip in (0, 0, 2, 0):
        loader.begin_step(skip=skip)
        seen.append([int(next(batches)[0, 0]) for _ in range(of_a_step)])
    first = of_a_step * 4
    assert seen[2] == list(range(first, first + of_a_step))
    assert loader.consumed == 6 * of_a_step
    later = holdfast.Loader(DataLoader(Counted(40, noise=False), 1))
    later.load_state_dict(loader.state_dict())
    assert int(next(iter(later))[0, 0]) == 6 * of_a_step


@pytest.mark.parametrize(("copies", "samples"), [(1, 4), (4, 16)])
def test_the_samples_of_a_step_are_those_of_all_ranks(copies: int, samples: int) -> None:
    """Of two batches twice as many; a new step begins at none."""
    dataset = TensorDataset(torch.zeros(64, 1))
    sampler: DistributedSampler[Any] | None = DistributedSampler(dataset, num_replicas=copies, rank=0) if copies > 1 else None
    loader = holdfast.Loader(DataLoader(dataset, batch_size=4, sampler=sampler))
    batches = iter(loader)
    loader.begin_step()
    assert loader.samples_taken is None
    next(batches)
    assert loader.samples_taken == samples
    next(batches)
    assert loader.samples_taken == 2 * samples
    loader.begin_step()
    assert loader.samples_taken is None


def test_divided_batches_count_as_the_whole_batch_of_the_step() -> None:
    """However many micro-batches this copy computes of it."""
    loader = holdfast.Loader(DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=16))
    loader.split_batches(BatchSplit(place=1, copies=2, max_samples=4))
    loader.begin_step()
    assert len(list(loader.micro_batches())) == 2
    assert loader.samples_taken == 16
