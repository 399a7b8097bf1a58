"""What of torchtitan's Trainer a session saves: the model's own parameters, and what each rank has of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import ParallelAwareDataloader

from holdfast.runtime.state.training import put_values


class ModelParts(nn.Module):
    """The parts of a model that one rank has, as one module with the parameters themselves.

    The ``state_dict`` of torchtitan's modules holds copies of some of them (a fused projection is split): writing to these changes nothing.
    A rank has several parts with an interleaved pipeline; their names differ.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parts = list(parts)  # a list registers no submodules

    def named_parameters(self, *given: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: ANN401 (torch's own)
        """Yield names and parameters of all parts."""
        for part in self._parts:
            yield from ((canonical_fqn(name), one) for name, one in part.named_parameters(*given, **more))

    def named_buffers(self, *given: Any, **more: Any) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 (as above)
        """Yield names and buffers of all parts."""
        for part in self._parts:
            yield from ((canonical_fqn(name), one) for name, one in part.named_buffers(*given, **more))

    def state_dict(self, *_given: Any, **_more: Any) -> dict[str, Any]:  # type: ignore[override]  # noqa: ANN401 (as above)
        """Return the parameters and persistent buffers."""
        passing = {
            canonical_fqn(f"{place}.{name}" if place else name)
            for part in self._parts
            for place, module in part.named_modules()
            for name in module._non_persistent_buffers_set  # noqa: SLF001 (torch has no other way to ask)
        }
        return dict(self.named_parameters()) | {name: one for name, one in self.named_buffers() if name not in passing}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_given: Any, **_more: Any) -> None:  # noqa: ANN401 (as above)
        """Copy the values into the parameters and buffers."""
        own = self.state_dict()
        with torch.no_grad():
            for name, value in state_dict.items():
                if name in own and isinstance(value, Tensor):
                    put_values(own[name], value)


class RankState:
    """Steps and tokens that the Trainer has counted on this rank, and the position of its data loader."""

    follows_rank_0: Final = True
    """A rank that did not exist when the state was saved takes the count of steps from rank 0; its data is checked."""

    def __init__(self, trainer: Any, loader: Any, *, any_data: bool) -> None:  # noqa: ANN401 (of torchtitan)
        """*any_data*: the data may begin anew where it cannot continue."""
        self._trainer, self._loader, self._any_data = trainer, loader, any_data
        self.problem = ""
        """Why training cannot continue with the state that was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of plain values: torchtitan's own is pickled, and what is pickled may run code when it is loaded."""
        return {"train_state": self._trainer.state_dict(), "place": self._place(), "data": self._data_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; note the `problem` when it is that of another part of the data."""
        self._trainer.load_state_dict(state["train_state"])
        if state["data"] is None or self._loader is None:
            return
        if list(state["place"]) == self._place():
            self._of_loader().load_state_dict(self._loader, state["data"])
            self._data_state()  # creates the iterator, which draws a random number: the generators are restored after this
        elif not self._any_data:
            (_, before), (_, now) = state["place"], self._place()
            self.problem = (
                f"the state was saved with {before} data-parallel ranks, and there are {now}: torchtitan's data loader cannot continue on "
                "another number. Start the job with as many, or let the data begin anew with --checkpoint.exclude_from_loading dataloader"
            )

    def _place(self) -> list[int]:
        """Return which part of the data this rank reads, and into how many it is divided."""
        return [int(getattr(self._loader, "dp_rank", 0)), int(getattr(self._loader, "dp_world_size", 1))]

    def _data_state(self) -> Any:  # noqa: ANN401 (the loader's own)
        return None if self._loader is None else self._of_loader().state_dict(self._loader)

    def _of_loader(self) -> Any:  # noqa: ANN401 (a class)
        """Return the class by whose methods the loader's state is plain values."""
        kind = type(self._loader)
        return StatefulDataLoader if getattr(kind, "state_dict", None) is ParallelAwareDataloader.state_dict else kind
