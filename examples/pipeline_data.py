"""Train the byte-level GPT of byte_gpt.py as a pipeline of stages, each stage on several ranks: pipeline x data.

- `torchrun --nproc-per-node 4 examples/pipeline_data.py --steps 50`: two stages on two ranks each
- `holdfast run examples/pipeline_data.yaml`: the same under Holdfast, which handles faults

The stages are those of `torch.distributed.pipelining`; the ranks of a stage average their gradients by DDP, once a step. They hold
copies of each other, so a lost one receives its state from the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_gpt import BYTES, ByteGPT, Windows, decayed, fingerprint, library_text  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

import holdfast

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}


class Part(nn.Module):
    """Some consecutive layers of a `ByteGPT`, under their names there: checkpoints are those of the complete model."""

    def __init__(self, full_model: ByteGPT, layers: list[int]) -> None:
        super().__init__()
        last = len(full_model.blocks) - 1
        self.embedding = full_model.embedding if 0 in layers else None
        self.blocks = nn.ModuleDict({str(layer): full_model.blocks[layer] for layer in layers})
        self.last_norm = full_model.last_norm if last in layers else None
        self.readout = full_model.readout if last in layers else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for *x*: byte codes before the first layer, logits after the last."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if self.last_norm is not None and self.readout is not None:
            x = self.readout(self.last_norm(x))
        return x


class Stage(PipelineStage):
    """A stage that knows all shapes, and so exchanges nothing with its neighbours before its first step.

    torch has the stages vote on whether all shapes are known. A rank that joins a running pipeline would vote alone.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:  # noqa: ARG002, FBT001 (torch's)
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:  # noqa: ARG002 (torch's)
        return torch.ones(1, dtype=torch.int32)


class Loss:
    """The mean loss of predicting the next byte, times the weight of the current micro-batch."""

    weight = 1.0

    def __call__(self, logits: Tensor, following: Tensor) -> Tensor:
        """Return the loss of predicting *following* by *logits*."""
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()) * self.weight


def stage_of(given: argparse.Namespace, part: nn.Module, number: int, stages: int, group: dist.ProcessGroup) -> Stage:
    """Return stage *number* of *stages*: *part*, with the shapes of its inputs and outputs."""
    size = given.batch // given.microbatches, given.context
    inner = torch.empty(*size, given.width, requires_grad=True)
    text, logits = torch.empty(*size, dtype=torch.long), torch.empty(*size, BYTES, requires_grad=True)
    ends = text if number == 0 else inner, logits if number == stages - 1 else inner
    return Stage(part, number, stages, torch.device("cpu"), input_args=ends[0], output_args=ends[1], group=group)


def averaged(part: nn.Module, data: dist.ProcessGroup) -> DistributedDataParallel:
    """Let the ranks of a stage average the gradients of *part*, in one bucket.

    Buffers are constants here. DDP would broadcast them in its first step only, because a pipeline bypasses it until the end of a step.
    """
    megabytes = 1 + sum(p.numel() * p.element_size() for p in part.parameters()) // 2**20
    wrapped = DistributedDataParallel(part, process_group=data, bucket_cap_mb=2 * megabytes)
    wrapped.broadcast_buffers = False  # from torch 2.13 on also the option `forward_sync_buffers`
    return wrapped


def run_pipeline(schedule: Any, loss_of: Loss, micro_batch: Any, *, takes_text: bool) -> list[Tensor]:  # noqa: ANN401 (torch's, Holdfast's)
    """Run a *micro_batch* of the step forward and backward through the pipeline; return its loss where the last stage is."""
    losses: list[Tensor] = []
    (text, following), loss_of.weight = micro_batch.batch, micro_batch.weight
    schedule.step(*([text] if takes_text else []), target=following, losses=losses, return_outputs=False)
    return [torch.stack(losses).mean().detach()] if losses else []


def clip(parameters: list[nn.Parameter], max_norm: float, pipeline: dist.ProcessGroup) -> None:
    """Clip the gradients of all stages together to the norm *max_norm*."""
    square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    dist.all_reduce(square, group=pipeline)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, square.sqrt())


