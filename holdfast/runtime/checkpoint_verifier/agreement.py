"""Whether the ranks' states agree, wherever they were kept: counters, positions, generators, values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.runtime.checkpoint_verifier.findings import Findings, apart, listed

SHAPED: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "prev", "ax"}
)
"""What torch's optimizers keep in the shape of the parameter itself."""


def counters(found: Findings, by_rank: Mapping[int, Mapping[str, float]]) -> None:
    """Judge the optimizers' own step counters: *by_rank* has them by their keys."""
    by_key: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, held in by_rank.items():
        for key, count in held.items():
            by_key[key][rank] = count
    if not by_key:
        found.unproven.append("the optimizers count no steps of their own")
        return
    broken = [line for key, counts in sorted(by_key.items()) for line in apart(f"the counter '{key}'", counts)]
    by_optimizer: dict[str, dict[str, float]] = defaultdict(dict)
    for key, told in by_key.items():
        by_optimizer[".".join(key.split(".")[:2])][key] = min(told.values())
    found.prove(f"{len(by_key)} step counters of the optimizers are the same on every rank that has them", broken)
    for optimizer, values in sorted(by_optimizer.items()):
        _within(found, optimizer, values)


def _within(found: Findings, optimizer: str, values: Mapping[str, float]) -> None:
    """Judge the counters of one optimizer among each other."""
    counts = sorted(values.values())
    if counts[0] == counts[-1]:
        found.proven.append(f"all counters of {optimizer} say {counts[0]:g} applied steps")
        return
    usual = max(set(counts), key=counts.count)
    odd = listed(f"'{key}' says {value:g}" for key, value in sorted(values.items()) if value != usual)
    found.unproven.append(
        f"the counters of {optimizer} differ: most say {usual:g}, {odd}. "
        "That is right where a parameter got no gradient in some steps, and damage where each gets one in every step"
    )


def positions(found: Findings, data: Mapping[int, Any]) -> None:
    """Judge the ranks' positions in the data."""
    told = {rank: one for rank, one in data.items() if one is not None}
    if not told:
        found.unproven.append("no position in the data was kept: the session was given no data=")
        return
    if missing := sorted(data.keys() - told.keys()):
        found.unproven.append(f"rank {listed(missing)} keeps no position in the data, the others do")
    known = {rank: one for rank, one in told.items() if isinstance(one, Mapping) and {"epoch", "consumed"} <= one.keys()}
    if other := sorted(told.keys() - known.keys()):
        found.unproven.append(f"the position in the data of rank {listed(other)} is kept by an object of the script's own: it is there")
    if known:
        where = {rank: f"epoch {one['epoch']}, {one['consumed']} batches" for rank, one in known.items()}
        found.prove(f"all positions in the data are the same: {next(iter(where.values()))}", apart("the position in the data", where))


def generators(found: Findings, kept: Mapping[int, Any], world: int) -> None:
    """See that every rank's random generators are there."""
    broken = [f"the random generators of rank {rank} are not there" for rank in range(world) if not _is_state(kept.get(rank))]
    found.prove(f"the random generators of {'the one rank' if world == 1 else f'all {world} ranks'} are there", broken)


def _is_state(kept: Any) -> bool:  # noqa: ANN401 (whatever a tree may hold)
    if not isinstance(kept, Mapping) or "python" not in kept:
        return False
    state = kept.get("torch")
    return isinstance(state, Tensor) and state.dtype == torch.uint8 and state.numel() > 0 and bool(state.any())


def schedulers(found: Findings, kept: Mapping[int, Any]) -> None:
    """See that the ranks' schedulers stand at the same step."""
    told = {rank: [one.get("last_epoch") for one in held if isinstance(one, Mapping)] for rank, held in kept.items()}
    if any(value is not None for held in told.values() for value in held):
        found.prove("the schedulers of all ranks stand at the same step", apart("the schedulers' last_epoch", told))


def scalars(held: Mapping[str, Any]) -> dict[str, float]:
    """Return the step counters among the tensors and numbers of an optimizer's state, by key."""
    counts = {}
    for key, value in held.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key.endswith(".step") and isinstance(number, int | float):
            counts[key] = float(number)
    return counts


def leaves(tree: Any, key: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (a tree holds anything)
    """Yield all that hangs in *tree*, under the keys that tensors there have."""
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            yield from leaves(part, f"{key}.{name}")
    elif isinstance(tree, list | tuple):
        for place, part in enumerate(tree):
            yield from leaves(part, f"{key}.{place}")
    else:
        yield key, tree


def values(found: Findings, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
    """Look at every tensor, one at a time: *shapes* has their keys, *read* brings one."""
    parameters = {key.removeprefix("model."): shape for key, shape in shapes.items() if key.startswith("model.")}
    broken: list[str] = []
    for key, shape in shapes.items():
        if 0 in shape:
            if key.startswith("optimizer."):
                broken.append(f"'{key}' is empty")
            continue
        if wanted := _shape_wanted(key, shape, parameters):
            broken.append(f"'{key}' has the shape {shape}, and its parameter {wanted}")
        tensor = read(key)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad == tensor.numel() and bool(torch.isnan(tensor).all()):
            broken.append(f"'{key}' is filled with NaN")
        elif bad:
            found.unproven.append(f"'{key}' has {bad} of {tensor.numel()} values that are no finite numbers: training may have made them")
    found.prove(f"{len(shapes)} tensors of model, optimizers and extras are there, whole, in their shapes, none filled with NaN", broken)


def _shape_wanted(key: str, shape: tuple[int, ...], parameters: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape that a tensor of an optimizer should have had, if it is known and another."""
    parts = key.split(".state.", 1)
    if not key.startswith("optimizer.") or len(parts) == 1:
        return None
    name, _, kind = parts[1].rpartition(".")
    wanted = parameters.get(name)
    return wanted if kind in SHAPED and wanted is not None and wanted != shape else None


def differences(one: Any, other: Any, key: str) -> Iterator[str]:  # noqa: ANN401 (trees hold anything)
    """Yield the keys at which two trees differ, tensors to the bit."""
    first, second = dict(leaves(one, key)), dict(leaves(other, key))
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second or not same(first[name], second[name]):
            yield name


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 (as above)
    """Tell whether two values are the same, tensors to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)
    return type(one) is type(other) and (one == other or (one != one and other != other))  # noqa: PLR0124 (NaN is the same as NaN here)


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of *tensor*."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
