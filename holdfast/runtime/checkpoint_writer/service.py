"""The flusher's loop: orders that lie in the vault are carried out as they come, until the agent is gone."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

from holdfast.memstore import write_requests
from holdfast.memstore.write_requests import WriteRequest
from holdfast.process import let_termination_pass
from holdfast.protocol import Message
from holdfast.runtime.agent_client import AgentLink
from holdfast.runtime.checkpoint.storage import WritePace
from holdfast.runtime.checkpoint.storage_errors import StorageErrorReporter
from holdfast.runtime.checkpoint_writer.write_task import WriteTask

NAME: Final = "holdfast-flush"
"""What the kernel calls the process, for whoever looks at a list of them."""
LOOK: Final = 1.0
"""Seconds between two looks into the vault when nobody calls."""
NICE: Final = 19
"""Whoever trains goes first, on the processor and at the disk."""


class CheckpointWriter:
    """Writes the checkpoints of one node's ranks."""

    def __init__(self, vault: Path, link: AgentLink) -> None:
        self._vault, self._link = vault, link
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
        """Begin what is ordered and not in work; orders older than the newest checkpoint are those of a generation that is over."""
        self._working = {order: thread for order, thread in self._working.items() if thread.is_alive()}
        found = write_requests.orders(self._vault)
        for order in found:
            if order.whole != found[0].whole and order not in self._working:
                order.remove(self._vault)
            elif order not in self._working:
                self._start(order)

    def _start(self, order: WriteRequest) -> None:
        if order.bandwidth != self._bandwidth:
            self._pace, self._bandwidth = WritePace(order.bandwidth), order.bandwidth
        job = WriteTask(order, self._vault, self._link, self._pace, self._teller)
        self._working[order] = threading.Thread(target=job.run, name=f"flush-{order.rank}", daemon=True)
        self._working[order].start()


def main() -> None:
    """Be the flusher that the environment describes."""
    import torch  # noqa: PLC0415 (after the environment is set: no GPU is touched)

    let_termination_pass()
    Path("/proc/self/comm").write_text(NAME)
    os.nice(NICE)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    CheckpointWriter(Path(os.environ["HOLDFAST_VAULT"]), AgentLink.from_env()).run()
    os._exit(0)  # whatever is in work stays as it is: the next run clears it away
