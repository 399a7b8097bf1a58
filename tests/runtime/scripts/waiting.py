"""Rank 0 waits for rank 1, which is stopped: before it sends anything (``message``), or after receiving the beginning of a long message.

The long one is a message (``part``) or a broadcast (``whole``), or a broadcast whose future is waited for, as DDP does (``future``), or
what a reduction is made of whose shares are scattered, as FSDP does (``scattered``). Or rank 1 has died before such a reduction (``dead``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.membership import membership

LONG = 64 << 20
"""Numbers in the long message: 256 MiB, more than any socket buffers."""
RECEIVED = 128
"""Where a connection's count of bytes received lies in the kernel's ``struct tcp_info``."""


def connections() -> list[socket.socket]:
    """Return the connections of this rank's group."""
    ours = membership()
    assert ours is not None
    (group,) = ours.groups
    assert group.inner is not None
    return group.inner.sockets


def received() -> int:
    """Return how many bytes have come over them."""
    facts = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in connections()]
    return sum(struct.unpack_from("Q", one, RECEIVED)[0] for one in facts)


def scatter(tensor: torch.Tensor) -> dist.Work:
    """Begin to reduce numbers of which each rank is to have a share; gloo sends them by the MiB, so little of one may be on its way."""
    for one in connections():
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    work = dist.reduce_scatter_tensor(tensor, torch.ones(2 * len(tensor)), async_op=True)
    assert isinstance(work, dist.Work)
    return work


folder, what = Path(sys.argv[1]), sys.argv[3]
holdfast.join()
present = membership()
assert present is not None
present.begin_steps(set())  # as in a step: before the first one the loss of a peer is raised
rank = int(os.environ["RANK"])
group = dist.group.WORLD
dist.barrier()
tensor = torch.full((LONG if what in ("part", "whole", "future") else LONG // 2 if what == "scattered" else 3,), 1.0 - rank)
if rank == 1:
    if what == "part":
        taken = dist.irecv(tensor, 0)
    elif what in ("whole", "future"):
        taken = dist.broadcast(tensor, 0, async_op=True)
    elif what == "scattered":
        taken, begun = scatter(tensor), received()
        while received() < begun + (3 << 19):
            time.sleep(0.001)
    while what in ("part", "whole", "future") and not tensor[0]:
        pass
    os.kill(os.getpid(), signal.SIGKILL if what == "dead" else signal.SIGSTOP)
link().report("waits")
if what == "message":
    dist.recv(tensor, 1)
elif what == "part":
    dist.send(tensor, 1)
elif what in ("scattered", "dead"):
    scatter(tensor).wait()
else:
    work = dist.broadcast(tensor, 0, async_op=True)
    assert work is not None
    work.get_future().wait() if what == "future" else work.wait()
    assert not work._work.is_completed(), "gloo has ended this wait by itself"
ours = membership()
assert ours is not None
for one in ours.groups:
    one.shutdown()
(folder / f"result-{rank}.json").write_text(
    json.dumps({"tensor": tensor[:3].tolist(), "lost": ours.transaction.lost, "why": ours.transaction.why})
)
sys.stdout.flush()
os._exit(0)
