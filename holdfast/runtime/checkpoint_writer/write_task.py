"""Carry one request out: one rank's part of a checkpoint, and for rank 0 the whole of it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from holdfast.memstore.shared_memory import Snapshot, UnusableSnapshot
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.agent_client import AgentLink, Leave
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Manifest
from holdfast.runtime.checkpoint.publish import clear, put_in_place, retire
from holdfast.runtime.checkpoint.storage import StorageTrouble, WritePace, write_alone, write_metadata
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.checkpoint_writer.rank_shard import RankShard
from holdfast.runtime.checkpoint_writer.rendezvous import Over, Stalled, WriterRendezvous

_log = logging.getLogger("holdfast.checkpoint_writer")


class WriteTask:
    """One request in work."""

    def __init__(self, request: WriteRequest, memstore: Path, link: AgentLink, pace: WritePace, teller: StorageErrorReporter) -> None:
        self.request = request
        self._memstore, self._link, self._pace, self._teller = memstore, link, pace, teller
        self._meeting = WriterRendezvous(request, self._refused)
        self._began = time.monotonic()

    def run(self) -> None:
        """Do it; whatever goes wrong is told and costs this checkpoint, nothing else. The snapshot is let go of in the end."""
        place = manifest.folder_of(Path(self.request.directory), self.request.step)
        storage_error: StorageError | None
        try:
            self._carry_out(place)
        except Over as over:
            _log.info("the checkpoint of step %d is given up: %s", self.request.step, over.why)
            self._meeting.give_up()
            return
        except (UnusableSnapshot, Stalled) as error:
            storage_error = StorageError(
                "snapshot-spoiled" if isinstance(error, UnusableSnapshot) else "checkpoint-write-failed", error.why
            )
        except StorageTrouble as error:
            storage_error = StorageError("checkpoint-write-failed", error.words) if error.cause is None else StorageError.of(error.cause)
        except OSError as error:
            storage_error = StorageError.of(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, others must not wait for this rank)
            _log.exception("the checkpoint of step %d is given up", self.request.step)
            storage_error = StorageError("checkpoint-write-failed", f"{type(error).__name__}: {error}")
        else:
            return
        finally:
            self.request.remove(self._memstore)
        self._meeting.give_up(storage_error)
        self._teller.tell(storage_error, self.request.step, place, rank=self.request.rank)

    def _carry_out(self, place: Path) -> None:
        """Do what is left to be done: a checkpoint writer before may have been killed anywhere."""
        leads = self._meeting.leads
        if (whole := self._made(place)) is not None:
            if leads:
                self._tell(place, whole)
        elif leads and (whole := self._made(self._meeting.folder)) is not None:
            self._put(whole, place)
        else:
            self._write()
            if leads:
                self._finish(place)

    def _made(self, folder: Path) -> Manifest | None:
        """Return the manifest of this checkpoint if *folder* has it already."""
        try:
            whole = manifest.read(folder)
        except manifest.UnusableCheckpoint:
            return None
        return whole if (whole.step, whole.generation) == (self.request.step, self.request.generation) else None

    def _write(self) -> None:
        """Write this rank's part; the snapshot is read for no longer than that takes."""
        with Snapshot(self._memstore / self.request.snapshot) as snapshot:
            portion = RankShard(snapshot, self.request)
            if self._meeting.leads:
                clear(Path(self.request.directory), self.request.generation)
                clear(Path(self.request.directory), self.request.generation + 1, before=self.request.step)
            self._meeting.claim(portion)
            if self._meeting.is_done():  # by a checkpoint writer before; the leader may be about to make the whole of it
                return
            owners = self._meeting.owners()
            files, chunks = write_alone(portion.items(owners), self._meeting.folder, self.request.rank, self._pace)
            self._meeting.done(files, chunks)

    def _finish(self, place: Path) -> None:
        """Make the whole of all parts, and put it in place."""
        files, chunks = self._meeting.parts()
        files |= write_metadata(chunks, self._meeting.folder)
        request = self.request
        self._put(manifest.manifest(request.step, request.generation, request.world, files), place)

    def _put(self, whole: Manifest, place: Path) -> None:
        leave = put_in_place(whole, self._meeting.folder, place, self._leave)
        if not leave.ok:
            raise Over(leave.why)
        self._teller.forget()
        self._tell(place, whole)

    def _tell(self, place: Path, whole: Manifest) -> None:
        request = self.request
        self._link.saved(
            request.step, place, request.stood, whole.size, beside=time.monotonic() - self._began, generation=request.generation
        )
        retire(Path(request.directory), request.keep, request.generation)

    def _leave(self) -> Leave:
        return self._link.may_commit(self.request.step, generation=self.request.generation)

    def _refused(self) -> str:
        leave = self._leave()
        return "" if leave.ok else leave.why
