"""Let DDP add gradients in one order from its first step on, so that losses after a restart are equal to the bit.

DDP sums gradients in buckets. After its first step it sorts them anew, in the order in which gradients came, and a ring
adds each value in an order that depends on its place in a bucket. A resumed run would reduce its first step in another
layout than an undisturbed run does at that step: the loss differs by some 1e-7, and all that follow.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

M = TypeVar("M", bound=nn.Module)


def settled(model: M) -> M:
    """Have DDP sort its buckets now, before the first real step; what is not a fresh DDP module is left as it is.

    One backward pass through a sum that uses every parameter, and not the model, shows DDP the order: the last parameter
    comes first, much as it would with the model itself. It costs one reduction of the gradients, all zero.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return model  # this one never sorts anew
    if model.static_graph or model.mixed_precision:
        return model  # these learn from their first backward pass, which must be the model's own
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if not parameters or any(parameter.grad is not None for parameter in parameters):
        return model
    reducer = model.reducer
    with torch.enable_grad():
        total = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            total = total + parameter.flatten()[:1].sum().to(total) * 0
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        total.backward()
    for parameter in parameters:
        parameter.grad = None
    return model
