"""Lightning's Trainer with its state kept by a session: dropout, noise in the data, accumulation with a remainder, validations, callbacks.

``lightning_trainer.py FOLDER OPTION...``: ``plain`` (without the callback), ``manual`` (optimization), ``workers`` (in the data loader),
``gate-STEP`` (begin the step once there is a file ``FOLDER/gate-STEP``), ``slow`` (a validation and a checkpoint take 3 s each),
``full`` (no file can be written while the checkpoints of steps 2 and 3 are saved).
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import holdfast
from holdfast.integrations.lightning import HoldfastCallback
from tests.runtime.chaos import gate, reach

os.environ.setdefault("TORCHELASTIC_RUN_ID", "job")  # as `holdfast run` sets it: Lightning then leaves starting processes to the launcher
folder, options = Path(sys.argv[1]), set(sys.argv[2:])
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
RANKS = int(os.environ.get("WORLD_SIZE") or 1)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are the same in every process, but for noise from the global generator."""

    def __init__(self, number: int) -> None:
        self._all = torch.rand(number, 4, generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        """Return one."""
        sample = self._all[place]
        return sample + torch.rand(4) / 10, sample.sum().sin().reshape(1)


def be_slow() -> None:
    """Take longer than a step may, on one rank."""
    if "slow" in options and os.environ["RANK"] == "0":
        time.sleep(3)


class Files(TorchCheckpointIO):
    """Files whose first one is written slowly, and others not at all."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one."""
        if checkpoint["global_step"] == 1:
            be_slow()
        if "full" not in options or checkpoint["global_step"] not in {2, 3}:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Model(pl.LightningModule):
    """Dropout and batch statistics; what it logs decides the learning rate and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.seen = MeanMetric()
        self.batches = 0
        self.automatic_optimization = "manual" not in options

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        step = self.trainer.global_step + 1
        if f"gate-{step}" in options:
            with holdfast.section("gate"):
                gate(folder, f"gate-{step}")
        if "CHAOS" in os.environ:
            reach("step", step)
        self.batches += 1
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.seen(batch[0].mean())
        self.log("seen", self.seen)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            if (batch_idx + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        if "CHAOS" in os.environ:
            reach("validation", self.trainer.global_step)
        if self.trainer.global_step == 2 and batch_idx == 0:
            be_slow()
        self.log("validation", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return an optimizer whose rate follows a mean over the epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what only this module knows."""
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load it."""
        self.batches = checkpoint["batches"]


def loader(number: int, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader; with workers, they draw the noise."""
    workers = 1 if "workers" in options and shuffle else 0
    return DataLoader(Noisy(number), batch_size=3, shuffle=shuffle, num_workers=workers)


pl.seed_everything(1, verbose=False)
early = EarlyStopping("validation", patience=5)
best = ModelCheckpoint(folder / "lightning", monitor="validation", save_top_k=2, save_last=True)
accumulation: list[Any] = [] if "manual" in options else [GradientAccumulationScheduler({0: 2, 2: 1})]
trainer = pl.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
    num_nodes=RANKS // int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
    strategy="ddp",
    max_epochs=3,
    val_check_interval=0.5,
    limit_val_batches=2,
    callbacks=[early, best, *accumulation, *([] if "plain" in options else [HoldfastCallback()])],
    plugins=[Files()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, loader(30, shuffle=True), loader(12, shuffle=False))

digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
results = {"model": digest.hexdigest(), "step": trainer.global_step, "epoch": trainer.current_epoch, "batches": model.batches}
results |= {"rate": trainer.optimizers[0].param_groups[0]["lr"], "random": torch.rand(2).tolist(), "wait": early.wait_count}
results |= {"metrics": {name: float(one) for name, one in trainer.callback_metrics.items()}, "best": float(best.best_model_score or 0)}
(folder / f"result-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
