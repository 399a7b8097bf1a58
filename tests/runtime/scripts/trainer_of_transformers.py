"""Hugging Face's Trainer with its state kept by a session: dropout, noise in the collator, accumulation with a remainder, evaluations.

Options: ``join``: managed groups; ``plain``: a collator without noise; ``resume``: checkpoints of the Trainer, and a resume from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import holdfast
from holdfast.integrations.huggingface import HoldfastCallback
from tests.runtime.chaos import reach

folder = Path(sys.argv[1])
options = set(sys.argv[2:])
torch.set_num_threads(1)
if "join" in options:
    holdfast.join()


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Sequences that are the same in every process."""

    def __init__(self, number: int) -> None:
        self._all = torch.randint(32, (number, 8), generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Return one."""
        return {"input_ids": self._all[place], "labels": self._all[place]}


def noisy(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a batch together, with tokens changed by chance."""
    tokens = torch.stack([one["input_ids"] for one in batch])
    if "plain" in options:
        return {"input_ids": tokens, "labels": tokens}
    changed = torch.where(torch.rand(tokens.shape) < 0.2, torch.randint(32, tokens.shape), tokens)
    return {"input_ids": changed, "labels": tokens}


class Faults(TrainerCallback):
    """Reach a place at the beginning of each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reach it."""
        reach("begin", state.global_step + 1)


arguments = TrainingArguments(
    output_dir=str(folder / "output"),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=1e-2,
    warmup_steps=3,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="steps" if "resume" in options else "no",
    save_steps=3,
    logging_steps=4,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=3,
)
torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Tokens(44),
    eval_dataset=Tokens(8),
    data_collator=noisy,
    callbacks=[HoldfastCallback(), Faults()],
)
trainer.train(resume_from_checkpoint="resume" in options and os.environ["HOLDFAST_GENERATION"] != "1")

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
timed = ("runtime", "per_second")
assert trainer.lr_scheduler is not None
history = [{name: value for name, value in one.items() if not name.endswith(timed)} for one in trainer.state.log_history]
results = {"model": digest.hexdigest(), "step": trainer.state.global_step, "epoch": trainer.state.epoch, "history": history[:-1]}
results |= {"rate": trainer.lr_scheduler.get_last_lr(), "flops": trainer.state.total_flos, "random": torch.rand(2).tolist()}
(folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(results))
