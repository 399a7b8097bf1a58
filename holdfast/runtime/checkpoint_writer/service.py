"""The checkpoint writer's loop: requests that lie in the memory store are carried out as they come, until the agent is gone."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

from holdfast.memstore import write_requests
from holdfast.memstore.write_requests import WriteRequest
from holdfast.process import survive_sigterm
from holdfast.protocol import Message
from holdfast.runtime.agent_client import AgentLink
from holdfast.runtime.checkpoint.storage import WritePace
from holdfast.runtime.checkpoint.storage_errors import StorageErrorReporter
from holdfast.runtime.checkpoint_writer.write_task import WriteTask

NAME: Final = "holdfast-writer"
"""What the kernel calls the process, for whoever looks at a list of them."""
LOOK: Final = 1.0
"""Seconds between two looks into the memory store when nobody calls."""
NICE: Final = 19
"""Whoever trains goes first, on the processor and at the disk."""


class CheckpointWriter:
    """Writes the checkpoints of one node's ranks."""

    def __init__(self, memstore: Path, link: AgentLink) -> None:
        self._memstore, self._link = memstore, link
        self._news = threading.Event()
        self._working: dict[WriteRequest, threading.Thread] = {}
        self._pace = WritePace(None)
        self._bandwidth: int | None = None
        self._teller = StorageErrorReporter(link)

    def run(self) -> None:
        """Serve until the agent goes away."""
        self._link.listen(self._hear)
        while self._link.attached:
            self._news.clear()
            self._begin()
            self._news.wait(LOOK)

    def _hear(self, _message: Message) -> None:
        self._news.set()

    def _begin(self) -> None:
        """Begin what is requested and not in work; requests older than the newest checkpoint are those of a generation that is over."""
        self._working = {request: thread for request, thread in self._working.items() if thread.is_alive()}
        found = write_requests.pending(self._memstore)
        for request in found:
            if request.whole != found[0].whole and request not in self._working:
                request.remove(self._memstore)
            elif request not in self._working:
                self._start(request)

    def _start(self, request: WriteRequest) -> None:
        if request.bandwidth != self._bandwidth:
            self._pace, self._bandwidth = WritePace(request.bandwidth), request.bandwidth
        job = WriteTask(request, self._memstore, self._link, self._pace, self._teller)
        self._working[request] = threading.Thread(target=job.run, name=f"write-{request.rank}", daemon=True)
        self._working[request].start()


def main() -> None:
    """Be the checkpoint writer that the environment describes."""
    import torch  # noqa: PLC0415 (after the environment is set: no GPU is touched)

    survive_sigterm()
    Path("/proc/self/comm").write_text(NAME)
    os.nice(NICE)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    CheckpointWriter(Path(os.environ["HOLDFAST_MEMSTORE"]), AgentLink.from_env()).run()
    os._exit(0)  # whatever is in work stays as it is: the next run clears it away
