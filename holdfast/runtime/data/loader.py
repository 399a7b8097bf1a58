"""A `DataLoader` with a position: a resumed run sees exactly the batches that an undisturbed one would see."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from holdfast.runtime.data.batch_shards import BatchShard, BatchSplit, Share, cut
from holdfast.runtime.state import rng
from holdfast.runtime.telemetry.wait_windows import process_waits
from holdfast.runtime.world import World

_END: Final = object()


class Loader:
    """Walk through a `DataLoader`, epoch after epoch, and know how far.

    The position counts the batches handed out, not those that workers have loaded ahead. After a resume the order of the
    epoch is drawn again from the generators as they were at its beginning, the batches already seen are passed over
    without loading them, and the generators are left as they are. ``set_epoch`` of a sampler is called at each epoch.

    With workers, each batch is loaded with generators seeded for this very batch, so that random augmentation does not
    depend on which worker loads it, nor on where a resumed run began. (A dataset that keeps a generator of its own is
    beyond this.) An `IterableDataset` has no order to pass over: it is read again up to the position.

    When the number of ranks changes, a sampler that splits the data among them (``num_replicas``) goes on after the same
    number of samples over all ranks; ranks that are new follow rank 0.

    `Session.shares` has it share a step's batch out: its batches are whole steps' then, drawn by all ranks in the same order, and each rank
    loads its own samples of them.
    """

    follows_rank_0: Final = True
    """A rank that did not exist when the checkpoint was written takes the position of rank 0."""

    def __init__(self, loader: DataLoader[Any], *, endless: bool = True) -> None:
        """Take *loader*; *endless*: iterating goes on from epoch to epoch, else it ends with each."""
        if not isinstance(loader, DataLoader):
            raise TypeError(f"Loader(...) got a {type(loader).__name__}, but must be a torch.utils.data.DataLoader")
        self.loader, self.endless = loader, endless
        self.epoch = 0
        """The present epoch, counted from 0."""
        self.consumed = 0
        """Batches of this epoch handed out."""
        self._begin: rng.State | None = None
        self._begin_generators: list[torch.Tensor] = []
        self._inner: Iterator[Any] | None = None
        self._order: _Order | None = None
        self._deal: BatchSplit | None = None
        self._unwanted = 0
        """Batches that are to be passed over before the next one is handed out."""
        self._handed, self._per_step = 0, 1
        self._base_seeds = torch.Generator()
        self._ours = self._prepared(loader)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Go on at the present position."""
        if self._deal is not None:
            raise RuntimeError("session.shares() shares this Loader's batches out: take them from there alone")
        while True:
            batch = self._next()
            if batch is not _END:
                self.consumed += 1
                if self._unwanted:
                    self._unwanted -= 1
                    continue
                self._handed += 1
                yield batch
                continue
            if self.endless and self.consumed == 0:
                raise RuntimeError("the DataLoader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True")
            self.epoch, self.consumed = self.epoch + 1, 0
            self._begin = self._inner = None
            if not self.endless:
                return

    def _next(self) -> Any:  # noqa: ANN401 (a batch, or the end of the epoch)
        inner = self._open() if self._inner is None else self._inner
        window = process_waits()
        ours = self.loader.num_workers > 0 and window.enter("data")  # without workers this process itself is at work
        try:
            return next(inner, _END)
        finally:
            if ours:
                window.leave()

    # -- sharing out --------------------------------------------------------------------------------------------------

    def deal(self, deal: BatchSplit) -> None:
        """Load only this copy's samples of each batch from now on, which begins a step."""
        if self._deal == deal:
            return
        if self._deal is None:
            self._check_can_deal()
        self._deal = deal
        if self._inner is not None:  # what was loaded ahead was for other shares
            self.load_state_dict(self.state_dict())

    def _check_can_deal(self) -> None:
        order, sampler = self._order, self.loader.sampler
        if order is None or self.loader.batch_sampler is None:
            raise ValueError("session.shares() needs a DataLoader with a batch size, over a dataset with a length")
        if not getattr(self.loader, "in_order", True):
            raise ValueError("session.shares() needs a DataLoader that gives batches in their order: leave in_order=False out")
        if any(getattr(part, "num_replicas", 1) > 1 for part in self._parts()):
            raise ValueError(
                "session.shares() shares each batch out itself: leave the DistributedSampler out, and give the DataLoader the batch size "
                "of a whole step and a sampler that gives the same order on every rank"
            )
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            raise ValueError(
                "session.shares() needs the same order on every rank: give the DataLoader (or its RandomSampler) a generator that is "
                "seeded alike everywhere, generator=torch.Generator().manual_seed(...)"
            )

    @property
    def samples_of_a_step(self) -> int:
        """Return the samples in a batch; 0 where only the batch sampler knows."""
        return int(self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", 0) or 0)

    def step_shares(self) -> Iterator[Share]:
        """Return what this copy has to compute of the next step, part by part; nothing at the end of an epoch that is the last."""
        assert self._order is not None
        while True:
            batch = self._next()
            if batch is _END:
                if self.endless and self.consumed == 0:
                    raise RuntimeError("the DataLoader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True")
                self.epoch, self.consumed = self.epoch + 1, 0
                self._begin = self._inner = None
                if self.endless:
                    continue
                return
            told = self._order.cuts.popleft()
            self.consumed += told.last
            if self._unwanted:
                self._unwanted -= told.last
                continue
            self._handed += told.last
            yield Share(batch=batch, weight=told.weight, last=told.last)
            if told.last:
                return

    # -- position -----------------------------------------------------------------------------------------------------
    def begin_step(self, *, skip: int = 0) -> None:
        """Learn that a step begins, and pass over the batches of *skip* steps first: as many each as the step before took."""
        if self._handed:
            self._per_step, self._handed = self._handed, 0
        self._unwanted += skip * self._per_step

    def can_take_rank(self, ranks: int) -> bool:
        """Tell whether samplers that split the data do so among all *ranks*: then it is known which part another rank has."""
        return all(part.num_replicas in (1, ranks) for part in self._parts() if hasattr(part, "num_replicas"))

    def take_rank(self, rank: int, ranks: int) -> None:
        """Let samplers that split the data among all *ranks* give the part of *rank* from now on."""
        for part in self._parts():
            if getattr(part, "num_replicas", 0) == ranks and hasattr(part, "rank"):
                part.rank = rank
        self._inner = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order of this epoch was drawn from."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "begin": self._begin,
            "generators": [one.get_state() for one in self._generators()] if self._begin is None else self._begin_generators,
            "ranks": World.present().size,
            "batch": self._samples_of_a_batch(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position in *state*; the next batch is the one that followed it."""
        wanted = {"epoch", "consumed", "begin", "generators", "ranks", "batch"}
        if not wanted <= state.keys():
            raise ValueError(f"this is no position of a holdfast.Loader: it lacks {', '.join(sorted(wanted - state.keys()))}")
        generators = self._generators()
        if len(generators) != len(state["generators"]):
            raise ValueError(
                f"the DataLoader has {len(generators)} generators of its own, not {len(state['generators'])} as when this position was kept"
            )
        for generator, value in zip(generators, state["generators"], strict=True):
            generator.set_state(value)
        self.epoch, self.consumed = state["epoch"], self._converted(state)
        self._begin, self._inner = state["begin"], None

    def _converted(self, state: dict[str, Any]) -> int:
        """Return how many batches of the present size, over the present ranks, are as many samples as *state* tells of."""
        ranks = World.present().size if hasattr(self.loader.sampler, "num_replicas") else state["ranks"]
        batch = self._samples_of_a_batch()
        return int(state["consumed"] * state["ranks"] * state["batch"] // (ranks * batch))

    def _samples_of_a_batch(self) -> int:
        """Return the samples in a batch of one rank; 1 where only the batch sampler knows."""
        return self.loader.batch_size or 1

    def _open(self) -> Iterator[Any]:
        """Begin the epoch, or come back to its middle."""
        for part in self._parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        if self._begin is None:
            self._begin = rng.capture()
            self._begin_generators = [one.get_state() for one in self._generators()]
            self._inner = self._begun(skip=0)
        else:
            self._begin_generators = [one.get_state() for one in self._generators()]
            with rng.temporarily(self._begin):
                self._inner = self._begun(skip=self.consumed)
        return self._inner

    def _begun(self, skip: int) -> Iterator[Any]:
        """Return an iterator over the epoch that stands after *skip* batches."""
        assert self._begin is not None
        name = f"{_first_number(self._begin)}:{self.epoch}:{World.present().rank}"
        # Workers that stay draw no base seed in their second epoch: it must not come from where the order is drawn.
        self._base_seeds.manual_seed(_seed_of(name))
        if self._order is None:
            inner = iter(self._ours)
            for _ in range(skip):
                next(inner, None)
            return inner
        self._order.begin(skip, name, self._deal)
        inner = iter(self._ours)
        self._order.pass_over()
        return inner

    def _prepared(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy of *loader* whose order can begin in the middle; the user's own stays as it is."""
        ours = copy.copy(loader)
        ours.generator = self._base_seeds
        if isinstance(loader.dataset, IterableDataset):
            return ours
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._order = _Order(getattr(loader, place), marked=loader.num_workers > 0)
        vars(ours)[place] = self._order  # a DataLoader refuses to be changed by assignment
        if loader.num_workers > 0:
            vars(ours)["dataset"] = _Seeded(loader.dataset)
        return ours

    def _parts(self) -> list[Any]:
        """Return what decides on the order: the samplers, each once."""
        batches = self.loader.batch_sampler
        found = (self.loader.sampler, batches, getattr(batches, "sampler", None))
        return list({id(part): part for part in found if part is not None}.values())

    def _generators(self) -> list[torch.Generator]:
        """Return the user's own generators, each once."""
        found = (getattr(part, "generator", None) for part in (self.loader, *self._parts()))
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class _Marked(NamedTuple):
    """What to load (an index, or a batch of them), and the *seed* to load it with."""

    seed: int
    index: Any


class _Order:
    """A sampler that can pass over the beginning of its order."""

    def __init__(self, sampler: Any, *, marked: bool) -> None:  # noqa: ANN401 (anything that can be iterated)
        self._sampler, self._marked = sampler, marked
        self._skip, self._name = 0, ""
        self._deal: BatchSplit | None = None
        self._latest: _Walk | None = None
        self.cuts: deque[BatchShard] = deque()
        """Of batches that are shared out, what the next parts to come are."""

    def begin(self, skip: int, name: str, deal: BatchSplit | None = None) -> None:
        """Let the next walk begin after *skip* batches; *name* is the epoch's own, for seeds; *deal*: how batches are shared out."""
        self._skip, self._name, self._deal = skip, name, deal

    def pass_over(self) -> None:
        """Draw the order now, while the generators are those of the epoch's beginning."""
        if self._skip and self._latest is not None:
            self._latest.start()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> _Walk:
        name = self._name if self._marked else None
        if self._deal is None:
            self._latest = _Walk(self._sampler, self._skip, name)
        else:
            self.cuts = deque()
            self._latest = _Dealt(self._sampler, self._skip, name, self._deal, self.cuts)
        return self._latest


class _Walk:
    """One walk through an order; draws nothing before its first step, for a DataLoader begins two and uses one."""

    def __init__(self, sampler: Any, skip: int, name: str | None) -> None:  # noqa: ANN401 (as above)
        self._sampler, self._number, self._name = sampler, skip, name
        self._inner: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Begin, and pass over what is to be passed over."""
        if self._inner is None:
            self._inner = iter(self._sampler)
            for _ in range(self._number):
                next(self._inner, None)
        return self._inner

    def __iter__(self) -> _Walk:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 (an index, or a batch of them)
        index = next(self.start())
        self._number += 1
        if self._name is None:
            return index
        return _Marked(_seed_of(f"{self._name}:{self._number}"), index)


class _Dealt(_Walk):
    """A walk that gives one copy's parts of each batch; what they are stands beside, in the order in which they come."""

    def __init__(self, sampler: Any, skip: int, name: str | None, deal: BatchSplit, cuts: deque[BatchShard]) -> None:  # noqa: ANN401 (as above)
        super().__init__(sampler, skip, name)
        self._deal, self._cuts = deal, cuts
        self._parts: deque[tuple[list[Any], BatchShard]] = deque()

    def __next__(self) -> Any:  # noqa: ANN401 (a batch of indexes)
        if not self._parts:
            self._parts.extend(cut(list(next(self.start())), self._deal))
            self._number += 1
        index, told = self._parts.popleft()
        self._cuts.append(told)
        return index if self._name is None else _Marked(_seed_of(f"{self._name}:{self._number}:{len(self._parts)}"), index)


class _Seeded:
    """A dataset that loads each marked batch with generators seeded for it; in all else it is the user's."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401 (any dataset)
        vars(self)["_dataset"] = dataset

    def __getitem__(self, marked: _Marked) -> Any:  # noqa: ANN401 (a sample)
        _seed(marked.seed)
        return self._dataset[marked.index]

    def __getitems__(self, marked: _Marked) -> Sequence[Any]:
        _seed(marked.seed)
        if getattr(self._dataset, "__getitems__", None):
            found: Sequence[Any] = self._dataset.__getitems__(marked.index)
            return found
        return [self._dataset[index] for index in marked.index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (the dataset's own)
        if name.startswith("__") or name == "_dataset":  # asked for while unpickling, before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)


def _seed_of(name: str) -> int:
    """Return a seed that belongs to *name* alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _seed(seed: int) -> None:
    """Seed the generators of this worker."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _first_number(state: rng.State) -> int:
    """Return the number that torch's generator would draw in *state*."""
    generator = torch.Generator()
    generator.set_state(state["torch"])
    return int(torch.randint(2**62, (), generator=generator).item())
