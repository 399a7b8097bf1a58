# ruff: noqa: SLF001, ANN401 (a position is in private attributes of Lightning's loader; batches are of any type)
"""The training data of Lightning, with a position: which batches of each loader an epoch has used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.runtime.data.loader import Loader
from holdfast.runtime.state import rng
from holdfast.runtime.state.training import Stateful


def track(combined: Any, epoch: Callable[[], int]) -> None:
    """Have *combined*, a ``CombinedLoader``, count what is taken from it; *epoch* returns the number of the current epoch.

    `tracker_of` returns what counts. The loader stays the object that Lightning and the script hold, so its class changes.
    """
    tracker = Tracker(combined, [_source(loader, epoch) for loader in combined.flattened])
    if tracker_of(combined) is None:
        combined.__class__ = _tracked(type(combined))
    combined._holdfast = tracker


def tracker_of(combined: Any) -> Tracker | None:
    """Return what counts the batches of *combined*; None if `track` was not called for it."""
    found: Tracker | None = getattr(combined, "_holdfast", None)
    return found


def _tracked(kind: Any) -> Any:
    """Return a subclass of a ``CombinedLoader`` whose iterations go through its `Tracker`."""

    class Tracked(kind):  # type: ignore[misc]  # a base class that is chosen at run time
        _holdfast: Tracker

        def __iter__(self) -> Any:
            with self._holdfast.beginning():
                super().__iter__()
            return self

        def __next__(self) -> Any:
            self._holdfast.draw()
            return super().__next__()

    Tracked.__name__, Tracked.__qualname__, Tracked.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Tracked


class Tracker:
    """The position of a ``CombinedLoader`` in its epoch."""

    def __init__(self, combined: Any, sources: list[Source]) -> None:
        self._combined, self.sources = combined, sources
        self._restored: dict[str, Any] | None = None
        """The position at which the next iterator begins."""
        self._ahead: dict[str, Any] | None = None
        """The position before the newest batch and the generators with which it was drawn, where Lightning draws one batch ahead."""
        self._drawn_with: rng.State | None = None
        """The generators with which the next batch is drawn, after a restore."""

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Create the iterators of an epoch in this block: at its first batches, or at the restored position."""
        restored, self._restored = self._restored, None
        combined, own = self._combined, self._combined._flattened
        if restored is None:
            for source in self.sources:
                source.begin()
        combined._flattened = self.sources
        try:
            yield
        finally:
            combined._flattened = own
        self._ahead = self._drawn_with = None
        if restored is not None:
            combined._iterator._idx = restored["index"]
            if restored["spent"] is not None:
                combined._iterator._consumed = list(restored["spent"])
            self._drawn_with = restored["drawn_with"]

    def draw(self) -> None:
        """Prepare for the next batch."""
        if self._drawn_with is not None:
            rng.apply(self._drawn_with)
            self._drawn_with = None
        if not _is_sized(self._combined):  # Lightning must see the next batch to know the last one
            self._ahead = {**self._now(), "drawn_with": rng.capture()}

    def position(self, ahead: int) -> dict[str, Any] | None:
        """Return the position before the batches that Lightning has drawn *ahead* (0 or 1); None before the first epoch."""
        if self._combined._iterator is None:
            return None
        return self._ahead if ahead else self._now()

    def restore(self, position: dict[str, Any]) -> None:
        """Let the next iterator begin at *position*. Raise ``RuntimeError`` if it is one of other loaders."""
        if len(position["sources"]) != len(self.sources):
            raise RuntimeError(
                f"there are {len(self.sources)} training loaders, and there were {len(position['sources'])} before the fault"
            )
        for source, state in zip(self.sources, position["sources"], strict=True):
            source.restore(state)
        self._restored = position

    def _now(self) -> dict[str, Any]:
        iterator = self._combined._iterator
        spent = getattr(iterator, "_consumed", None)
        sources = [source.state() for source in self.sources]
        return {"sources": sources, "index": iterator._idx, "spent": spent and list(spent), "drawn_with": None}


class Source:
    """A loader of any type: a resume reads again what was used."""

    def __init__(self, loader: Any, epoch: Callable[[], int]) -> None:
        self.loader, self.epoch = loader, epoch
        self.taken = 0
        self._begun_with: rng.State | None = None
        self._continues = False

    def __len__(self) -> int:
        """Return the number of batches in an epoch, if the loader knows it."""
        return len(self.loader)

    def begin(self) -> None:
        """Let the next iterator begin at the first batch."""
        self._continues = False

    def __iter__(self) -> Iterator[Any]:
        continues, self._continues = self._continues, False
        if not continues or self._begun_with is None:
            self.taken, self._begun_with = 0, rng.capture()
            return self._counted(iter(self.loader))
        with rng.temporarily(self._begun_with):
            batches = iter(self.loader)
            for _ in range(self.taken):
                next(batches, None)
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.taken += 1
            yield batch

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return {"taken": self.taken, "begun_with": self._begun_with}

    def restore(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at a position. Raise ``RuntimeError`` if it is one of a loader of another type."""
        if "taken" not in state:
            raise RuntimeError("a training loader has another type than before the fault")
        self.taken, self._begun_with, self._continues = state["taken"], state["begun_with"], True


class DataLoaderSource(Source):
    """A ``DataLoader``: `holdfast.Loader` skips batches without loading them, and seeds what workers draw."""

    def __init__(self, loader: DataLoader[Any], epoch: Callable[[], int]) -> None:
        super().__init__(loader, epoch)
        self.resumable = Loader(loader, endless=False)

    def __iter__(self) -> Iterator[Any]:
        continues, self._continues = self._continues, False
        if not continues:
            self.resumable.begin_epoch(self.epoch())
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)  # as DataLoader does: later numbers are the same
        return iter(self.resumable)

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return self.resumable.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at a position."""
        self.resumable.load_state_dict(state)
        self._continues = True


class StatefulSource(Source):
    """A loader that knows its position: torchdata's ``StatefulDataLoader``, and others."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return {"loader": self.loader.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at a position. Raise ``RuntimeError`` if it is one of a loader of another type."""
        if "loader" not in state:
            raise RuntimeError("a training loader has another type than before the fault")
        self.loader.load_state_dict(state["loader"])


def _source(loader: Any, epoch: Callable[[], int]) -> Source:
    if isinstance(loader, Stateful):
        return StatefulSource(loader, epoch)
    return DataLoaderSource(loader, epoch) if isinstance(loader, DataLoader) else Source(loader, epoch)


def _is_sized(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError, OverflowError):
        return False
    return True
