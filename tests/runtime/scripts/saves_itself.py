"""A framework that saves and restores its own state, on the loop of its example: ``saves_itself.py FOLDER megatron|deepspeed [STAGE]``."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
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


gathered: AbstractContextManager[None] = nullcontext()
if framework == "megatron":
    from examples import megatron_core

    model = megatron_core.train(folder / "saved", 10, 3, before_step)
else:
    import deepspeed

    from examples import deepspeed_zero

    deepspeed.ops.__compatible_ops__.clear()  # one would be compiled for a minute, and is not used in training
    stage = int(sys.argv[3])
    whole = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}  # it would keep parameters as small as these whole
    model = deepspeed_zero.train(folder / "saved", 10, 3, before_step, stage=stage, **whole)
    if stage == 3:
        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))

digest = hashlib.sha256()
with gathered:
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
(folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(digest.hexdigest()))
torch.distributed.destroy_process_group()
