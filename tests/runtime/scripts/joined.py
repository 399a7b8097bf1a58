"""Joins, sums up, and reports the backend: without an agent, with an NCCL that cannot be managed (``old-nccl``), with another torch.

``other-torch`` is one that lacks something which managed groups need, and that Holdfast is not tested with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.runtime.groups import nccl, torch_interface
from holdfast.runtime.groups.membership import membership

folder, until = Path(sys.argv[1]), int(sys.argv[2])
if "old-nccl" in sys.argv:
    vars(nccl)["version"] = lambda: (2, 27, 9)
if "other-torch" in sys.argv:
    vars(torch)["__version__"] = "2.99.0"
    del dist.distributed_c10d._unregister_process_group
    torch_interface.missing.cache_clear()

holdfast.join()
rank = int(os.environ["RANK"])
ones = torch.ones(1)
dist.all_reduce(ones)
model = nn.Linear(2, 2)
with holdfast.session(model=model, optimizer=torch.optim.SGD(model.parameters())) as session:
    for step in session.steps(until=until):
        step.end(0.0)
results = {
    "backend": dist.get_backend(),
    "managed": membership() is not None,
    "ranks": int(ones),
    "step": session.steps_done,
    "local": os.environ["LOCAL_RANK"],
}
(folder / f"result-{rank}.json").write_text(json.dumps(results))
