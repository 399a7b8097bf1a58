"""A Lightning script with a fixed seed and nothing of Holdfast: dropout, a shuffled loader, a checkpoint every four steps.

``lightning_unchanged.py FOLDER OPTION...``: ``resume`` (`fit` is given the last checkpoint), ``gate`` (step 14 is written down, and waits
then for a file ``FOLDER/gate``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

os.environ.setdefault("TORCHELASTIC_RUN_ID", "job")  # as a launcher sets it: Lightning then starts no processes
folder, options = Path(sys.argv[1]), set(sys.argv[2:])
rank, local = os.environ.get("RANK", "0"), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
torch.set_num_threads(1)
warnings.filterwarnings("ignore")


class Model(pl.LightningModule):
    """Linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _batch_idx: int) -> Tensor:
        """Return the loss; write down the step, its data and the loss."""
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        with (folder / f"steps-{rank}").open("a") as out:
            out.write(json.dumps({"step": self.global_step, "batch": float(batch[0].sum()), "loss": float(loss)}) + "\n")
        while "gate" in options and self.global_step == 14 and not (folder / "gate").exists():
            time.sleep(0.01)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


pl.seed_everything(1, verbose=False)
inputs = torch.rand(60, 4)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=local,
    num_nodes=int(os.environ.get("WORLD_SIZE") or 1) // local,
    strategy="ddp",
    max_epochs=3,
    callbacks=[ModelCheckpoint(folder / "lightning", every_n_train_steps=4, save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin()), batch_size=3, shuffle=True)
trainer.fit(model, loader, ckpt_path="last" if "resume" in options else None)
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
(folder / f"weights-{rank}").write_text(digest.hexdigest())
