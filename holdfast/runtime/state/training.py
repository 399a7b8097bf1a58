"""The state of a training process: read from the user's objects, and loaded into them.

Tensors of the model, the optimizers, the schedulers and ``extra`` are stored once, under names that do not depend on how the model is
wrapped: ``model.<name in the unwrapped module>``, ``optimizer.0.state.<parameter>.exp_avg``. Plain tensors are the same on every rank;
sharded ones (DTensor, as FSDP2 makes) are stored in shards and may be loaded by any number of ranks. Everything that is not a tensor, and
the *rank state* that each rank has of its own (random generators, position in the data), is in one tree per rank.

The optimizer's state is stored under parameter names by hand, not by ``checkpoint.state_dict.get_optimizer_state_dict``: that one runs an
optimizer step with zero gradients to create the state that it loads into, which not every optimizer survives unchanged, and imports all of
FSDP.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from holdfast.runtime.checkpoint.storage import CheckpointReader
from holdfast.runtime.state import rng, tree
from holdfast.runtime.state.tensors import local_of

SAMPLE: Final = 4096
"""Elements of each parameter that distinguish copies of one state from others."""
ON_DEVICE: Final = "holdfast:on_device"
"""Entry of an optimizer's state: its 0-dimensional tensors that belong on the device of their parameter."""
_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel")


class CheckpointMismatch(RuntimeError):
    """A complete checkpoint that belongs to another model, optimizer or job than the present one."""


