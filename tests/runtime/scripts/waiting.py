"""Rank 0 waits for rank 1, which is stopped: before it sends anything (``message``), or when it has taken in the beginning of a long one.

The long one is a message (``part``) or a broadcast (``whole``), or a broadcast whose future is waited for, as DDP does (``future``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.runtime.groups.assembly import assembly
from holdfast.runtime.link import link

LONG = 64 << 20
"""Numbers in the long message: 256 MiB, more than any socket buffers."""

folder, what = Path(sys.argv[1]), sys.argv[3]
holdfast.join()
rank = int(os.environ["RANK"])
group = dist.group.WORLD
dist.barrier()
told = torch.full((3 if what == "message" else LONG,), 1.0 - rank)
if rank == 1:
    if what == "part":
        taken = dist.irecv(told, 0)
    elif what != "message":
        taken = dist.broadcast(told, 0, async_op=True)
    while what != "message" and not told[0]:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
link().report("waits")
if what == "message":
    dist.recv(told, 1)
elif what == "part":
    dist.send(told, 1)
else:
    work = dist.broadcast(told, 0, async_op=True)
    assert work is not None
    work.get_future().wait() if what == "future" else work.wait()
    assert not work._work.is_completed(), "gloo has ended this wait by itself"
ours = assembly()
assert ours is not None
for one in ours.groups:
    one.shutdown()
(folder / f"told-{rank}.json").write_text(json.dumps({"told": told[:3].tolist(), "lost": ours.attempt.lost, "why": ours.attempt.why}))
sys.stdout.flush()
os._exit(0)
