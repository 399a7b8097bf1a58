"""Ranks that arrive at very different times at each other, a group and the first operation; recoveries have tiny time limits."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.runtime.groups import backends, control_tree, kv_store

folder = Path(sys.argv[1])
options = set(sys.argv[3:])
SKEW = 1.5
for module, name, value in (
    (backends, "BUILD_SECONDS", 0.2),
    (kv_store, "BUILD_SECONDS", 0.2),
    (kv_store, "_TIMEOUT", timedelta(seconds=0.2)),
    (control_tree, "CONNECT_SECONDS", 0.2),
):
    setattr(module, name, value)
rank = int(os.environ["RANK"])


def late(who: int) -> None:
    """Load or compile for a while, as one rank may."""
    if rank == who:
        time.sleep(SKEW)


late(0)  # who hosts the store
holdfast.join()
late(1)
group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.5 if "short" in options else 60))
late(2)
ones = torch.ones(1)
dist.all_reduce(ones, group=group)
if rank == 0:
    time.sleep(SKEW)
    dist.distributed_c10d._get_default_store().set("loaded", "yes")
dist.distributed_c10d._get_default_store().get("loaded")
(folder / f"result-{rank}.json").write_text(json.dumps({"ranks": int(ones)}))
