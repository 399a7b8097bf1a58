"""A framework that saves and restores its own state, on the loop of its example: ``saves_itself.py FOLDER megatron|deepspeed``."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch

from tests.runtime.chaos import reach

warnings.filterwarnings("ignore")
folder, framework = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)


def before_step(step: int) -> None:
    """Reach a place for faults."""
    if "CHAOS" in os.environ:
        reach("begin", step)


if framework == "megatron":
    from examples.megatron_core import train
else:
    import deepspeed

    from examples.deepspeed_zero import train

    deepspeed.ops.__compatible_ops__.clear()  # one would be compiled for a minute, and is not used in training
model = train(folder / "saved", 10, 3, before_step)

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
(folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(digest.hexdigest()))
torch.distributed.destroy_process_group()
