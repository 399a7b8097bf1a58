"""What stays the same in a training from step to step: its tensors by key, and the tree around them.

Walking through model and optimizer takes milliseconds for some hundred parameters. For a snapshot at every step it is done once; afterwards
only the place of each tensor is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.state import tree
from holdfast.runtime.state.tensors import fills_its_memory, local_of
from holdfast.runtime.state.training import Training, state_of


class StateLayout:
    """The tensors of a training that only an applied step changes, and everything else in two trees: static and dynamic."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.tensors: dict[str, Tensor] = {}
        """Parameters and the optimizers' state, 0-dimensional tensors included."""
        self._rest: dict[str, Tensor] = {}
        """Tensors that are copied at the beginning of a step: buffers, and those with gaps or overlaps in their memory."""
        model = training.model.state_dict()
        buffers = {name for name, _ in training.model.named_buffers()}
        own = {name: value for name, value in [*model.items(), *training.model.named_buffers()] if isinstance(value, Tensor)}
        for name, value in own.items():
            (self._rest if name in buffers or not _is_copyable(value) else self.tensors)[f"model.{name}"] = value.detach()
        held: dict[str, Tensor] = {}
        optimizers = tree.pack([training.named(one) for one in training.optimizers], "optimizer", held, scalars=True)
        for key, value in held.items():
            (self.tensors if _is_copyable(value) else self._rest)[key] = value
        self._places = [
            (state, name, value) for one in training.optimizers for state in one.state.values() for name, value in state.items()
        ]
        self._owners = [(number, owner, state) for number, one in enumerate(training.optimizers) for owner, state in one.state.items()]
        self._homes = [(part._parameters, name, one) for part in training.model.modules() for name, one in part._parameters.items()]  # noqa: SLF001
        """The module that holds each parameter: `load_state_dict` with ``assign`` puts another one there."""
        self._counts = [len(one.state) for one in training.optimizers]
        self._held = [(state, name, value) for state, name, value in self._places if isinstance(value, Tensor)]
        # The objects that train, not their `detach`: only these follow when their data moves.
        live = [one for _, _, one in self._homes if one is not None] + [value for _, _, value in self._held]
        self._plain = [one for one in live if local_of(one) is one]
        self._sharded = [one for one in live if local_of(one) is not one]
        self._pointers = self._addresses()
        plain = {name: None if isinstance(value, Tensor) else value for name, value in model.items()}
        on_host = sorted(key for key, value in held.items() if local_of(value).device.type == "cpu")
        shards = {key: shard for key, one in (*self.tensors.items(), *self._rest.items()) if (shard := _shard_of(one)) is not None}
        self.static = tree.pickled({"model": plain, "optimizers": optimizers, "host": on_host, "shards": shards})

    def _addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._plain), *(local_of(one).data_ptr() for one in self._sharded)]

    def fits(self) -> bool:
        """Return whether every tensor is still the same object, in the same memory."""
        states = [one.state for one in self._training.optimizers]  # `load_state_dict` leaves the old one as it was, and makes another
        return (
            self._counts == [len(state) for state in states]
            and all([states[number].get(owner) is state for number, owner, state in self._owners])  # noqa: C419 (as below)
            and all([place.get(name) is one for place, name, one in self._homes])  # noqa: C419 (as below)
            and all([state.get(name) is value for state, name, value in self._held])  # noqa: C419 (some ten times faster than step by step)
            and self._pointers == self._addresses()
        )

    def dynamic(self, small: Mapping[str, Tensor]) -> bytes:
        """Return all that may change at any time, as it is now; *small* has the model's buffers as they were when the step began."""
        training = self._training
        settings = [
            [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups] for one in training.optimizers
        ]
        # Numbers that an optimizer keeps next to its tensors; their order shows which parameter they belong to.
        numbers = [state[name] for state, name, value in self._places if not isinstance(value, Tensor)]
        rest = {key: local_of(small.get(key, one)).detach().cpu().contiguous() for key, one in self._rest.items()}
        return tree.pickled(
            {
                "settings": settings,
                "numbers": numbers,
                "rest": rest,
                "schedulers": [one.state_dict() for one in training.schedulers],
                "extra": {name: state_of(one) for name, one in training.extra.items()},
            }
        )


def _is_copyable(tensor: Tensor) -> bool:
    return local_of(tensor).numel() > 0 and fills_its_memory(tensor)


def _shard_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the global shape of a DTensor and the offset of this rank's shard in it; None for a plain tensor."""
    if not hasattr(tensor, "device_mesh"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 (as checkpoints do)

    one: Any = tensor
    _, offset = compute_local_shape_and_global_offset(one.shape, one.device_mesh, one.placements)
    return tuple(one.shape), tuple(offset)


def merged_tree(static: Mapping[str, Any], dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Return the single tree of a snapshot's two, with the optimizers' numbers in their places; tensors are named by their keys."""
    numbers = iter(dynamic["numbers"])
    for optimizer, settings in zip(static["optimizers"], dynamic["settings"], strict=True):
        for group, values in zip(optimizer["param_groups"], settings, strict=True):
            group.update(values)
        for state in optimizer["state"].values():
            state.update({name: next(numbers) for name, value in state.items() if not tree.is_mark(value)})
    shared = {"model": static["model"], "optimizers": static["optimizers"]}
    return {**shared, "schedulers": dynamic["schedulers"], "extra": dynamic["extra"]}


def load_state(training: Training, static: bytes, dynamic: bytes, found: Mapping[str, Tensor], device: torch.device) -> None:
    """Load a snapshot's state into *training*: *found* has the tensors of its layout, this process's own where they could be filled."""
    fixed, changing = tree.unpickled(static), tree.unpickled(dynamic)
    on_host = set(fixed["host"])
    here = {key: one.cpu() if key in on_host and one.device.type != "cpu" else one for key, one in found.items()}
    here |= {key: one.to(device) if key.startswith("optimizer.") and key not in on_host else one for key, one in changing["rest"].items()}
    training.load_tree(merged_tree(fixed, changing), here)
