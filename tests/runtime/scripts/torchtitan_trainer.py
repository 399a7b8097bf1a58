"""torchtitan's Trainer on CPUs, with the config of the example: ``torchtitan_trainer.py FOLDER OPTION...``, options as torchtitan's own.

It writes a digest of its shards, and reaches a place for faults at the beginning of each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torchtitan.train import main
from torchtitan.trainer import Trainer

import holdfast.integrations.torchtitan  # noqa: F401 (by this the launcher sees that the script has a session)
from tests.runtime.chaos import reach

folder = Path(sys.argv[1])
torch.set_num_threads(1)
real_step, real_train = Trainer.train_step, Trainer.train


def train_step(self: Any, data: Any) -> None:
    """Write down the generator's state, and reach a place before the step."""
    with (folder / f"generators-{os.environ['RANK']}").open("a") as file:
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        file.write(f"{os.environ['HOLDFAST_GENERATION']} {self.step} {state}\n")
    if "CHAOS" in os.environ:
        reach("begin", self.step)
    real_step(self, data)


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


Trainer.train_step, Trainer.train = train_step, train
given = sys.argv[2:]
own = ["--training.steps", "12", "--checkpoint.interval", "4", "--debug.seed", "1", "--dump_folder", str(folder / "output")]
sys.argv[1:] = ["--module", "examples.torchtitan_debug", "--config", "debug", *own, *given]
main()
