"""Checks that the ranks' states agree, on disk or in memory: counters, positions in the data, random generators, tensor values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.runtime.checkpoint_verifier.findings import Findings, differing_ranks, listed

SHAPED: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "prev", "ax"}
)
"""Optimizer state of torch's optimizers that has the shape of its parameter."""


def check_counters(found: Findings, by_rank: Mapping[int, Mapping[str, float]]) -> None:
    """Check the step counters of the optimizers, by rank and key: equal on all ranks, and within each optimizer."""
    by_key: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, counters in by_rank.items():
        for key, count in counters.items():
            by_key[key][rank] = count
    if not by_key:
        found.unproven.append("the optimizers have no step counters")
        return
    broken = [line for key, counts in sorted(by_key.items()) for line in differing_ranks(f"the counter '{key}'", counts)]
    found.prove(f"{len(by_key)} step counters of the optimizers are the same on every rank that has them", broken)
    by_optimizer: dict[str, dict[str, float]] = defaultdict(dict)
    for key, counts in by_key.items():
        by_optimizer[".".join(key.split(".")[:2])][key] = min(counts.values())
    for optimizer, values in sorted(by_optimizer.items()):
        ordered = sorted(values.values())
        if ordered[0] == ordered[-1]:
            found.proven.append(f"all counters of {optimizer} say {ordered[0]:g} applied steps")
            continue
        usual = max(set(ordered), key=ordered.count)
        odd = listed(f"'{key}' says {value:g}" for key, value in sorted(values.items()) if value != usual)
        found.unproven.append(
            f"the counters of {optimizer} differ: most say {usual:g}, {odd}. "
            "That is correct if a parameter had no gradient in some steps, and damage if each has one in every step"
        )


def check_positions(found: Findings, data: Mapping[int, Any]) -> None:
    """Check that all ranks are at the same position in the data."""
    stored = {rank: one for rank, one in data.items() if one is not None}
    if not stored:
        found.unproven.append("no position in the data is stored: the session has no data=")
        return
    if missing := sorted(data.keys() - stored.keys()):
        found.unproven.append(f"rank {listed(missing)} stores no position in the data, the others do")
    known = {rank: one for rank, one in stored.items() if isinstance(one, Mapping) and {"epoch", "consumed"} <= one.keys()}
    if other := sorted(stored.keys() - known.keys()):
        found.unproven.append(f"the position in the data of rank {listed(other)} is stored by an object of the script and not checked")
    if known:
        where = {rank: f"epoch {one['epoch']}, {one['consumed']} batches" for rank, one in known.items()}
        broken = differing_ranks("the position in the data", where)
        found.prove(f"all positions in the data are the same: {next(iter(where.values()))}", broken)


def check_generators(found: Findings, stored: Mapping[int, Any], world: int) -> None:
    """Check that every rank's random generators are stored."""

    def is_state(value: Any) -> bool:  # noqa: ANN401 (whatever a tree may hold)
        if not isinstance(value, Mapping) or "python" not in value:
            return False
        state = value.get("torch")
        return isinstance(state, Tensor) and state.dtype == torch.uint8 and state.numel() > 0 and bool(state.any())

    broken = [f"the random generators of rank {rank} are missing" for rank in range(world) if not is_state(stored.get(rank))]
    found.prove(f"the random generators of {'the one rank' if world == 1 else f'all {world} ranks'} are there", broken)


def check_schedulers(found: Findings, stored: Mapping[int, Any]) -> None:
    """Check that the schedulers of all ranks are at the same step."""
    epochs = {rank: [one.get("last_epoch") for one in states if isinstance(one, Mapping)] for rank, states in stored.items()}
    if any(value is not None for values in epochs.values() for value in values):
        found.prove("the schedulers of all ranks are at the same step", differing_ranks("the schedulers' last_epoch", epochs))


def step_counters(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the step counters among the tensors and numbers of an optimizer's state, by key."""
    counts = {}
    for key, value in state.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key.endswith(".step") and isinstance(number, int | float):
            counts[key] = float(number)
    return counts


def leaves(tree: Any, key: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (a tree holds anything)
    """Yield the leaves of *tree*, under the keys that tensors there have."""
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            yield from leaves(part, f"{key}.{name}")
    elif isinstance(tree, list | tuple):
        for place, part in enumerate(tree):
            yield from leaves(part, f"{key}.{place}")
    else:
        yield key, tree


def check_values(found: Findings, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
    """Check shape and values of every tensor, one at a time: *shapes* by key, *read* loads one."""
    parameters = {key.removeprefix("model."): shape for key, shape in shapes.items() if key.startswith("model.")}
    broken: list[str] = []
    for key, shape in shapes.items():
        optimizer, _, state = key.partition(".state.")
        is_optimizer = optimizer.startswith("optimizer.")
        if 0 in shape:
            if is_optimizer:
                broken.append(f"'{key}' is empty")
            continue
        name, _, kind = state.rpartition(".")
        expected = parameters.get(name) if is_optimizer and kind in SHAPED else None
        if expected is not None and expected != shape:
            broken.append(f"'{key}' has the shape {shape}, and its parameter {expected}")
        tensor = read(key)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad == tensor.numel() and bool(torch.isnan(tensor).all()):
            broken.append(f"'{key}' is filled with NaN")
        elif bad:
            found.unproven.append(f"'{key}' has {bad} of {tensor.numel()} values that are not finite: training may have produced them")
    found.prove(f"{len(shapes)} tensors of model, optimizers and extras are complete, in their shapes, none filled with NaN", broken)


def differences(one: Any, other: Any, key: str) -> Iterator[str]:  # noqa: ANN401 (trees hold anything)
    """Yield the keys at which two trees differ, tensors compared bit by bit."""
    first, second = dict(leaves(one, key)), dict(leaves(other, key))
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second or not same(first[name], second[name]):
            yield name


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 (as above)
    """Return whether two values are equal, tensors bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)
    return type(one) is type(other) and (one == other or (one != one and other != other))  # noqa: PLR0124 (NaN equals NaN here)


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of *tensor*."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
