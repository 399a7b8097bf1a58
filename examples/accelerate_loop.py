"""Train a small network with Accelerate, in a loop of its own whose steps end with `session.step`.

Run it with `holdfast run examples/accelerate_loop.yaml`, under `torchrun`, or alone.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(1)
    holdfast.join()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)  # it looks for GPUs only
    x = torch.rand(4096, 8)
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    loader = holdfast.Loader(batches, endless=False)

    with holdfast.session(model=model, optimizer=optimizer, data=loader).start() as session:
        session.stabilize_ddp(model)
        for epoch in range(loader.epoch, given.epochs):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and session.step(loss) and session.steps_done % 10 == 0:
                    accelerator.print(f"step {session.steps_done}: loss {session.loss:.6f}")
            accelerator.print(f"epoch {epoch} is done")


if __name__ == "__main__":
    main()
