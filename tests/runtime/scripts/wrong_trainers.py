"""Mistakes with the Trainer's callback, each reported by the error that it gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import holdfast
from holdfast.integrations.huggingface import HoldfastCallback

folder = Path(sys.argv[1])
torch.set_num_threads(1)
results: dict[str, str] = {}


class Line(nn.Module):
    """A model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.line(x).square().mean()}


def trainer(**options: Any) -> Trainer:
    """Return a Trainer to which the callback is added late."""
    arguments = {
        "output_dir": str(folder / "output"),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 2,
        "save_strategy": "no",
    }
    made = Trainer(model=Line(), args=TrainingArguments(**{**arguments, **options}), train_dataset=[{"x": torch.ones(1)}] * 8)
    made.add_callback(HoldfastCallback())
    return made


def report(name: str, act: Callable[[], object]) -> None:
    """Note the error of *act*."""
    try:
        act()
    except (RuntimeError, ValueError) as error:
        results[name] = f"{type(error).__name__}: {error}"


report("batch size", trainer(auto_find_batch_size=True).train)
first = trainer()
first.train()
report("twice", first.train)
with holdfast.session(model=nn.Linear(1, 1)):
    report("two sessions", trainer().train)
(folder / "result-0.json").write_text(json.dumps(results))
