"""What all scripts share: the model, the data, the marks of steps, and the final weights."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

PLACE: Final = Path(os.environ["BENCH_PLACE"])
STEPS: Final = int(os.environ["BENCH_STEPS"])
RANK: Final = os.environ["RANK"]
RANKS: Final = int(os.environ["WORLD_SIZE"])
WORDS: Final = 64
LENGTH: Final = 64
BATCH: Final = 8
WIDTH: Final = 128

torch.set_num_threads(1)


def mark(step: int) -> None:
    """Write down that *step* has ended, with the process and the time."""
    with (PLACE / f"steps-{RANK}").open("a") as file:
        file.write(f"{step} {os.getpid()} {time.time()!r}\n")


def save_weights(weights: Mapping[str, Tensor]) -> None:
    """Write the final weights, on rank 0."""
    if RANK == "0":
        torch.save(dict(weights), PLACE / "weights.pt")


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Sequences that count upwards from a random token: as many as *steps* steps take."""

    def __init__(self, steps: int) -> None:
        first = torch.randint(WORDS, (steps * BATCH * RANKS, 1), generator=torch.Generator().manual_seed(1))
        self._tokens = (first + torch.arange(LENGTH + 1)) % WORDS

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._tokens)

    def __getitem__(self, place: int) -> Tensor:
        """Return one, of shape (LENGTH + 1,)."""
        return self._tokens[place]


class Gpt(nn.Module):
    """A small decoder: tokens of shape (batch, LENGTH + 1) in, the mean loss of the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        x, y = tokens[:, :-1], tokens[:, 1:]
        hidden = self.token(x) + self.place(torch.arange(LENGTH))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
