"""What an attempt at a step may change, as it was at the step's start."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.state import tree
from holdfast.runtime.state.training import Stateful, Training, put_values, state_of


class StepBackup:
    """The state of *training* now, except parameters and optimizer state, which only an applied step changes."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.rank_state = training.rank_state()
        """Random generators and position in the data."""
        self.buffers = training.copied_buffers()
        """Copies of the model's buffers, by key."""
        self._places = list(training.model.buffers())
        self._schedulers = [copy.deepcopy(one.state_dict()) for one in training.schedulers]
        self._settings = [_settings(one) for one in training.optimizers]
        self._extra = tree.pickled({name: state_of(one) for name, one in training.extra.items()})

    def restore(self) -> None:
        """Put the training back into this state, and drop its gradients."""
        training = self._training
        training.load_rank_state(self.rank_state)
        for scheduler, state in zip(training.schedulers, self._schedulers, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, settings in zip(training.optimizers, self._settings, strict=True):
            for group, values in zip(optimizer.param_groups, settings, strict=True):  # a scheduler has changed the learning rate
                group.update(values)
        for name, state in tree.unpickled(self._extra).items():
            present = training.extra.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(state)
            else:
                training.extra[name] = state
        with torch.no_grad():
            for one, value in zip(self._places, self.buffers.values(), strict=True):
                put_values(one, value)
        for parameter in training.model.parameters():
            parameter.grad = None


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the settings of *optimizer* by group: learning rates and the like."""
    return [
        {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
