"""How checkpoint writers of different nodes come to one checkpoint: by small files in the folder in which it grows.

Each rank leaves its claims there. When all are there the leader, who has rank 0, leaves word who writes what several ranks have. Each then
writes its part and says what lies where; the leader makes the whole of it. Whoever cannot go on says so, and all give up.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import WrittenFile
from holdfast.runtime.checkpoint.storage import Chunk
from holdfast.runtime.checkpoint.storage_errors import StorageError
from holdfast.runtime.checkpoint_writer.rank_shard import RankShard, named

STALL: Final = 120.0
"""Seconds without any change in the folder after which the leader gives a checkpoint up; a network file system may show news so late."""
PAUSES: Final = (0.005, 0.25)
"""Seconds between two looks into the folder, at first and at most."""
ASK: Final = 1.0
"""Seconds between two questions whether the generation is still the current one."""

_CLAIMS, _OWNERS, _DONE, _OVER = ".claims-{:05d}", ".owners", ".done-{:05d}", ".given-up"


T = TypeVar("T")


class Over(Exception):
    """The checkpoint is not to be finished, and nothing is wrong with that, or somebody else has told what is: *why*."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Stalled(Exception):
    """A rank has not come: *why* nothing comes of the checkpoint."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class WriterRendezvous:
    """One rank's view of the folder."""

    def __init__(self, request: WriteRequest, refused: Callable[[], str]) -> None:
        """*refused* says why the checkpoint is not wanted any more, or nothing while it is."""
        self._request, self._refused = request, refused
        self.leads = request.rank == 0
        self.folder = manifest.beside(Path(request.directory), request.step, "partial", request.generation)
        self._asked = time.monotonic()

    def claim(self, portion: RankShard) -> None:
        """Say what this rank has; raise ``OSError`` when the folder cannot be written.

        What a checkpoint writer before has left here stays: the same snapshots lead to the same words.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {"shard": portion.shard, "entries": portion.claims(), "loose": portion.loose()}
        self._leave(_CLAIMS.format(self._request.rank), told)

    def owners(self) -> dict[str, str | int]:
        """Return who writes what several ranks have; wait for that."""
        if self.leads:
            found = _owners(self._all(_CLAIMS))
            self._leave(_OWNERS, found)
            return found

        def there() -> dict[str, str | int] | None:
            told: dict[str, str | int] | None = self._read(_OWNERS)
            return told

        return self._wait(there, lambda: "rank 0 has not said who writes what")

    def done(self, files: Mapping[str, WrittenFile], chunks: Iterable[Chunk]) -> None:
        """Say what this rank has written."""
        told = {"files": {name: asdict(one) for name, one in files.items()}, "chunks": list(chunks)}
        self._leave(_DONE.format(self._request.rank), told)

    def is_done(self) -> bool:
        """Tell whether this rank's part is written."""
        return self._read(_DONE.format(self._request.rank)) is not None

    def parts(self) -> tuple[dict[str, WrittenFile], list[Chunk]]:
        """Return what all ranks have written; wait for that. The leader alone asks."""
        told = self._all(_DONE)
        files = {name: WrittenFile(**one) for part in told.values() for name, one in part["files"].items()}
        return files, [Chunk(*one) for part in told.values() for one in part["chunks"]]

    def give_up(self, storage_error: StorageError | None = None) -> None:
        """Let all know of a *storage_error* by which nothing comes of it; the leader clears away what there is."""
        if storage_error is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)  # whoever comes later waits for nobody
                self._leave(_OVER, {"why": storage_error.why})
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _all(self, name: str) -> dict[int, Any]:
        """Return what every rank has left under *name*; wait for that."""
        found: dict[int, Any] = {}

        def there() -> dict[int, Any] | None:
            for rank in range(self._request.world):
                if rank not in found and (told := self._read(name.format(rank))) is not None:
                    found[rank] = told
            return found if len(found) == self._request.world else None

        def missing() -> str:
            absent = [str(rank) for rank in range(self._request.world) if rank not in found]
            return f"rank {', '.join(absent[:8])} has written nothing for {STALL:.0f} s: is the checkpoint directory shared by all nodes?"

        return self._wait(there, missing)

    def _wait(self, there: Callable[[], T | None], missing: Callable[[], str]) -> T:
        """Return what *there* gives as soon as it gives something."""
        pause, seen, since = PAUSES[0], (0, 0), time.monotonic()
        while True:
            found = there()
            if found is not None:
                return found
            self.check()
            now = self._grown()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > (STALL if self.leads else 2 * STALL):  # the leader says it, if there is one
                raise Stalled(missing())
            time.sleep(pause)
            pause = min(pause * 1.5, PAUSES[1])

    def check(self) -> None:
        """Raise `Over` when nothing comes of it any more."""
        if (given_up := self._read(_OVER)) is not None:
            raise Over(str(given_up.get("why", "")))
        if not self.leads and not self.folder.exists():
            raise Over("rank 0 has given it up")
        if time.monotonic() - self._asked >= ASK:
            self._asked = time.monotonic()
            if why := self._refused():
                raise Over(why)

    def _grown(self) -> tuple[int, int]:
        """Return how many files there are, and their bytes."""
        sizes = []
        with suppress(OSError):
            for path in self.folder.iterdir():
                with suppress(OSError):
                    sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def _leave(self, name: str, told: object) -> None:
        beside = self.folder / f"{name}.{self._request.rank}"
        beside.write_text(json.dumps(told))
        beside.replace(self.folder / name)

    def _read(self, name: str) -> Any:  # noqa: ANN401 (whatever another rank has left)
        with suppress(OSError):
            return json.loads((self.folder / name).read_text())
        return None


def _owners(told: Mapping[int, Any]) -> dict[str, str | int]:
    """Return who writes what several have claimed: the piece whose lowest rank is lowest, or of what is loose the lowest rank."""
    shards: dict[str, str] = {}
    ranks: dict[str, int] = {}
    several: set[str] = set()
    for rank in sorted(told):
        shard = told[rank]["shard"]
        for claim in map(named, told[rank]["entries"]):
            if shards.setdefault(claim, shard) != shard:
                several.add(claim)
        for claim in map(named, told[rank]["loose"]):
            if ranks.setdefault(claim, rank) != rank:
                several.add(claim)
    return {claim: shards[claim] if claim in shards else ranks[claim] for claim in sorted(several)}
