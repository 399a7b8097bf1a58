"""State outside of the session: whether a process that took a rank over has what the others have, and knows which rank it is."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.runtime.state import rng, tree
from holdfast.runtime.state.training import Training

Known = dict[str, tuple[Any, int]]
"""What is said somewhere in this process, and what it should be."""
LARGEST: Final = 2**20
"""Bytes of a buffer up to which it is compared."""
LONGEST: Final = 300
"""Characters of a difference that are told."""
MOST: Final = 20


def identity(rank: int, world: int) -> list[str]:
    """Return what in this process takes it for another rank than *rank*, or for one of another number than *world*."""
    known: Known = {
        "the environment variable RANK": (os.environ.get("RANK"), rank),
        "the environment variable WORLD_SIZE": (os.environ.get("WORLD_SIZE"), world),
    }
    if dist.is_initialized():
        known["torch.distributed.get_rank()"] = dist.get_rank(), rank
        known["torch.distributed.get_world_size()"] = dist.get_world_size(), world
    return [*_wrong(known), *libraries_with_other_rank(rank, world)]


def libraries_with_other_rank(rank: int, world: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return which libraries keep another rank than *rank*, of those that are known to keep one for the life of the process."""
    known: Known = {}
    accelerate = dict(getattr(getattr(sys.modules.get("accelerate.state"), "PartialState", None), "_shared_state", None) or {})
    if accelerate.get("distributed_type") is not None:
        wanted = {"process_index": rank, "num_processes": world, "local_process_index": _number(environment.get("LOCAL_RANK"))}
        known |= {f"accelerate.PartialState().{name}": (accelerate.get(name), value) for name, value in wanted.items()}
    for module in ("lightning.fabric.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        told = getattr(getattr(sys.modules.get(module), "rank_zero_only", None), "rank", None)
        if told is not None:
            known[f"{module}.rank_zero_only.rank"] = told, rank
    return _wrong(known)


def _wrong(known: Known) -> list[str]:
    told = ((name, value, wanted) for name, (value, wanted) in known.items() if value is not None and str(value) != str(wanted))
    return [f"{name} is {value}, and should be {wanted}" for name, value, wanted in told]


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def comparable(training: Training) -> dict[str, str]:
    """Return what can be compared with other ranks: settings of the process, generators, buffers; each as it is, or as a digest."""
    generators = {f"the random generator of {name}": digest(state) for name, state in rng.capture().items()}
    buffers = {
        f"the model's buffer '{name}'": digest(one.detach().cpu())
        for name, one in training.model.named_buffers()
        if not hasattr(one, "device_mesh") and one.numel() * one.element_size() <= LARGEST
    }
    return {
        "the default type of tensors": str(torch.get_default_dtype()),
        "the deterministic mode of torch": str(torch.get_deterministic_debug_mode()),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "the mode of gradients": str(torch.is_grad_enabled()),
        "the mode of the model": str(training.model.training),
        "the arguments of the script": json.dumps(sys.argv[1:]),
        "the working directory": digest(str(os.path.realpath("."))),
        **generators,
        **buffers,
    }


def digest(value: Any) -> str:  # noqa: ANN401 (whatever a state holds)
    """Return a short digest of *value*."""
    return hashlib.sha256(tree.pickled(value)).hexdigest()[:12]


def differences(told: Mapping[int, Mapping[str, str]], new: set[int], me: int) -> list[str]:
    """Return where this rank (*me*), which is *new*, differs from the others, of those things in which all others that stayed agree."""
    stayed = [facts for rank, facts in told.items() if rank not in new]
    if me not in new or not stayed:
        return []
    found = []
    for name, value in told[me].items():
        there = {facts.get(name) for facts in stayed}
        if len(there) == 1 and (common := next(iter(there))) is not None and common != value and len(stayed) > 1:
            found.append(f"{name} is not that of the other ranks ({value} here, {common} there)")
    return found


def shortened(notes: list[str]) -> list[str]:
    """Return *notes* so that they can be told."""
    return [one[:LONGEST] for one in notes[:MOST]]
