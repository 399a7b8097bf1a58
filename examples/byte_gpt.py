"""Train a small byte-level GPT on the text of the Python standard library: real input without a download.

- `python examples/byte_gpt.py --steps 50`: one process
- `torchrun --nproc-per-node 4 examples/byte_gpt.py --steps 200`: four ranks, DDP over gloo
- `holdfast run examples/byte_gpt.yaml`: the same under Holdfast, which handles faults

The loss that it reports is the mean over all ranks. Runs are bit-identical: the same arguments give the same loss at every
step and the same parameters at the end, however often training was interrupted and resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

BYTES = 256
"""Size of the vocabulary."""


class Rotary(nn.Module):
    """Rotary position embedding: rotate pairs of features by an angle that grows with the position."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        speed = 10_000.0 ** (-torch.arange(0, features, 2) / features)
        angle = torch.outer(torch.arange(context), speed)
        self.cos, self.sin = nn.Buffer(angle.cos(), persistent=False), nn.Buffer(angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate *x* of shape (batch, heads, positions, features)."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.split = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.rotary = Rotary(width // heads, context)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of *x* of shape (batch, positions, width)."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.split(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).flatten(2))
        return merged


class Block(nn.Module):
    """One layer: attention, then a feed-forward net, each with a residual connection."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for *x* of shape (batch, positions, width)."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = self.mlp(self.mlp_norm(x))
        return x + out


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, BYTES, bias=False)
        self.apply(self._initialise)
        for name, weight in self.named_parameters():  # so that the sum over layers does not grow with their number
            if name.endswith(("merge.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        """Initialise *module* as GPT-2 does."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """Return the mean loss of predicting *following* from *text*, both byte codes of shape (batch, positions)."""
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        logits = self.readout(self.last_norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text as windows of *context* bytes, each with the next byte of every position."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = number * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def text_of(file: Path, max_bytes: int) -> Tensor:
    """Return up to *max_bytes* of *file* as byte codes."""
    with file.open("rb") as opened:
        return torch.frombuffer(bytearray(opened.read(max_bytes)), dtype=torch.uint8)


def library_text(max_bytes: int) -> Tensor:
    """Return up to *max_bytes* of the standard library's source as byte codes, files in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:max_bytes].clone()


def decayed(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Return parameter groups: matrices have weight decay, biases and gains do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Return the mean of *loss* over all ranks: the same bits on each."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, to compare two runs bit by bit."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def wrapped(model: nn.Module) -> nn.Module:
    """Wrap *model* for data-parallel training when there is more than one rank."""
    if not dist.is_initialized():
        return model
    # One bucket with the complete model: one this small gains nothing from several.
    megabytes = 1 + sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20
    return DistributedDataParallel(model, bucket_cap_mb=2 * megabytes)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is reached")
    parser.add_argument("--text", type=Path, help="train on this file instead of the standard library's source")
    parser.add_argument("--bytes", type=int, default=2_000_000, help="maximum bytes of text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS", help="steps between two reports of the loss")
    parser.add_argument("--stock-groups", action="store_true", help="let torch create the groups: a fault then leads to a restart")
    parser.add_argument("--result", type=Path, help="write the final loss and the parameters' SHA-256 to this JSON file")
    return parser.parse_args()


def main() -> None:
    """Train, and write the result."""
    given = arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(given.seed)  # the same initial weights on every rank
    torch.use_deterministic_algorithms(mode=True)
    if not given.stock_groups:
        holdfast.join()
    print(f"rank {rank}: process {os.getpid()}", flush=True)

    model = ByteGPT(given.width, given.layers, given.heads, given.context)
    optimizer = torch.optim.AdamW(decayed(model, 0.1), lr=given.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / given.warmup, total_iters=given.warmup)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, given.steps - given.warmup), eta_min=given.lr / 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [given.warmup])

    text = text_of(given.text, given.bytes) if given.text else library_text(given.bytes)
    held_out = len(text) // 50
    windows = Windows(text[:-held_out], given.context)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        windows, num_replicas=ranks, rank=rank, seed=given.seed, drop_last=True
    )
    loader = holdfast.Loader(DataLoader(windows, given.batch, sampler=sampler, drop_last=True))

    with holdfast.session(model=model, optimizer=optimizer, schedulers=schedule, data=loader, any_rank=True) as session:
        parallel, batches = session.stabilize_ddp(wrapped(model)), iter(loader)
        for step in session.steps(until=given.steps):
            loss = parallel(*next(batches))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss = mean_over_ranks(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step.end(loss)
            if session.rank == 0 and session.steps_done == step.number and step.number % given.print_every == 0:
                print(f"step {step.number}: loss {session.loss:.4f}", flush=True)

        with session.section("evaluation", limit=600), torch.no_grad():
            unseen = Windows(text[-held_out:], given.context)
            final = parallel.eval()(*(torch.stack(part) for part in zip(*(unseen[n] for n in range(min(32, len(unseen)))), strict=True)))
    if session.rank == 0:
        print(f"done: {session.steps_done} steps, loss {session.loss}, on unseen text {final.item():.4f}", flush=True)
    if session.rank == 0 and given.result:
        result = {"steps": session.steps_done, "loss": session.loss, "unseen_loss": final.item(), "parameters_sha256": fingerprint(model)}
        given.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