def mean_of_last_stage(losses: list[Tensor], copies: int) -> Tensor:
    """Return the sum of *losses*, which the last stages have, as a mean over their *copies*; bit-identical on every rank."""
    total = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(total)
    return total / copies


def fingerprint_of_all(part: Part, full_model: ByteGPT) -> str:
    """Return the SHA-256 of the parameters of all stages."""
    found: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, part.state_dict())
    for one in found:
        full_model.load_state_dict(one, strict=False)
    return str(fingerprint(full_model))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pipeline", type=int, default=2, metavar="RANKS", help="ranks that a sample passes through")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b", help="interleaved: two stages on each rank")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch in the pipeline")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows per pipeline and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="maximum bytes of text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS", help="steps between two reports of the loss")
    parser.add_argument("--result", type=Path, help="write the final loss and the parameters' SHA-256 to this JSON file")
    given = parser.parse_args()
    if given.batch % given.microbatches or given.microbatches % given.pipeline:
        parser.error("--microbatches must divide --batch, and be a multiple of --pipeline")
    return given


def main() -> None:
    """Train, and write the result."""
    given = arguments()
    torch.manual_seed(given.seed)  # the same initial weights on every rank
    torch.use_deterministic_algorithms(mode=True)
    holdfast.join()
    copies = dist.get_world_size() // given.pipeline
    mesh = init_device_mesh("cpu", (given.pipeline, copies), mesh_dim_names=("pipeline", "data"))
    pipeline, data = mesh["pipeline"].get_group(), mesh["data"].get_group()

    a_rank = 2 if given.schedule == "interleaved" else 1  # stages of each rank
    stages = given.pipeline * a_rank
    mine = range(dist.get_rank(pipeline), stages, given.pipeline)
    layers = [list(range(given.layers * number // stages, given.layers * (number + 1) // stages)) for number in range(stages)]
    full_model = ByteGPT(given.width, given.layers, given.heads, given.context)
    part = Part(full_model, [layer for number in mine for layer in layers[number]])
    optimizer = torch.optim.AdamW(decayed(part, 0.1), lr=given.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 20, total_iters=20)

    # A batch is that of a complete step, divided among the pipelines: the order is the same whatever rank this process becomes.
    windows = Windows(library_text(given.bytes), given.context)
    order = RandomSampler(windows, generator=torch.Generator().manual_seed(given.seed))
    loader = holdfast.Loader(DataLoader(windows, given.batch * copies, sampler=order, drop_last=True))

    with holdfast.session(model=part, optimizer=optimizer, schedulers=warmup, data=loader, any_rank=True) as session:
        wrapped = [session.stabilize_ddp(averaged(Part(full_model, layers[number]), data)) for number in mine]
        own = [stage_of(given, one, number, stages, pipeline) for one, number in zip(wrapped, mine, strict=True)]
        loss_of = Loss()
        schedule = SCHEDULES[given.schedule](own if a_rank > 1 else own[0], given.microbatches, loss_fn=loss_of)
        for step in session.steps(until=given.steps):
            micro_batches = session.micro_batches(group=data, max_samples=given.batch, equal_size=True)
            losses = [loss for one in micro_batches for loss in run_pipeline(schedule, loss_of, one, takes_text=0 in mine)]
            clip(list(part.parameters()), 1.0, pipeline)
            loss = mean_of_last_stage(losses, dist.get_world_size(data))  # before the optimizer, in whose step all ranks vote
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            step.end(loss)
            if session.rank == 0 and session.steps_done == step.number and step.number % given.print_every == 0:
                print(f"step {step.number}: loss {session.loss:.4f}", flush=True)

        sha = fingerprint_of_all(part, full_model)
    if session.rank == 0:
        print(f"done: {session.steps_done} steps, loss {session.loss}", flush=True)
    if session.rank == 0 and given.result:
        given.result.write_text(json.dumps({"steps": session.steps_done, "loss": session.loss, "parameters_sha256": sha}) + "\n")


if __name__ == "__main__":
    main()
