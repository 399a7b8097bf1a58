"""The lower bound: torch alone, with live ranks that only build a new gloo group and send the state to one of them.

No detection, no decision, no process to start, nothing to agree on: no recovery can be faster.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from typing import Any, Final

from benchmarks.real_job import RANKS
from holdfast.host.ports import free_port

NUMBERS: Final = 3 * 9_454_600
"""Parameters of the training script's model, and twice as many numbers of its optimizer."""


def bare(rank: int, orders: Any, results: Any) -> None:  # noqa: ANN401 (a pipe's end, and a queue)
    """Regroup at each port that is named, and let rank 0 give its state to the last rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: PLC0415 (in these processes alone)
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    state = torch.ones(NUMBERS)
    results.put((0, 0.0))
    while port := orders.recv():
        store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=60), wait_for_workers=False)
        group: Any = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=60))
        if rank in (0, RANKS - 1):
            (group.send([state], RANKS - 1, 0) if rank == 0 else group.recv([state], 0, 0)).wait()
        group.barrier().wait()
        results.put((port, time.time()))
        may_end = orders.recv()  # the store's host must outlive its use
        assert may_end


def rounds(number: int) -> list[float]:
    """Return the seconds of each regroup, from the order to the last rank's being through."""
    context = multiprocessing.get_context("spawn")
    results, lines = context.SimpleQueue(), [context.Pipe() for _ in range(RANKS)]
    ranks = [context.Process(target=bare, args=(rank, lines[rank][1], results), daemon=True) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for _ in ranks:
        results.get()
    found = []
    for _ in range(number + 1):
        port = free_port()
        begin = time.time()
        for mine, _ in lines:
            mine.send(port)
        found.append(max(results.get()[1] for _ in ranks) - begin)
        for mine, _ in lines:
            mine.send(1)
    for mine, _ in lines:
        mine.send(0)
    for one in ranks:
        one.join(20)
    return found[1:]  # the first one warms up
