"""Split nested state into tensors, which `torch.distributed.checkpoint` stores, and a tree of plain values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_TENSOR: Final = "holdfast:tensor"
"""Marks the place of a tensor in a tree; the value is the tensor's key."""


def pack(value: object, key: str, tensors: dict[str, Tensor], *, scalars: bool = False) -> Any:  # noqa: ANN401 (a tree holds anything)
    """Return *value* with every tensor replaced by a mark, and add the tensors to *tensors* under keys below *key*.

    0-dimensional tensors stay in the tree unless *scalars* is set: an optimizer has one per parameter, and to DCP each costs as much as a
    large one.
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
    """Return whether *value* is the mark of a tensor."""
    return isinstance(value, dict) and value.keys() == {_TENSOR}


def unpack(tree: object, tensor: Callable[[str], Tensor]) -> Any:  # noqa: ANN401 (as above)
    """Return *tree* with every mark replaced by ``tensor(key)``."""
    if isinstance(tree, dict):
        if is_mark(tree):
            return tensor(tree[_TENSOR])
        return {name: unpack(part, tensor) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        parts = [unpack(part, tensor) for part in tree]  # type: ignore[attr-defined]
        return tuple(parts) if isinstance(tree, tuple) else parts
    return tree


def keys(tree: object) -> set[str]:
    """Return the keys of all marks in *tree*."""
    found: set[str] = set()

    def note(key: str) -> Tensor:
        found.add(key)
        return torch.empty(0)

    unpack(tree, note)
    return found


def to_bytes(tree: object) -> Tensor:
    """Return *tree* as a uint8 tensor, so that the checkpoint holds nothing but tensors."""
    data = io.BytesIO()
    torch.save(tree, data)
    return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:  # noqa: ANN401 (as above)
    """Return the tree in *data*; code in it is refused (``weights_only``)."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)


# -- for states that are read at every step -----------------------------------------------------------------------------


class _Unsupported(Exception):
    """A value that is neither plain nor a plain tensor."""


class _TreePickler(pickle.Pickler):
    """Writes plain values, and tensors as their bytes: some ten microseconds where `torch.save` takes milliseconds."""

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 (called for all that is not a plain value)
        if value is _tensor:
            return NotImplemented  # pickled by name
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            raise _Unsupported
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _tensor, (raw, str(value.dtype).removeprefix("torch."), tuple(value.shape))


class _TreeUnpickler(pickle.Unpickler):
    """Reads what `_TreePickler` writes, and refuses any code."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 (a callable)
        if (module, name) != (__name__, "_tensor"):
            raise pickle.UnpicklingError(f"{module}.{name} is not expected here")
        return _tensor


class _Tensor:
    """The only callable in a pickled tree: it makes a tensor of bytes. Nothing that is read can change it."""

    __slots__ = ()

    def __call__(self, raw: bytes, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor with these bytes."""
        dtype = getattr(torch, kind)
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{kind!r} is not an element type of tensors")
        return (torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)

    def __reduce__(self) -> str:
        """Be pickled by name."""
        return "_tensor"

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a state is not expected here")


_tensor: Final = _Tensor()


def pickled(tree: object) -> bytes:
    """Return *tree* as bytes for `unpickled`: quickly if it holds only plain values and tensors, else as `to_bytes` does."""
    data = io.BytesIO(b"q")
    data.seek(1)
    try:
        _TreePickler(data, pickle.HIGHEST_PROTOCOL).dump(tree)
    except _Unsupported:
        return b"t" + to_bytes(tree).numpy().tobytes()
    return data.getvalue()


def unpickled(data: bytes) -> Any:  # noqa: ANN401 (a tree holds anything)
    """Return the tree in *data*, which `pickled` made; code in it is refused."""
    if data[:1] == b"q":
        return _TreeUnpickler(io.BytesIO(memoryview(data)[1:])).load()
    return from_bytes(torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8))
