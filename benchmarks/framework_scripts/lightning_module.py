"""Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.framework_scripts.common import BATCH, PLACE, RANKS, STEPS, Gpt, Tokens, mark, save_weights
from holdfast.integrations.lightning import HoldfastCallback  # holdfast


class Module(pl.LightningModule):
    """The model as Lightning expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 (Lightning's signature)
        """Return the loss of a batch."""
        loss: Tensor = self.gpt(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Marks(pl.Callback):
    """Marks the end of each step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:  # noqa: ANN401 (Lightning's signature)
        """Mark it."""
        mark(trainer.global_step)


pl.seed_everything(1)
module = Module()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=RANKS,
    strategy="ddp",
    max_epochs=1,
    default_root_dir=PLACE,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Marks(), HoldfastCallback()],  # holdfast: callbacks=[Marks()],
)
trainer.fit(module, DataLoader(Tokens(STEPS), batch_size=BATCH, shuffle=True))
save_weights(module.gpt.state_dict())
