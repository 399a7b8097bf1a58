"""A `DataLoader` with a position: a resumed run sees exactly the batches that an undisturbed one would see."""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from holdfast.plurals import plural
from holdfast.runtime.data.batch_shards import BatchShard, BatchSplit, MicroBatch, split
from holdfast.runtime.data.prepared import PreparedLoader
from holdfast.runtime.state import rng
from holdfast.runtime.telemetry.wait_windows import process_waits
from holdfast.runtime.world import World

_log: Final = logging.getLogger("holdfast.runtime")

_END: Final = object()


class Loader:
    """Iterate over a ``DataLoader`` with a position that is saved and restored: a resumed run sees the same batches as an undisturbed one.

    - The position counts batches that were returned, not batches that workers have prefetched. A resume draws the order of the epoch
      again, and skips the batches that were used without loading them. An ``IterableDataset`` is read again up to the position.
    - ``set_epoch`` of a sampler is called at the beginning of each epoch.
    - With workers, the random generators are seeded for each batch, so that random augmentation is the same after a resume. This does not
      cover a dataset with its own generator.
    - When the number of ranks changes, a sampler with ``num_replicas`` continues after the same number of samples over all ranks.
    - What ``accelerator.prepare`` of Accelerate makes of a ``DataLoader`` gives the same batches, on its device.
    - With `Session.micro_batches`, the batches are those of complete steps, and each rank loads its part of them.

    Args:
        loader: The ``torch.utils.data.DataLoader`` to iterate over, prepared by Accelerate or not. It is not changed.
        endless: Continue with the next epoch at the end of one; otherwise iteration ends with each epoch.

    Raises:
        TypeError: ``loader`` is not a ``DataLoader``, or one that Accelerate dispatches from rank 0.
        RuntimeError: While iterating: an epoch has no batch, or `Session.micro_batches` divides the batches of this loader.
    """

    follows_rank_0: Final = True
    """A rank that did not exist when the checkpoint was written takes the position of rank 0."""

    def __init__(self, loader: DataLoader[Any], *, endless: bool = True) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(f"Loader(...) got a {type(loader).__name__}, but must be a torch.utils.data.DataLoader")
        self._prepared = PreparedLoader.of(loader)
        self.loader = loader = loader if self._prepared is None else self._prepared.inner
        self.endless = endless
        self.epoch: int = 0
        """Current epoch, counted from 0."""
        self.consumed: int = 0
        """Number of batches of this epoch that were returned."""
        self._begin: rng.State | None = None
        self._begin_generators: list[torch.Tensor] = []
        self._inner: Iterator[Any] | None = None
        self._order: _Order | None = None
        self._split: BatchSplit | None = None
        self._to_skip = 0
        """Batches to skip before the next one is handed out."""
        self._handed_out, self._per_step = 0, 1
        self._taken = 0
        """Samples in the batches of this step, of all ranks."""
        self._base_seeds = torch.Generator()
        self.before_batch: Callable[[], None] | None = None
        """Called before a batch is drawn, but not where an epoch is found to have ended: a session begins its step."""
        self._resumable = self._make_resumable(loader)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Continue at the current position."""
        if self._split is not None:
            raise RuntimeError("session.micro_batches() divides the batches of this Loader: take batches only from there")
        while True:
            batch = self._next()
            if batch is not _END:
                self.consumed += 1
                if self._to_skip:
                    self._to_skip -= 1
                    continue
                self._handed_out += 1
                self._taken += self._samples_of_all_ranks()
                yield batch if self._prepared is None else self._prepared.place(batch, last=self.at_end)
                continue
            self._end_epoch()
            if not self.endless:
                return

    @property
    def length(self) -> int | None:
        """Number of batches in an epoch; None where only the end of the epoch shows it."""
        if self._order is None:  # the length of an IterableDataset is a guess
            return None
        try:
            return len(self.loader)
        except TypeError:
            return None

    @property
    def at_end(self) -> bool:
        """Whether the epoch is known to have no batch left."""
        length = self.length
        return length is not None and self.consumed >= length

    def leave_finished_epoch(self) -> None:
        """Continue with the next epoch where this one has ended: the ranks that this process joins are at a batch of that one."""
        if not self.endless and self.at_end:
            if self._inner is None:
                next(self._open(), None)  # what the finished epoch drew from the generators: the order of the next one follows it
            self._end_epoch()

    def announce_batch(self) -> None:
        """Let a session begin its step, unless the epoch has ended: then code between two epochs follows, and no batch."""
        if self.before_batch is not None and (self.endless or not self.at_end):
            self.before_batch()

    def _next(self) -> Any:  # noqa: ANN401 (a batch, or the end of the epoch)
        self.announce_batch()
        inner = self._open() if self._inner is None else self._inner
        window = process_waits()
        opened = self.loader.num_workers > 0 and window.enter("data")  # without workers this process itself does the work
        try:
            return next(inner, _END)
        finally:
            if opened:
                window.leave()

    def _end_epoch(self) -> None:
        """Begin the next epoch; raise ``RuntimeError`` when this one was empty, for then there is no end."""
        if self.endless and self.consumed == 0:
            raise RuntimeError("the DataLoader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True")
        self.epoch, self.consumed = self.epoch + 1, 0
        self._begin = self._inner = None
        if self._prepared is not None:
            self._prepared.end_epoch()

    def begin_epoch(self, epoch: int) -> None:
        """Let the next iteration begin at the first batch of an epoch, wherever the current one is.

        Args:
            epoch: Number of the epoch, for the samplers' ``set_epoch``.
        """
        self.epoch, self.consumed, self._to_skip = epoch, 0, 0
        self._begin = self._inner = None

    # -- dividing batches ---------------------------------------------------------------------------------------------

    def split_batches(self, how: BatchSplit) -> None:
        """Load only this copy's samples of each batch from the next step on."""
        if self._split == how:
            return
        if self._split is None:
            self._check_can_split()
        self._split = how
        if self._inner is not None:  # what was loaded ahead was for another division
            self.load_state_dict(self.state_dict())

    def _check_can_split(self) -> None:
        sampler = self.loader.sampler
        if self._order is None or self.loader.batch_sampler is None:
            raise ValueError("session.micro_batches() needs a DataLoader with a batch size, over a dataset with a length")
        if not getattr(self.loader, "in_order", True):
            raise ValueError("session.micro_batches() needs a DataLoader that gives batches in their order: remove in_order=False")
        if any(getattr(part, "num_replicas", 1) > 1 for part in self._samplers()):
            raise ValueError(
                "session.micro_batches() divides each batch itself: remove the DistributedSampler, and give the DataLoader the batch size "
                "of a complete step and a sampler that gives the same order on every rank"
            )
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            raise ValueError(
                "session.micro_batches() needs the same order on every rank: give the DataLoader (or its RandomSampler) a generator "
                "that is seeded equally everywhere, generator=torch.Generator().manual_seed(...)"
            )

    @property
    def samples_of_a_step(self) -> int:
        """Return the samples in a batch; 0 where only the batch sampler knows."""
        return int(self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", 0) or 0)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield what this copy computes of the next step; nothing at the end of the last epoch."""
        assert self._order is not None
        while True:
            batch = self._next()
            if batch is _END:
                self._end_epoch()
                if self.endless:
                    continue
                return
            shard = self._order.shards.popleft()
            self.consumed += shard.last
            if self._to_skip:
                self._to_skip -= shard.last
                continue
            self._handed_out += shard.last
            self._taken += shard.of * shard.last
            yield MicroBatch(batch=batch, weight=shard.weight, last=shard.last)
            if shard.last:
                return

    # -- position -----------------------------------------------------------------------------------------------------

    @property
    def samples_taken(self) -> int | None:
        """Return the samples that all ranks together took since the step began; None where that is unknown."""
        return self._taken or None

    def _samples_of_all_ranks(self) -> int:
        """Return the samples in one batch of every rank; 0 where it is unknown whether other ranks have the same ones."""
        parts = self._samplers()
        if any(getattr(part, "split_batches", False) for part in parts):  # Accelerate's: each batch is one of all ranks
            return self.samples_of_a_step
        copies = max((int(getattr(part, "num_replicas", getattr(part, "num_processes", 1))) for part in parts), default=1)
        return self.samples_of_a_step * copies if copies > 1 or World.current().size == 1 else 0

    def begin_step(self, *, skip: int = 0) -> None:
        """Begin a step, and skip the batches of *skip* steps first: as many for each as the step before took."""
        self._taken = 0
        if self._handed_out:
            self._per_step, self._handed_out = self._handed_out, 0
        self._to_skip += skip * self._per_step

    def can_take_rank(self, ranks: int) -> bool:
        """Return whether samplers that divide the data do so among all *ranks*: then the part of another rank is known."""
        return all(part.num_replicas in (1, ranks) for part in self._samplers() if hasattr(part, "num_replicas"))

    def take_rank(self, rank: int, ranks: int) -> None:
        """Let samplers that divide the data among all *ranks* give the part of *rank* from now on."""
        for part in self._samplers():
            if getattr(part, "num_replicas", 0) == ranks and hasattr(part, "rank"):
                part.rank = rank
        self._inner = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the random generators from which the order of this epoch was drawn.

        Returns:
            The state, for `load_state_dict` on the same rank.
        """
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "begin": self._begin,
            "generators": [one.get_state() for one in self._generators()] if self._begin is None else self._begin_generators,
            "ranks": self._parts,
            "batch": self._samples_of_a_batch(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position: the next batch is the one that followed it.

        Args:
            state: What `state_dict` returned, in a process with the same dataset; batch size and number of ranks may differ.

        Raises:
            ValueError: ``state`` is not the state of a `Loader`, or the ``DataLoader`` has a different number of generators.
        """
        keys = {"epoch", "consumed", "begin", "generators", "ranks", "batch"}
        if not keys <= state.keys():
            raise ValueError(f"this is not the position of a holdfast.Loader: it lacks {', '.join(sorted(keys - state.keys()))}")
        generators = self._generators()
        if len(generators) == len(state["generators"]):
            for generator, value in zip(generators, state["generators"], strict=True):
                generator.set_state(value)
        elif self._parts == state["ranks"]:
            raise ValueError(
                f"the DataLoader has {len(generators)} generators, and had {len(state['generators'])} when this position was stored"
            )
        else:  # Accelerate gives a sampler a generator where there are several ranks
            _log.warning(
                "epoch %d was divided among %s, and is read by %d in another order: some of its samples come again, and others are "
                "left out",
                *(int(state["epoch"]) + 1, plural(state["ranks"], "rank"), self._parts),
            )
        # The position in batches of the current size, over the current ranks, after as many samples.
        self.epoch = state["epoch"]
        self.consumed = int(state["consumed"] * state["ranks"] * state["batch"] // (self._parts * self._samples_of_a_batch()))
        self._begin, self._inner = state["begin"], None

    @property
    def _is_divided(self) -> bool:
        """Whether a sampler gives each rank other batches."""
        parts = self._samplers()
        return any(hasattr(part, "num_replicas") or (hasattr(part, "num_processes") and not part.split_batches) for part in parts)

    @property
    def _parts(self) -> int:
        """Return the number of parts into which the batches are divided: one for each rank, or a single one that all ranks read."""
        return World.current().size if self._is_divided else 1

    def _samples_of_a_batch(self) -> int:
        """Return the samples in a batch of one rank; 1 where only the batch sampler knows."""
        return self.loader.batch_size or 1

    def _open(self) -> Iterator[Any]:
        """Begin the epoch, or return to its middle."""
        if self._prepared is not None:
            self._prepared.begin_epoch(self.epoch)
        for part in self._samplers():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        self._begin_generators = [one.get_state() for one in self._generators()]
        if self._begin is None:
            self._begin = rng.capture()
            self._inner = self._iterator(self._begin, skip=0)
        else:
            with rng.temporarily(self._begin):
                self._inner = self._iterator(self._begin, skip=self.consumed)
        return self._inner

    def _iterator(self, begin: rng.State, skip: int) -> Iterator[Any]:
        """Return an iterator over the epoch with the generators *begin*, after *skip* batches."""
        drawn = torch.Generator()
        drawn.set_state(begin["torch"])
        name = f"{int(torch.randint(2**62, (), generator=drawn).item())}:{self.epoch}:{World.current().rank}"
        # Persistent workers draw no base seed in their second epoch: it must not come from the generator of the order.
        self._base_seeds.manual_seed(_seed_of(name))
        if self._order is None:
            inner = iter(self._resumable)
            for _ in range(skip):
                next(inner, None)
            return inner
        self._order.begin(skip, name, self._split)
        inner = iter(self._resumable)
        self._order.skip_now()
        return inner

    def _make_resumable(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy of *loader* whose order can begin in the middle; the user's own stays as it is."""
        resumable = copy.copy(loader)
        resumable.generator = self._base_seeds
        if isinstance(loader.dataset, IterableDataset):
            return resumable
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._order = _Order(getattr(loader, place), seeded=loader.num_workers > 0)
        vars(resumable)[place] = self._order  # a DataLoader refuses assignment
        if loader.num_workers > 0:
            vars(resumable)["dataset"] = _SeededDataset(loader.dataset)
        return resumable

    def _samplers(self) -> list[Any]:
        """Return what decides the order: the samplers, each once."""
        found, new = dict[int, Any](), [self.loader.sampler, self.loader.batch_sampler]
        while new:
            part = new.pop(0)
            if part is not None and id(part) not in found:
                found[id(part)] = part
                new += [getattr(part, "sampler", None), getattr(part, "batch_sampler", None)]  # Accelerate's shard has another inside
        return list(found.values())

    def _generators(self) -> list[torch.Generator]:
        """Return the user's own generators, each once."""
        found = (getattr(part, "generator", None) for part in (self.loader, *self._samplers()))
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class _Seeded(NamedTuple):
    """What to load (an index, or a batch of them), and the *seed* to load it with."""

    seed: int
    index: Any


class _Order:
    """A sampler that can skip the beginning of its order."""

    def __init__(self, sampler: Any, *, seeded: bool) -> None:  # noqa: ANN401 (anything that can be iterated)
        self._sampler, self._seeded = sampler, seeded
        self._skip, self._name = 0, ""
        self._split: BatchSplit | None = None
        self._latest: _Walk | None = None
        self.shards: deque[BatchShard] = deque()
        """Of divided batches: what the next micro-batches are."""

    def begin(self, skip: int, name: str, how: BatchSplit | None = None) -> None:
        """Let the next walk begin after *skip* batches; *name* is unique to the epoch, for seeds; *how*: how batches are divided."""
        self._skip, self._name, self._split = skip, name, how

    def skip_now(self) -> None:
        """Draw the order now, while the generators are those of the epoch's beginning."""
        if self._skip and self._latest is not None:
            self._latest.start()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> _Walk:
        name = self._name if self._seeded else None
        self.shards = deque()
        self._latest = _Walk(self._sampler, self._skip, name, self._split, self.shards)
        return self._latest


class _Walk:
    """One walk through an order; it draws nothing before its first step, because a DataLoader begins two and uses one.

    With a *split* it yields one copy's micro-batches of each batch, and adds their descriptions to *shards*, in the same order.
    """

    def __init__(self, sampler: Any, skip: int, name: str | None, how: BatchSplit | None, shards: deque[BatchShard]) -> None:  # noqa: ANN401 (as above)
        self._sampler, self._number, self._name, self._split, self._shards = sampler, skip, name, how, shards
        self._inner: Iterator[Any] | None = None
        self._parts: deque[tuple[list[Any], BatchShard]] = deque()

    def start(self) -> Iterator[Any]:
        """Begin, and skip what is to be skipped."""
        if self._inner is None:
            self._inner = iter(self._sampler)
            for _ in range(self._number):
                next(self._inner, None)
        return self._inner

    def __iter__(self) -> _Walk:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 (an index, or a batch of them)
        part = ""
        if self._split is None:
            index = next(self.start())
            self._number += 1
        else:
            if not self._parts:
                self._parts.extend(split(list(next(self.start())), self._split))
                self._number += 1
            index, shard = self._parts.popleft()
            self._shards.append(shard)
            part = f":{len(self._parts)}"
        return index if self._name is None else _Seeded(_seed_of(f"{self._name}:{self._number}{part}"), index)


class _SeededDataset:
    """A dataset that loads each batch with generators seeded for it; otherwise it behaves as the user's."""

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401 (any dataset)
        vars(self)["_dataset"] = dataset

    def __getitem__(self, seeded: _Seeded) -> Any:  # noqa: ANN401 (a sample)
        _seed_generators(seeded.seed)
        return self._dataset[seeded.index]

    def __getitems__(self, seeded: _Seeded) -> Sequence[Any]:
        _seed_generators(seeded.seed)
        if getattr(self._dataset, "__getitems__", None):
            found: Sequence[Any] = self._dataset.__getitems__(seeded.index)
            return found
        return [self._dataset[index] for index in seeded.index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (the dataset's own)
        if name.startswith("__") or name == "_dataset":  # requested while unpickling, before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)


def _seed_of(name: str) -> int:
    """Return a seed that is unique to *name*."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _seed_generators(seed: int) -> None:
    """Seed the generators of this worker."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
