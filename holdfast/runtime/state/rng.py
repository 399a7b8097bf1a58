"""Random number generators: read and set their states, so that a resumed run draws what an undisturbed one would."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

State = dict[str, Any]


def capture() -> State:
    """Return the state of every generator in use, in values that `torch.load` accepts with ``weights_only``."""
    state: State = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, place, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), int(place), int(has_gauss), float(gauss))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def apply(state: State) -> None:
    """Put the generators into *state*; skip those that are not in use here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def temporarily(state: State) -> Iterator[None]:
    """Run a block with the generators in *state*, and restore them afterwards."""
    before = capture()
    apply(state)
    try:
        yield
    finally:
        apply(before)


def diverge(number: int) -> None:
    """Make the generators draw other numbers than the rank their state was copied from, as *number* and that state decide."""
    seed = int(torch.randint(2**31, ()).item()) ^ (number + 1) * 0x9E3779B1 % 2**31
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
