"""A Lightning Trainer that resumes in the middle of an epoch: one line in a script that is Lightning's otherwise.

holdfast run --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCallback


class Sines(pl.LightningModule):
    """Learns the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002 (Lightning's signature)
        """Return the loss of a batch."""
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # noqa: ARG002 (as above)
        """Log the loss of a batch."""
        self.log("validation", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    pl.seed_everything(1)
    x = torch.rand(8192, 1, generator=torch.Generator().manual_seed(1)) * 6
    data = TensorDataset(x, x.sin())
    ranks, of_this_node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=of_this_node,
        num_nodes=ranks // of_this_node,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=given.epochs,
        callbacks=[HoldfastCallback()],
        enable_progress_bar=False,
    )
    trainer.fit(Sines(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=512))


if __name__ == "__main__":
    main()
