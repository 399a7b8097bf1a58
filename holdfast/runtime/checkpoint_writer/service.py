"""The checkpoint writer: carry out the write requests in the memory store as they arrive, until the agent exits."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

from holdfast.host.process import survive_sigterm
from holdfast.memstore import write_requests
from holdfast.memstore.shared_memory import Snapshot, UnusableSnapshot
from holdfast.memstore.write_requests import WriteRequest
from holdfast.protocol import Message
from holdfast.runtime.agent_client import AgentAnswer, AgentLink
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Manifest
from holdfast.runtime.checkpoint.publish import clear, put_in_place, retire
from holdfast.runtime.checkpoint.storage import WriteFailed, WriteRate, write_items, write_metadata
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.checkpoint_writer.rank_shard import RankShard
from holdfast.runtime.checkpoint_writer.rendezvous import Stalled, WriteCancelled, WriterRendezvous

_log = logging.getLogger("holdfast.checkpoint_writer")

NAME: Final = "holdfast-writer"
"""The name of the process in lists of processes."""
CHECK_SECONDS: Final = 1.0
"""Seconds between two checks of the memory store without a notification."""
NICE: Final = 19
"""Training has priority, on the processor and at the disk."""


class CheckpointWriter:
    """Writes the checkpoints of one node's ranks."""

    def __init__(self, memstore: Path, link: AgentLink) -> None:
        self._memstore, self._link = memstore, link
        self._notified = threading.Event()
        self._working: dict[WriteRequest, threading.Thread] = {}
        self._rate = WriteRate(None)
        self._bandwidth: int | None = None
        self._reporter = StorageErrorReporter(link)

    def run(self) -> None:
        """Serve until the agent exits."""
        self._link.listen(self._on_command)
        while self._link.attached:
            self._notified.clear()
            self._start_pending()
            self._notified.wait(CHECK_SECONDS)

    def _on_command(self, _message: Message) -> None:
        self._notified.set()

    def _start_pending(self) -> None:
        """Start new requests; drop those older than the newest checkpoint, which are of a generation that is over."""
        self._working = {request: thread for request, thread in self._working.items() if thread.is_alive()}
        found = write_requests.pending(self._memstore)
        for request in found:
            if request in self._working:
                continue
            if request.checkpoint != found[0].checkpoint:
                request.remove(self._memstore)
                continue
            if request.bandwidth != self._bandwidth:
                self._rate, self._bandwidth = WriteRate(request.bandwidth), request.bandwidth
            task = WriteTask(request, self._memstore, self._link, self._rate, self._reporter)
            self._working[request] = threading.Thread(target=task.run, name=f"write-{request.rank}", daemon=True)
            self._working[request].start()


class WriteTask:
    """Carries out one request: one rank's part of a checkpoint, and for rank 0 the checkpoint of all parts."""

    def __init__(self, request: WriteRequest, memstore: Path, link: AgentLink, rate: WriteRate, reporter: StorageErrorReporter) -> None:
        self.request = request
        self._memstore, self._link, self._rate, self._reporter = memstore, link, rate, reporter
        self._rendezvous = WriterRendezvous(request, self._refused)
        self._began = time.monotonic()

    def run(self) -> None:
        """Do it; an error is reported and costs this checkpoint, nothing else. The snapshot is released in the end."""
        place = manifest.folder_of(Path(self.request.directory), self.request.step)
        failure: StorageError
        try:
            self._carry_out(place)
        except WriteCancelled as cancelled:
            _log.info("the checkpoint of step %d is cancelled: %s", self.request.step, cancelled.why)
            self._rendezvous.cancel()
            return
        except (UnusableSnapshot, Stalled) as error:
            failure = StorageError("snapshot-spoiled" if isinstance(error, UnusableSnapshot) else "checkpoint-write-failed", error.why)
        except WriteFailed as error:
            failure = error.as_storage_error()
        except OSError as error:
            failure = StorageError.of(error)
        except Exception as error:  # noqa: BLE001 (other ranks must not wait for this one, whatever the error is)
            _log.exception("the checkpoint of step %d failed", self.request.step)
            failure = StorageError("checkpoint-write-failed", f"{type(error).__name__}: {error}")
        else:
            return
        finally:
            self.request.remove(self._memstore)
        self._rendezvous.cancel(failure)
        self._reporter.report(failure, self.request.step, place, rank=self.request.rank)

    def _carry_out(self, place: Path) -> None:
        """Do what is left to do: an earlier checkpoint writer may have been killed at any point."""
        leads = self._rendezvous.leads
        if (written := self._existing(place)) is not None:
            if leads:
                self._report_saved(place, written)
        elif leads and (written := self._existing(self._rendezvous.folder)) is not None:
            self._publish(written, place)
        else:
            self._write()
            if leads:
                files, chunks = self._rendezvous.parts()
                files |= write_metadata(chunks, self._rendezvous.folder)
                self._publish(manifest.manifest(self.request.step, self.request.generation, self.request.world, files), place)

    def _existing(self, folder: Path) -> Manifest | None:
        """Return the manifest of this checkpoint if *folder* has it already."""
        try:
            found = manifest.read(folder)
        except manifest.UnusableCheckpoint:
            return None
        return found if (found.step, found.generation) == (self.request.step, self.request.generation) else None

    def _write(self) -> None:
        """Write this rank's part; the snapshot is open only for that long."""
        with Snapshot(self._memstore / self.request.snapshot) as snapshot:
            part = RankShard(snapshot, self.request)
            if self._rendezvous.leads:
                clear(Path(self.request.directory), self.request.generation)
                clear(Path(self.request.directory), self.request.generation + 1, before=self.request.step)
            self._rendezvous.claim(part)
            if self._rendezvous.is_done():  # by an earlier checkpoint writer; the leader may be about to publish
                return
            owners = self._rendezvous.owners()
            files, chunks = write_items(part.items(owners), self._rendezvous.folder, self.request.rank, self._rate)
            self._rendezvous.done(files, chunks)

    def _publish(self, written: Manifest, place: Path) -> None:
        answer = put_in_place(written, self._rendezvous.folder, place, self._ask_permission)
        if not answer.ok:
            raise WriteCancelled(answer.why)
        self._reporter.reset()
        self._report_saved(place, written)

    def _report_saved(self, place: Path, written: Manifest) -> None:
        request = self.request
        alongside = time.monotonic() - self._began
        self._link.saved(request.step, place, request.paused, written.size, overlapped=alongside, generation=request.generation)
        retire(Path(request.directory), request.keep, request.generation)

    def _ask_permission(self) -> AgentAnswer:
        return self._link.may_commit(self.request.step, generation=self.request.generation)

    def _refused(self) -> str:
        answer = self._ask_permission()
        return "" if answer.ok else answer.why


def main() -> None:
    """Run the checkpoint writer that the environment describes."""
    import torch  # noqa: PLC0415 (after the environment is set: no GPU is touched)

    survive_sigterm()
    Path("/proc/self/comm").write_text(NAME)
    os.nice(NICE)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    CheckpointWriter(Path(os.environ["HOLDFAST_MEMSTORE"]), AgentLink.from_env()).run()
    os._exit(0)  # unfinished work stays as it is: the next run clears it away
