"""Rank 0 waits for a message that rank 1 will never send: it has been stopped."""

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

folder = Path(sys.argv[1])
holdfast.join()
rank = int(os.environ["RANK"])
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
told = torch.ones(3)
link().report("waits")
dist.recv(told, 1)
ours = assembly()
assert ours is not None
(folder / f"told-{rank}.json").write_text(json.dumps({"told": told.tolist(), "lost": ours.attempt.lost, "why": ours.attempt.why}))
sys.stdout.flush()
os._exit(0)
