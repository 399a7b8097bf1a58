"""How checkpoint writers on different nodes make one checkpoint: through small files in the folder in which it is written.

Each rank writes its claims there. Then the leader, which writes for rank 0, assigns what several ranks hold. Each rank writes its part
and the list of its chunks, and the leader publishes the checkpoint. A writer that cannot continue leaves a file that ends them all.
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
from holdfast.runtime.checkpoint_writer.rank_shard import RankShard, claim_name

STALL: Final = 120.0
"""Seconds without a change in the folder after which the leader gives up; a network file system may show changes so late."""
PAUSES: Final = (0.005, 0.25)
"""Seconds between two checks of the folder, at first and at most."""
PERMISSION_INTERVAL: Final = 1.0
"""Seconds between two requests to the agent whether the generation is still current."""

_CLAIMS, _OWNERS, _DONE, _CANCELLED = ".claims-{:05d}", ".owners", ".done-{:05d}", ".given-up"


T = TypeVar("T")


class WriteCancelled(Exception):
    """The checkpoint is not to be finished, without an error of this rank: *why*."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Stalled(Exception):
    """A rank has not arrived: *why* the checkpoint cannot be finished."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class WriterRendezvous:
    """One rank's view of the folder."""

    def __init__(self, request: WriteRequest, refused: Callable[[], str]) -> None:
        """*refused* returns why the checkpoint is no longer wanted, or nothing while it is."""
        self._request, self._refused = request, refused
        self.leads = request.rank == 0
        self.folder = manifest.staging_folder(Path(request.directory), request.step, "partial", request.generation)
        self._requested_at = time.monotonic()

    def claim(self, part: RankShard) -> None:
        """Announce what this rank has; raise ``OSError`` when the folder cannot be written.

        Files of an earlier writer of this rank stay valid: the same snapshots lead to the same content.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        claims = {"shard": part.shard, "entries": part.claims(), "loose": part.loose_claims()}
        self._write(_CLAIMS.format(self._request.rank), claims)

    def owners(self) -> dict[str, str | int]:
        """Return who writes what several ranks have; wait for the leader's decision."""
        if self.leads:
            found = _owners(self._wait_for_all(_CLAIMS))
            self._write(_OWNERS, found)
            return found

        def decision() -> dict[str, str | int] | None:
            return self._read(_OWNERS)  # type: ignore[no-any-return]

        return self._wait(decision, lambda: "rank 0 has not assigned what each rank writes")

    def done(self, files: Mapping[str, WrittenFile], chunks: Iterable[Chunk]) -> None:
        """Announce what this rank has written."""
        written = {"files": {name: asdict(one) for name, one in files.items()}, "chunks": list(chunks)}
        self._write(_DONE.format(self._request.rank), written)

    def is_done(self) -> bool:
        """Return whether this rank's part is written."""
        return self._read(_DONE.format(self._request.rank)) is not None

    def parts(self) -> tuple[dict[str, WrittenFile], list[Chunk]]:
        """Return what all ranks have written; wait for them. Called by the leader only."""
        parts = self._wait_for_all(_DONE).values()
        files = {name: WrittenFile(**one) for part in parts for name, one in part["files"].items()}
        return files, [Chunk(*one) for part in parts for one in part["chunks"]]

    def cancel(self, error: StorageError | None = None) -> None:
        """Stop all writers because of *error*, if there is one; the leader removes the files."""
        if error is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)  # so that a writer that arrives later does not wait
                self._write(_CANCELLED, {"why": error.why})
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _wait_for_all(self, name: str) -> dict[int, Any]:
        """Return every rank's file *name*; wait for them."""
        found: dict[int, Any] = {}

        def complete() -> dict[int, Any] | None:
            for rank in range(self._request.world):
                if rank not in found and (content := self._read(name.format(rank))) is not None:
                    found[rank] = content
            return found if len(found) == self._request.world else None

        def missing() -> str:
            absent = [str(rank) for rank in range(self._request.world) if rank not in found]
            return f"rank {', '.join(absent[:8])} has written nothing for {STALL:.0f} s: is the checkpoint directory shared by all nodes?"

        return self._wait(complete, missing)

    def _wait(self, attempt: Callable[[], T | None], missing: Callable[[], str]) -> T:
        """Return the first result of *attempt*; raise `WriteCancelled`, or `Stalled` with the text of *missing*."""
        pause, seen, since = PAUSES[0], (0, 0), time.monotonic()
        while True:
            found = attempt()
            if found is not None:
                return found
            self._check_cancelled()
            sizes = []
            with suppress(OSError):
                for path in self.folder.iterdir():
                    with suppress(OSError):
                        sizes.append(path.stat().st_size)
            now = len(sizes), sum(sizes)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > (STALL if self.leads else 2 * STALL):  # the leader reports it first, if there is one
                raise Stalled(missing())
            time.sleep(pause)
            pause = min(pause * 1.5, PAUSES[1])

    def _check_cancelled(self) -> None:
        """Raise `WriteCancelled` when the checkpoint is no longer to be finished."""
        if (cancelled := self._read(_CANCELLED)) is not None:
            raise WriteCancelled(str(cancelled.get("why", "")))
        if not self.leads and not self.folder.exists():
            raise WriteCancelled("rank 0 has given it up")
        if time.monotonic() - self._requested_at >= PERMISSION_INTERVAL:
            self._requested_at = time.monotonic()
            if why := self._refused():
                raise WriteCancelled(why)

    def _write(self, name: str, content: object) -> None:
        temporary = self.folder / f"{name}.{self._request.rank}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)

    def _read(self, name: str) -> Any:  # noqa: ANN401 (whatever another rank has written)
        with suppress(OSError):
            return json.loads((self.folder / name).read_text())
        return None


def _owners(claims: Mapping[int, Any]) -> dict[str, str | int]:
    """Return who writes what several have claimed: the shard whose lowest rank is lowest, or the lowest rank for a small tensor."""
    shards: dict[str, str] = {}
    ranks: dict[str, int] = {}
    several: set[str] = set()
    for rank in sorted(claims):
        shard = claims[rank]["shard"]
        for claim in map(claim_name, claims[rank]["entries"]):
            if shards.setdefault(claim, shard) != shard:
                several.add(claim)
        for claim in map(claim_name, claims[rank]["loose"]):
            if ranks.setdefault(claim, rank) != rank:
                several.add(claim)
    return {claim: shards[claim] if claim in shards else ranks[claim] for claim in sorted(several)}
