"""What HoldfastCallback refuses: each misuse in turn, in one process; write what each one said."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy

from holdfast.integrations.lightning import HoldfastCallback

folder = Path(sys.argv[1])
os.environ.setdefault("TORCHELASTIC_RUN_ID", "job")
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Unsaveable(pl.Callback):
    """A callback with a state that no checkpoint may contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"path": Path("somewhere")}


def fit(*callbacks: Any, model: Any = None, ckpt_path: Any = None, **more: Any) -> None:
    """Train for a step."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, callbacks=list(callbacks), **quiet, **more)
    trainer.fit(model or BoringModel(), ckpt_path=ckpt_path)


def said(act: Callable[[], object]) -> str:
    """Return the error of *act*; empty if there is none."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 (which one it is, is what is asked)
        return f"{type(error).__name__}: {error}"
    return ""


class Sharded(BoringModel):
    """A model as sharding strategies want it."""

    def configure_model(self) -> None:
        """Do nothing."""


(folder / "torn.ckpt").write_bytes(b"PK\x03\x04 the beginning of a checkpoint")
found = {
    "option": said(lambda: HoldfastCallback(every=3)),
    "sharded": said(lambda: fit(HoldfastCallback(), model=Sharded(), strategy=ModelParallelStrategy())),
    "averaging": said(lambda: fit(HoldfastCallback(), EMAWeightAveraging())),
    "twice": said(lambda: fit(HoldfastCallback(), HoldfastCallback())),
    "state": said(lambda: fit(HoldfastCallback(), Unsaveable())),
    "torn": said(lambda: fit(HoldfastCallback(), ckpt_path=folder / "torn.ckpt")),
    "second": said(lambda: fit(HoldfastCallback())),
}
(folder / "result-0.json").write_text(json.dumps(found))
