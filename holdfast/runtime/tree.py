"""Take nested state apart into tensors, which `torch.distributed.checkpoint` stores, and a tree of plain values."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_TENSOR: Final = "holdfast:tensor"
"""Marks the place of a tensor in a tree; its value is the tensor's key."""


def pack(value: object, key: str, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401 (a tree holds anything)
    """Return *value* with every tensor replaced by a mark, and put the tensors into *tensors* under keys below *key*.

    A tensor without dimensions stays: an optimizer has one for each parameter, and to DCP each costs as much as a big one.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and not hasattr(value, "device_mesh"):
        return value.detach()
    if isinstance(value, Tensor):
        while key in tensors:  # {"a": {"b": ...}, "a.b": ...}
            key += "+"
        tensors[key] = value.detach()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        return {name: pack(part, f"{key}.{name}", tensors) for name, part in value.items()}
    if type(value) in (list, tuple):
        parts = [pack(part, f"{key}.{place}", tensors) for place, part in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def unpack(tree: object, tensor: Callable[[str], Tensor]) -> Any:  # noqa: ANN401 (as above)
    """Return *tree* with every mark replaced by what *tensor* gives for its key."""
    if isinstance(tree, dict):
        if tree.keys() == {_TENSOR}:
            return tensor(tree[_TENSOR])
        return {name: unpack(part, tensor) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        parts = [unpack(part, tensor) for part in tree]  # type: ignore[attr-defined]
        return tuple(parts) if isinstance(tree, tuple) else parts
    return tree


def keys(tree: object) -> set[str]:
    """Return the keys of all tensors that *tree* stands for."""
    found: set[str] = set()

    def note(key: str) -> Tensor:
        found.add(key)
        return torch.empty(0)

    unpack(tree, note)
    return found


def to_bytes(tree: object) -> Tensor:
    """Return *tree* as a tensor of bytes, so that the checkpoint holds tensors and nothing else."""
    whole = io.BytesIO()
    torch.save(tree, whole)
    return torch.frombuffer(bytearray(whole.getbuffer()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:  # noqa: ANN401 (as above)
    """Return the tree in *data*; code in it is refused (``weights_only``)."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
