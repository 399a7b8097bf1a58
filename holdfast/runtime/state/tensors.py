"""What a rank holds of a tensor, and how it lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.tensor_layout import is_dense


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of *tensor*: all of a plain one, the local shard of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def fills_its_memory(tensor: Tensor) -> bool:
    """Return whether *tensor* can be copied as the memory it lies in: contiguous, transposed or ``channels_last``.

    This excludes tensors with gaps or shared elements, and those whose memory does not hold their values (a lazy conjugate).
    """
    local = local_of(tensor)
    return local.layout is torch.strided and is_dense(local.shape, local.stride()) and not (local.is_conj() or local.is_neg())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of *tensor*'s local part as a flat uint8 view, in memory order."""
    local = local_of(tensor).detach()
    if not fills_its_memory(local):
        raise ValueError("a tensor with gaps or overlaps in its memory has no flat view: copy it first")
    return local.as_strided((local.numel(),), (1,)).view(torch.uint8)
