"""Three ranks, of which the second comes to no all-reduce: it dawdles until the gate opens."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.runtime.agent_client import link

folder = Path(sys.argv[1])


def dawdle() -> None:
    """Do anything but what the others wait for."""
    while not (folder / "gate").exists():
        time.sleep(0.005)


holdfast.join()
rank = int(os.environ["RANK"])
dist.all_reduce(torch.ones(3))
link().report("here")
if rank == 1:
    dawdle()
summed = torch.ones(5)
dist.all_reduce(summed)
link().report("done", summed=summed.tolist())
sys.stdout.flush()
os._exit(0)
