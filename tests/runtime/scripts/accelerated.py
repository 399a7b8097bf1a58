"""An Accelerate loop in managed groups: at every step each rank records which rank it is, in every place that knows one."""

from __future__ import annotations

import colorsys  # noqa: F401 (of the standard library, and imported by nobody else here)
import json
import os
import sys
from pathlib import Path

FIRST = "accelerate" in sys.modules

import torch  # noqa: E402 (what is imported by now is noted first)
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

if "trainer" in sys.argv:
    from transformers import Trainer, TrainingArguments

import holdfast  # noqa: E402
from tests.runtime.chaos import gate, reach  # noqa: E402

folder, until = Path(sys.argv[1]), int(sys.argv[2])
options = set(sys.argv[3:])
torch.set_num_threads(1)
holdfast.join()
accelerator = Accelerator(cpu=True)
accelerator.print(f"{accelerator.process_index} is the main process", flush=True)
torch.manual_seed(1)
source = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.randn(64, 8, generator=source), torch.randn(64, 4, generator=source))
model = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, prepared, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, 4))
batches = list(loader)
trainer = None
if "trainer" in options:
    trainer = Trainer(model=nn.Linear(8, 4), args=TrainingArguments(output_dir=str(folder / "trainer"), use_cpu=True, report_to=[]))


def local_of(rank: int) -> int:
    """Return the place of *rank* on its node."""
    return rank % int(os.environ["LOCAL_WORLD_SIZE"])


def identity(step: int, rank: int) -> dict[str, object]:
    """Return who this process takes itself for."""
    indices = {
        "RANK": int(os.environ["RANK"]),
        "session": rank,
        "torch": dist.get_rank(),
        "accelerator": accelerator.process_index,
        "state": PartialState().process_index,
        "local": accelerator.local_process_index + rank - local_of(rank),
        "data": int((batches[0][0] == dataset.tensors[0][4 * rank : 4 * rank + 4]).all()) * rank,
    }
    mains = [accelerator.is_main_process]
    if trainer is not None:
        indices |= {"trainer": trainer.args.process_index, "trainer's local": trainer.args.local_process_index + rank - local_of(rank)}
        mains += [trainer.is_world_process_zero(), trainer.args.should_save]
    return {"step": step, "pid": os.getpid(), "mains": mains, "indices": indices, "imported before": FIRST}


with holdfast.session(model=model, optimizer=optimizer, any_rank="any" in options) as session:
    session.stabilize_ddp(wrapped)
    for step in session.steps(until=until):
        for name in [one for one in options if one == f"gate={step.number}"]:
            gate(folder, name)
        reach("forward", step.number)
        inputs, wanted = batches[step.number % len(batches)]
        loss = nn.functional.mse_loss(wrapped(inputs), wanted)
        accelerator.backward(loss)
        reported = accelerator.reduce(loss.detach().clone(), "mean")
        prepared.step()
        prepared.zero_grad()
        step.end(reported)
        if session.steps_done == step.number and "HOLDFAST_HOT_SPARE" not in os.environ:
            with (folder / "seen.jsonl").open("a") as seen:
                seen.write(json.dumps(identity(step.number, session.rank)) + "\n")
(folder / f"result-{session.rank}.json").write_text(json.dumps([one.tolist() for one in model.parameters()]))
