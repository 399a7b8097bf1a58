"""What a collective brings when every member gives the same: an answer that hurts nobody, where there is no peer to ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_equals(name: str, me: int, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Answer as if every member had given what this one gave; what comes from a single peer is zeros."""
    with torch.no_grad():
        for one, value in zip(outputs, _of_equals(name, me, outputs, inputs), strict=True):
            if value is None:
                one.detach().zero_()
            elif value is not one:
                one.detach().view(value.shape).copy_(value)


def _of_equals(name: str, me: int, outputs: list[Tensor], inputs: list[Tensor]) -> Sequence[Tensor | None]:
    """Return for each of *outputs* what equals would bring, in a shape it can be viewed in; nothing where zeros must do."""
    if name in ("allgather", "gather"):
        return [inputs[number * len(inputs) // len(outputs)] for number in range(len(outputs))]
    if name == "allgather_coalesced":  # all tensors of one member, then all of the next
        return [inputs[number % len(inputs)] for number in range(len(outputs))]
    if name == "all_gather_single":
        return [inputs[0].reshape(1, -1).expand(outputs[0].numel() // max(1, inputs[0].numel()), -1)]
    if name in ("reduce_scatter", "reduce_scatter_single"):
        return inputs[me : me + 1] if name == "reduce_scatter" else [inputs[0].reshape(-1, outputs[0].numel())[me]]
    if name.startswith(("recv", "scatter", "all_to_all", "alltoall")):
        given = [*inputs, *[None] * len(outputs)]
        return [one if one is not None and one.numel() == out.numel() else None for out, one in zip(outputs, given, strict=False)]
    return outputs  # a reduction, or a broadcast: what is there already
