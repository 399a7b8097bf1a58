"""Take nested state apart into tensors, which `torch.distributed.checkpoint` stores, and a tree of plain values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_TENSOR: Final = "holdfast:tensor"
"""Marks the place of a tensor in a tree; its value is the tensor's key."""


def pack(value: object, key: str, tensors: dict[str, Tensor], *, scalars: bool = False) -> Any:  # noqa: ANN401 (a tree holds anything)
    """Return *value* with every tensor replaced by a mark, and put the tensors into *tensors* under keys below *key*.

    A tensor without dimensions stays unless *scalars* are taken too: an optimizer has one for each parameter, and to DCP each costs as
    much as a big one.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and not scalars and not hasattr(value, "device_mesh"):
        return value.detach()
    if isinstance(value, Tensor):
        while key in tensors:  # {"a": {"b": ...}, "a.b": ...}
            key += "+"
        tensors[key] = value.detach()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        return {name: pack(part, f"{key}.{name}", tensors, scalars=scalars) for name, part in value.items()}
    if type(value) in (list, tuple):
        parts = [pack(part, f"{key}.{place}", tensors, scalars=scalars) for place, part in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def is_mark(value: object) -> bool:
    """Tell whether *value* stands for a tensor in a tree."""
    return isinstance(value, dict) and value.keys() == {_TENSOR}


def unpack(tree: object, tensor: Callable[[str], Tensor]) -> Any:  # noqa: ANN401 (as above)
    """Return *tree* with every mark replaced by what *tensor* gives for its key."""
    if isinstance(tree, dict):
        if is_mark(tree):
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


# -- for states that are taken at every step ----------------------------------------------------------------------------


class _Unusual(Exception):
    """Something that is neither a plain value nor a plain tensor."""


class _TreePickler(pickle.Pickler):
    """Writes plain values, and tensors as their bytes: `torch.save` takes milliseconds for what this does in some ten microseconds."""

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 (called for all that is no plain value)
        if value is _tensor:
            return NotImplemented  # by its name
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            raise _Unusual
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _tensor, (raw, str(value.dtype).removeprefix("torch."), tuple(value.shape))


class _TreeUnpickler(pickle.Unpickler):
    """Reads what `_TreePickler` writes, and refuses any code."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 (a callable)
        if (module, name) != (__name__, "_tensor"):
            raise pickle.UnpicklingError(f"{module}.{name} is not expected here")
        return _tensor


class _Tensor:
    """The one thing that a tree of bytes may call: to it the bytes of a tensor are given. Nothing that is read can change it."""

    __slots__ = ()

    def __call__(self, raw: bytes, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of these bytes."""
        dtype = getattr(torch, kind)
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{kind!r} is no type of a tensor's elements")
        return (torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)

    def __reduce__(self) -> str:
        """Be written by name."""
        return "_tensor"

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a state is not expected here")


_tensor: Final = _Tensor()


def pickled(tree: object) -> bytes:
    """Return *tree* as bytes for `unpickled`: quickly if there are but plain values and tensors in it, else as `to_bytes` does."""
    whole = io.BytesIO(b"q")
    whole.seek(1)
    try:
        _TreePickler(whole, pickle.HIGHEST_PROTOCOL).dump(tree)
    except _Unusual:
        return b"t" + to_bytes(tree).numpy().tobytes()
    return whole.getvalue()


def unpickled(data: bytes) -> Any:  # noqa: ANN401 (a tree holds anything)
    """Return the tree that `pickled` made *data* of; code in it is refused."""
    if data[:1] == b"q":
        return _TreeUnpickler(io.BytesIO(memoryview(data)[1:])).load()
    return from_bytes(torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8))