@runtime_checkable
class Stateful(Protocol):
    """Any object with a state that can be read and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:  # noqa: ANN401 (modules return something, others nothing)
        """Load the state."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module below DDP and `torch.compile`."""
    while True:
        if type(model).__name__ in _WRAPPERS and isinstance(model.module, nn.Module):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the user's own optimizer below the wrapper of Accelerate, which applies it only in the last batch of an accumulation."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped_optimizer(inner) if type(optimizer).__name__ == "AcceleratedOptimizer" and isinstance(inner, Optimizer) else optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The user's objects whose state is kept."""

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Stateful] = ()
    data: Stateful | None = None
    extra: MutableMapping[str, Any] = field(default_factory=dict)

    # -- reading ------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that a process which takes over a rank is given."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for optimizer in self.optimizers:
            yield from (one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor))
        yield from (one for one in self.extra.values() if isinstance(one, Tensor))

    def collect(self, progress: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return all that this rank saves, in DCP's form; *progress* is the session's own."""
        tensors: dict[str, Tensor] = {}
        model = self.model.state_dict()
        shared = self._pack(model, [self.named(one) for one in self.optimizers], tensors)
        whole = {"progress": dict(progress), **shared, **self._own_state()}
        nested = {name: value.detach() for name, value in model.items() if isinstance(value, Tensor)}
        return {"model": nested, **tensors, tree_key(rank): tree.to_bytes(whole)}  # nested as `dcp_to_torch_save` returns it

    def rank_state(self) -> bytes:
        """Return what each rank has of its own: random generators, the position in the data, running statistics of normalizations.

        DDP copies the running statistics of rank 0 to all others before each forward pass, so those of another rank would change the run
        if rank 0 is lost.
        """
        return tree.pickled({**self._own_state(), "statistics": [_flat(of_type) for of_type in self._running_statistics()]})

    def _running_statistics(self) -> list[list[Tensor]]:
        """Return the buffers of normalizations that track what they see, by type: a copy of each type is one copy from the device."""
        found: dict[torch.dtype, list[Tensor]] = {}
        for module in self.model.modules():
            if isinstance(module, _NormBase):
                for one in module.buffers(recurse=False):
                    found.setdefault(one.dtype, []).append(local_of(one).detach())
        return list(found.values())

    def transferable_state(self) -> tuple[dict[str, Tensor], bytes]:
        """Return what a rank sends to a process that takes its place: the tensors themselves by key, and everything else as bytes."""
        tensors: dict[str, Tensor] = {}
        model = self.model.state_dict()
        shared = self._pack(model, [_with_scalars_on_host(self.named(one)) for one in self.optimizers], tensors)
        named = [*model.items(), *self.model.named_buffers()]
        own = {f"model.{name}": value.detach() for name, value in named if isinstance(value, Tensor)}
        return {**own, **tensors}, tree.pickled(shared)

    def _pack(self, model: Mapping[str, Any], optimizers: list[dict[str, Any]], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the tree of the state that ranks share; add its tensors, except those of *model*, to *tensors*."""
        return {
            "model": {name: None if isinstance(value, Tensor) else value for name, value in model.items()},
            "optimizers": tree.pack(optimizers, "optimizer", tensors),
            "schedulers": tree.pack([one.state_dict() for one in self.schedulers], "scheduler", tensors),
            "extra": tree.pack({name: state_of(one) for name, one in self.extra.items()}, "extra", tensors),
        }

    def _own_state(self) -> dict[str, Any]:
        return {"rng": rng.capture(), "data": None if self.data is None else self.data.state_dict()}

    def sample(self) -> str:
        """Return a digest of names, shapes and some values of the model: equal digests mean copies of each other."""
        found = hashlib.sha256()
        for name, value in self.model.named_parameters():
            found.update(_description(name, value).encode())
            found.update(local_of(value).detach().reshape(-1)[:SAMPLE].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        for optimizer in self.optimizers:  # a state that is split over the ranks makes them differ, although their models do not
            for name, parameter in zip(self._names(optimizer), _parameters(optimizer), strict=True):
                state = optimizer.state.get(parameter, {})
                shapes = {key: tuple(local_of(value).shape) if isinstance(value, Tensor) else () for key, value in state.items()}
                found.update(f"{name} {sorted(shapes.items())}".encode())
        return found.hexdigest()[:16]

    def shape(self) -> str:
        """Return a digest of the model's names and shapes on this rank: ranks of one role have the same."""
        found = hashlib.sha256()
        for name, value in self.model.named_parameters():
            found.update(_description(name, value).encode())
        return found.hexdigest()[:16]

    def check(self) -> None:
        """Refuse state that could be saved but not loaded, before hours of training depend on it. Raise ``TypeError``."""
        parts = {
            "optimizer": [one.state_dict()["param_groups"] for one in self.optimizers],
            "schedulers": [one.state_dict() for one in self.schedulers],
            "extra": {name: state_of(one) for name, one in self.extra.items()},
            "data": None if self.data is None else self.data.state_dict(),
        }
        for name, part in parts.items():
            try:
                tree.from_bytes(tree.to_bytes(tree.pack(part, name, {})))
            except Exception as error:
                found = re.search(r"Unsupported [^.]*[\w.]*\w|Can't [^.]*", str(error))  # what torch refused, without its long advice
                what = found[0] if found else str(error).partition("\n")[0]
                raise TypeError(
                    f"session({name}=...) has a state that cannot be loaded again without running code from it: {what}. "
                    "Keep numbers, strings, lists, dicts and tensors in it, or allow its class with torch.serialization.add_safe_globals."
                ) from error

    def buffers(self) -> frozenset[str]:
        """Return the keys of the model's buffers, which only rank 0 has right."""
        return frozenset(f"model.{name}" for name, _ in self.model.named_buffers())

    def copied_buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers as they are now, by key."""
        return {f"model.{name}": one.detach().clone() for name, one in self.model.named_buffers()}

    def named(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of *optimizer* with parameter names in place of numbers."""
        state, names = optimizer.state_dict(), self._names(optimizer)
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
        return {**state, "state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Return the name of each parameter of *optimizer*, in its own order; one that is not the model's gets a number."""
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [known.get(id(parameter), f"#{number}") for number, parameter in enumerate(_parameters(optimizer))]

    # -- loading the state of another rank, or of a snapshot ----------------------------------------------------------

    def load_rank_state(self, rank_state: bytes) -> None:
        """Load what `rank_state` returned."""
        state = tree.unpickled(rank_state)
        if self.data is not None and state["data"] is not None:
            self.data.load_state_dict(state["data"])
        rng.apply(state["rng"])
        with torch.no_grad():
            for flat, places in zip(state["statistics"], self._running_statistics(), strict=True):
                for place, value in zip(places, flat.split([one.numel() for one in places]), strict=True):
                    place.copy_(value.view(place.shape))

    def load_state(self, rest: bytes, found: Mapping[str, Tensor]) -> None:
        """Load what `transferable_state` returned: *found* are its tensors, this process's own where they could be filled."""
        self.load_tree(tree.unpickled(rest), found)

    def load_tree(self, state: Mapping[str, Any], found: Mapping[str, Tensor]) -> None:
        """Load the tree *state* with the tensors *found*; see `load_state`."""
        with torch.no_grad():
            for name, present in [*self.model.state_dict().items(), *self.model.named_buffers()]:
                key = f"model.{name}"
                if isinstance(present, Tensor) and key in found and not _same_memory(present, found[key]):
                    put_values(local_of(present), local_of(found[key]))  # what is found is of this rank, also of a DTensor
        values = {name: value for name, value in state["model"].items() if value is not None}
        if values:
            self.model.load_state_dict(values, strict=False)
        states = tree.unpack(state["optimizers"], found.__getitem__)
        _same_number("optimizer", self.optimizers, states)
        for optimizer, one in zip(self.optimizers, states, strict=True):
            self._put(optimizer, one)
        self._load_rest(state, found)

    def _put(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Make *state* the state of *optimizer* without the copies that ``load_state_dict`` makes of every tensor."""
        names, parameters = self._names(optimizer), _parameters(optimizer)
        _same_names("the optimizer", names, dict.fromkeys(name for group in state["param_groups"] for name in group["params"]))
        away = state.get(ON_DEVICE, {})
        for name, parameter in zip(names, parameters, strict=True):
            optimizer.state.pop(parameter, None)
            if name in state["state"]:
                held = {key: _sharded_as(parameter, value) for key, value in state["state"][name].items()}
                optimizer.state[parameter] = held | {key: held[key].to(parameter.device) for key in away.get(name, ())}
        for present, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
            present.update({key: _on_device_of(present.get(key), value) for key, value in given.items() if key != "params"})

    def _load_rest(self, state: Mapping[str, Any], found: Mapping[str, Tensor]) -> None:
        """Load schedulers and extras; plain extras are put into the user's mapping."""
        schedulers = tree.unpack(state["schedulers"], found.__getitem__)
        _same_number("scheduler", self.schedulers, schedulers)
        for scheduler, one in zip(self.schedulers, schedulers, strict=True):
            scheduler.load_state_dict(one)
        for name, one in tree.unpack(state["extra"], found.__getitem__).items():
            present = self.extra.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(one)
            else:
                self.extra[name] = one

    # -- loading a checkpoint -----------------------------------------------------------------------------------------

    def load(self, reader: CheckpointReader, rank: int) -> dict[str, Any]:
        """Load everything from *reader*; return the session's own progress and this rank's generators.

        A rank that did not exist when the checkpoint was written gets no ``rng`` and, unless its data says otherwise, no position in the
        data: both start fresh. Raise `CheckpointMismatch`.
        """
        own = reader.has(tree_key(rank))
        key = tree_key(rank if own else 0)
        stored = {key: reader.empty(key)}
        reader.fill(stored)
        whole = tree.from_bytes(stored[key])
        found = self._model_tensors(reader, whole["model"])
        for key, like in self._templates(whole).items():
            found[key] = _empty_like(key, like, reader)
        reader.fill(found)
        # The model's own tensors in place, the rest (`get_extra_state`) by value.
        self.model.load_state_dict({name: found.get(f"model.{name}", value) for name, value in whole["model"].items()})
        self._load_optimizers(tree.unpack(whole["optimizers"], found.__getitem__))
        self._load_rest(whole, found)
        if self.data is not None and whole["data"] is not None and (own or getattr(self.data, "follows_rank_0", False)):
            self.data.load_state_dict(whole["data"])
        return {**whole["progress"], "rng": whole["rng"] if own else None}

    def _model_tensors(self, reader: CheckpointReader, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the model's own tensors by key, to be read in place; refuse a checkpoint of another model."""
        present = self.model.state_dict()
        _same_names("the model", present, stored)
        found = {f"model.{name}": value.detach() for name, value in present.items() if isinstance(value, Tensor)}
        for key, value in found.items():
            shape = reader.stored(key).size
            if shape != value.shape:
                raise CheckpointMismatch(f"'{key}' has the shape {tuple(value.shape)} here and {tuple(shape)} in the checkpoint")
        return found

    def _templates(self, whole: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """Return every stored tensor's key except the model's, with a tensor here that shows its device and sharding."""
        parameters = dict(self.model.named_parameters())
        found: dict[str, Tensor | None] = dict.fromkeys(tree.keys([whole["optimizers"], whole["schedulers"], whole["extra"]]))
        for optimizer in whole["optimizers"]:
            for name, state in optimizer["state"].items():
                found |= dict.fromkeys(tree.keys(state), parameters.get(name))
        present: dict[str, Tensor] = {}
        tree.pack({name: state_of(one) for name, one in self.extra.items()}, "extra", present)
        return found | {key: value for key, value in present.items() if key in found}

    def _load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        _same_number("optimizer", self.optimizers, states)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            numbers = {name: number for number, name in enumerate(self._names(optimizer))}
            stored = [name for group in state["param_groups"] for name in group["params"]]
            _same_names("the optimizer", numbers, dict.fromkeys(stored))
            groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
            numbered = {numbers[name]: value for name, value in state["state"].items()}
            if len(groups) == len(optimizer.param_groups):  # otherwise it raises an error itself
                together = zip(optimizer.param_groups, groups, strict=True)
                groups = [{key: _on_device_of(present.get(key), value) for key, value in group.items()} for present, group in together]
            optimizer.load_state_dict({**state, "state": numbered, "param_groups": groups})
            # `load_state_dict` casts to the parameter's type: float32 moments of bfloat16 weights stay what they were.
            parameters = _parameters(optimizer)
            for number, values in numbered.items():
                present = optimizer.state[parameters[number]]
                for name, value in values.items():
                    if isinstance(value, Tensor) and present[name].dtype != value.dtype:
                        present[name] = value.to(present[name].device)


def tree_key(rank: int) -> str:
    """Return the key of the tree of *rank*."""
    return f"tree.{rank:05d}"


def state_of(value: object) -> Any:  # noqa: ANN401 (an extra may be anything that a tree may hold)
    """Return the state of an extra: its own, or the plain value that it is."""
    return value.state_dict() if isinstance(value, Stateful) else value


def put_values(into: Tensor, values: Tensor) -> None:
    """Copy *values* into *into*, also where its elements share memory (an expanded buffer), which torch's own copy refuses."""
    if not hasattr(into, "device_mesh"):
        for dimension, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
            if size > 1 and stride == 0:
                into, values = into.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    into.copy_(values)


def on_device(state: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return which 0-dimensional tensors of an optimizer's *state* (by parameter) are not in host memory.

    Fused and capturable optimizers count their steps on the device, and read the count there in a kernel; others count on the host.
    """
    found = {
        name: [key for key, value in held.items() if isinstance(value, Tensor) and value.dim() == 0 and value.device.type != "cpu"]
        for name, held in state.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def _with_scalars_on_host(named: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state (see `Training.named`) with its 0-dimensional tensors in host memory, and the list of those moved."""
    away = on_device(named["state"])
    if not away:
        return named
    moved = {name: {**named["state"][name], **{key: named["state"][name][key].cpu() for key in keys}} for name, keys in away.items()}
    return {**named, "state": {**named["state"], **moved}, ON_DEVICE: away}


def _flat(tensors: list[Tensor]) -> Tensor:
    """Return all elements of *tensors*, which have one type, in memory of the host."""
    return torch.cat([one.reshape(-1) for one in tensors]).cpu()


def _description(name: str, value: Tensor) -> str:
    return f"{name} {tuple(value.shape)} {tuple(local_of(value).shape)} {value.dtype}"


def _empty_like(key: str, like: Tensor | None, reader: CheckpointReader) -> Tensor:
    """Return a tensor to read *key* into: on the device and sharded as *like*, if the shapes agree; otherwise unsharded."""
    if not reader.has(key):
        raise CheckpointMismatch(f"the checkpoint refers to '{key}' but does not contain it")
    stored = reader.stored(key)
    if like is not None and like.shape == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype, requires_grad=False)
    return reader.empty(key)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of *optimizer* in the order of the numbers that its state uses."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _on_device_of(present: object, value: Any) -> Any:  # noqa: ANN401 (an optimizer's setting is anything)
    """Return a setting on the device of the *present* one: a learning rate that is a tensor stays on its device."""
    return value.to(present.device) if isinstance(value, Tensor) and isinstance(present, Tensor) else value


def _sharded_as(parameter: Tensor, value: Any) -> Any:  # noqa: ANN401 (an optimizer keeps anything)
    """Return *value* as a DTensor like *parameter*, if it is a shard of that shape."""
    shard: Any = parameter.data
    local = getattr(shard, "_local_tensor", None)
    if local is None or not isinstance(value, Tensor) or hasattr(value, "device_mesh") or value.dim() == 0 or value.shape != local.shape:
        return value
    size = {"shape": shard.shape, "stride": shard.stride()}
    return type(shard).from_local(value, shard.device_mesh, shard.placements, run_check=False, **size)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, or the local shards of them, are the same memory."""
    one, other = local_of(one), local_of(other)
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _same_number(what: str, here: Sequence[object], stored: Sequence[object]) -> None:
    """Refuse a checkpoint with more or fewer *what* than there are here."""
    if len(here) != len(stored):
        raise CheckpointMismatch(f"there are {len(here)} {what}(s) here and {len(stored)} in the checkpoint")


def _same_names(what: str, here: Iterable[str], stored: Iterable[str]) -> None:
    """Refuse a checkpoint in which *what* has other names than here."""
    missing, strange = sorted(set(here) - set(stored)), sorted(set(stored) - set(here))
    if missing:
        raise CheckpointMismatch(f"{what} has '{missing[0]}' and {len(missing) - 1} more names that the checkpoint has not")
    if strange:
        raise CheckpointMismatch(f"the checkpoint has '{strange[0]}' and {len(strange) - 1} more names that {what} has not")
