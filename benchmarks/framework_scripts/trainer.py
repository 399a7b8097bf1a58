"""The Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.framework_scripts.common import BATCH, PLACE, STEPS, Gpt, Tokens, mark, save_weights
from holdfast.integrations.huggingface import HoldfastCallback  # holdfast


class Model(nn.Module):
    """The model as a Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002 (as a Trainer calls it)
        """Return the loss."""
        return {"loss": self.gpt(tokens)}


class Marks(TrainerCallback):
    """Marks the end of each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002 (a Trainer's signature)
        """Mark it."""
        mark(state.global_step)


torch.manual_seed(1)
model = Model()
arguments = TrainingArguments(
    output_dir=str(PLACE / "trainer"),
    num_train_epochs=1,
    per_device_train_batch_size=BATCH,
    learning_rate=1e-3,
    use_cpu=True,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Tokens(STEPS),
    data_collator=lambda some: {"tokens": torch.stack(some)},
    callbacks=[Marks(), HoldfastCallback()],  # holdfast: callbacks=[Marks()],
)
trainer.train()
save_weights(model.state_dict())
