"""torchtitan's Trainer on CPUs, with the config of the example: ``torchtitan_trainer.py FOLDER OPTION...``, options as torchtitan's own.

It writes a digest of its shards, and reaches places for faults at the beginning of each step and of torchtitan's own saves.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.train import main
from torchtitan.trainer import Trainer

import holdfast.integrations.torchtitan  # noqa: F401 (by this the launcher sees that the script has a session)
from tests.runtime.chaos import reach

folder = Path(sys.argv[1])
torch.set_num_threads(1)
real_step, real_train, real_save = Trainer.train_step, Trainer.train, CheckpointManager._save


def train_step(self: Any, data: Any) -> None:
    """Write down the generator's state, and reach a place before the step."""
    with (folder / f"generators-{os.environ['RANK']}").open("a") as file:
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        file.write(f"{os.environ['HOLDFAST_GENERATION']} {self.step} {state}\n")
    if "CHAOS" in os.environ:
        reach("begin", self.step)
    real_step(self, data)


def save(self: Any, step: int, *last: bool) -> Any:
    """Reach a place before the save; after it files may grow again."""
    if "CHAOS" in os.environ:
        reach("own save", step)
    try:
        return real_save(self, step, *last)
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def train(self: Any) -> None:
    """Train, then write what has become of the state."""
    real_train(self)
    digest = hashlib.sha256()
    for part in self.model_parts:
        for _, parameter in sorted(part.named_parameters()):
            digest.update(parameter.to_local().detach().contiguous().numpy().tobytes())
    moments = [float(one["exp_avg"].to_local().double().sum()) for inner in self.optimizers for one in inner.state.values()]
    results = {"model": digest.hexdigest(), "moments": moments, "step": self.step, "tokens": self.ntokens_seen}
    results |= {"rates": self.lr_schedulers.get_metrics()}
    (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(results))


def take_microbatches(kind: Any) -> None:
    """Have the pipeline schedules of a class take micro-batches, as torchtitan 0.3 gives them; those of torch 2.13 divide a batch."""
    real = kind.step

    def step(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **more: Any) -> Any:
        given = [torch.cat(parts) for parts in zip(*arg_mbs, strict=True)] if arg_mbs else []
        named = {name: torch.cat([one[name] for one in kwarg_mbs]) for name in kwarg_mbs[0]}
        return real(self, *given, target=torch.cat(target_mbs) if target_mbs else None, **named, **more)

    if "arg_mbs" not in inspect.signature(real).parameters:
        kind.step = step


for one in PipelineScheduleSingle, PipelineScheduleMulti:
    take_microbatches(one)
Trainer.train_step, Trainer.train, CheckpointManager._save = train_step, train, save
given = sys.argv[2:]
own = ["--training.steps", "12", "--checkpoint.interval", "4", "--debug.seed", "1", "--dump_folder", str(folder / "output")]
sys.argv[1:] = ["--module", "examples.torchtitan_debug", "--config", "debug", *own, *given]
main()
