"""Make DDP add gradients in one order from its first step on, so that losses after a restart are bit-identical.

DDP sums gradients in buckets. After its first step it rebuilds them in the order in which gradients arrived, and a ring adds each value in
an order that depends on its place in a bucket. A resumed run would reduce its first step in another layout than an undisturbed run does at
that step: the loss differs by about 1e-7, and so do all that follow.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.runtime.groups.dry_runs.first_exchanges import scratch

M = TypeVar("M", bound=nn.Module)


_created: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_stable: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_watching = False


def watch() -> None:
    """Keep track of every DDP module that is created from now on."""
    global _watching  # noqa: PLW0603 (torch's hook is the process's, too)
    if _watching:
        return
    _watching = True

    def registered(module: nn.Module, name: str, _value: Any) -> None:  # noqa: ANN401 (torch's signature)
        if name == "module" and isinstance(module, DistributedDataParallel):
            _created.add(module)

    torch.nn.modules.module.register_module_module_registration_hook(registered)


def stabilize_all_ddp() -> bool:
    """Stabilize every DDP module that was created since `watch`; return whether all could be.

    A rank that joins later cannot take part in what the others did in their first steps: nothing may be left to do there.
    """
    found = [model for model in _created if model not in _stable]
    for model in found:
        stabilize_ddp(model)
    return all(model in _stable or getattr(model, "find_unused_parameters", False) for model in found)


def average_gradients(*, now: bool) -> None:
    """Have every DDP module that was created since `watch` average gradients in its next backward pass, or not yet."""
    for model in _created:
        model.require_backward_grad_sync = now  # type: ignore[assignment]  # what `no_sync` does


def stabilize_ddp(model: M) -> M:
    """Have DDP rebuild its buckets now, before the first real step; anything but a new DDP module is returned as it is.

    One backward pass through a sum that uses every parameter, without the model, shows DDP the order: the last parameter
    comes first, much as with the model itself. It costs one reduction of the gradients, all zero.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model in _stable:
        return model  # this one never rebuilds its buckets
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
        with scratch():
            total.backward()
    for parameter in parameters:
        parameter.grad = None
    if reducer._rebuild_buckets():  # noqa: SLF001 (what DDP does at its next forward pass)
        model._has_rebuilt_buckets = True  # noqa: SLF001
    _stable.add(model)
    return model
