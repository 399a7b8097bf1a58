"""State outside of the session: whether a process that took over a rank has the same as the others, and knows which rank it is."""

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

Values = dict[str, tuple[Any, int]]
"""Values somewhere in this process, by what they are, and what they should be."""
MAX_BUFFER: Final = 2**20
"""Bytes of a buffer up to which it is compared."""
MAX_DIFFERENCE: Final = 300
"""Characters of a difference that are reported."""
MAX_DIFFERENCES: Final = 20


def identity(rank: int, world: int) -> list[str]:
    """Return what in this process takes it for another rank than *rank*, or takes the world for another size than *world*."""
    values: Values = {
        "the environment variable RANK": (os.environ.get("RANK"), rank),
        "the environment variable WORLD_SIZE": (os.environ.get("WORLD_SIZE"), world),
    }
    if dist.is_initialized():
        values["torch.distributed.get_rank()"] = dist.get_rank(), rank
        values["torch.distributed.get_world_size()"] = dist.get_world_size(), world
    return [*_wrong(values), *libraries_with_other_rank(rank, world)]


def libraries_with_other_rank(rank: int, world: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return which libraries hold another rank than *rank*, of those that are known to hold one for the life of the process."""
    values: Values = {}
    accelerate = dict(getattr(getattr(sys.modules.get("accelerate.state"), "PartialState", None), "_shared_state", None) or {})
    if accelerate.get("distributed_type") is not None:
        local = environment.get("LOCAL_RANK") or ""
        wanted = {"process_index": rank, "num_processes": world, "local_process_index": int(local) if local.isdigit() else 0}
        values |= {f"accelerate.PartialState().{name}": (accelerate.get(name), value) for name, value in wanted.items()}
    for module in ("lightning.fabric.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        values[f"{module}.rank_zero_only.rank"] = getattr(getattr(sys.modules.get(module), "rank_zero_only", None), "rank", None), rank
    return _wrong(values)


def _wrong(values: Values) -> list[str]:
    wrong = ((name, value, wanted) for name, (value, wanted) in values.items() if value is not None and str(value) != str(wanted))
    return [f"{name} is {value}, and should be {wanted}" for name, value, wanted in wrong]


def comparable(training: Training) -> dict[str, str]:
    """Return what can be compared with other ranks: settings of the process, generators, buffers; each as it is, or as a digest."""
    generators = {f"the random generator of {name}": _digest(state) for name, state in rng.capture().items()}
    buffers = {
        f"the model's buffer '{name}'": _digest(one.detach().cpu())
        for name, one in training.model.named_buffers()
        if not hasattr(one, "device_mesh") and one.numel() * one.element_size() <= MAX_BUFFER
    }
    return {
        "the default type of tensors": str(torch.get_default_dtype()),
        "the deterministic mode of torch": str(torch.get_deterministic_debug_mode()),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "the mode of gradients": str(torch.is_grad_enabled()),
        "the mode of the model": str(training.model.training),
        "the arguments of the script": json.dumps(sys.argv[1:]),
        "the working directory": _digest(str(os.path.realpath("."))),
        **generators,
        **buffers,
    }


def _digest(value: Any) -> str:  # noqa: ANN401 (whatever a state holds)
    return hashlib.sha256(tree.pickled(value)).hexdigest()[:12]


def differences(states: Mapping[int, Mapping[str, str]], new: set[int], me: int) -> list[str]:
    """Return where this rank (*me*), which is *new*, differs from the others, in what all others that stayed agree on."""
    stayed = [state for rank, state in states.items() if rank not in new]
    if me not in new or not stayed:
        return []
    found = []
    for name, value in states[me].items():
        theirs = {state.get(name) for state in stayed}
        if len(theirs) == 1 and (common := next(iter(theirs))) is not None and common != value and len(stayed) > 1:
            found.append(f"{name} differs from the other ranks ({value} here, {common} there)")
    return found


def shortened(notes: list[str]) -> list[str]:
    """Return *notes*, bounded in length and number for a report."""
    return [one[:MAX_DIFFERENCE] for one in notes[:MAX_DIFFERENCES]]
