"""Every reduce operation, collective and element type through a managed group: writes down what is not as it must be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from tests.conformance.reductions import differences

torch.set_num_threads(1)
holdfast.join()
world = dist.group.WORLD
assert world is not None
count, wrong = differences(world)
(Path(sys.argv[1]) / f"result-{os.environ['RANK']}.json").write_text(json.dumps({"count": count, "wrong": wrong}))
dist.all_reduce(torch.zeros(1))  # gloo's barrier waits for operations in progress: it may raise what refused one that is about to end
