"""Train a small GPT of Megatron Core with tensor parallelism, in a loop that calls what Megatron-LM's own training loop calls.

holdfast run --nproc-per-node 2 examples/megatron_core.py --steps 50

Megatron Core is made for GPUs: `adapt_to_cpu` has what a machine without one needs besides.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from holdfast.integrations import megatron as ft_integration

LENGTH, TOKENS = 16, 64


def adapt_to_cpu() -> None:
    """Have Megatron Core take the CPU for its device; without dropout it needs no random generators for each tensor-parallel rank."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()


def build() -> tuple[Any, torch.device]:
    """Create the groups and the model; return it with its device."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(1)
    if gpu:
        model_parallel_cuda_manual_seed(1)
    else:
        adapt_to_cpu()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not gpu,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=TOKENS, max_sequence_length=LENGTH)
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return model.to(device), device


def loss_of(model: Any, iteration: int, device: torch.device) -> torch.Tensor:  # noqa: ANN401
    """Return the loss on the sequences of an iteration, which count upwards from random tokens."""
    first = torch.randint(TOKENS, (4, 1), generator=torch.Generator().manual_seed(iteration))
    tokens = ((first + torch.arange(LENGTH + 1)) % TOKENS).to(device)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    places = torch.arange(LENGTH, device=device).expand(4, LENGTH)
    loss: torch.Tensor = model(tokens[:, :-1].contiguous(), places, mask, labels=tokens[:, 1:].contiguous()).mean()
    return loss


def train(folder: Path, steps: int, every: int, before_step: Callable[[int], None] = lambda _: None) -> torch.nn.Module:
    """Train, save *every* few steps, and resume from the newest checkpoint; return the model."""
    ft_integration.setup()
    model, device = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, iteration = dist.get_rank(), 0
    folder.mkdir(parents=True, exist_ok=True)
    newest = folder / "latest"
    if newest.exists():
        iteration = int(newest.read_text())
        saved = torch.load(folder / f"{iteration}-{rank}.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
        print(f"rank {rank}: resumed after step {iteration}", flush=True)
    while iteration < steps:
        before_step(iteration + 1)
        ft_integration.on_training_step_start()
        loss = loss_of(model, iteration, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        iteration += 1
        ft_integration.on_training_step_end(iteration, loss)
        if iteration % every == 0:
            ft_integration.on_checkpointing_start()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{iteration}-{rank}.pt")
            dist.barrier()  # `latest` names only what all ranks have saved
            if rank == 0:
                newest.with_suffix(".new").write_text(str(iteration))
                newest.with_suffix(".new").rename(newest)
            ft_integration.on_checkpointing_end(is_async_finalization=False)
            if rank == 0:
                print(f"step {iteration}: loss {loss.item():.4f}", flush=True)
    ft_integration.shutdown()
    dist.barrier()
    return model  # type: ignore[no-any-return]


def main() -> None:
    """Train as the options say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("megatron-core"))
    given = parser.parse_args()
    train(given.folder, given.steps, every=10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
