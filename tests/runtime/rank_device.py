"""Where the ranks of a script compute and exchange: on the host over gloo, on the stand-in for a device, or on one card over NCCL.

The same scripts and the same assertions run on each. A script makes its `RankDevice` before `holdfast.join()`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from holdfast.runtime.groups import device_library
from tests.gpu import one_card
from tests.runtime.device_stand_in import StandIn

KINDS: Final = ("gloo", "stand-in", "cuda")


class RankDevice:
    """The device of this rank: that of the option ``on=KIND`` of its script."""

    def __init__(self, options: Collection[str], *, default: str = "gloo", reports_errors: bool = True) -> None:
        """*reports_errors*: see `StandIn`."""
        self.kind = next((one.partition("=")[2] for one in options if one.startswith("on=")), default)
        if self.kind not in KINDS:
            raise ValueError(f"on={self.kind}: must be one of {', '.join(KINDS)}")
        self.device = torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")
        self.backend = "gloo" if self.kind == "gloo" else "nccl"
        """Of groups whose tensors all lie on the device."""
        self.stand_in = StandIn(reports_errors=reports_errors) if self.kind == "stand-in" else None
        torch.set_num_threads(1)
        if self.stand_in is not None:
            device_library.use(self.stand_in)
        if self.kind == "cuda":
            os.environ.update(one_card.settings(os.getpid(), tuple(torch.cuda.nccl.version())))
            torch.backends.cudnn.deterministic = True
            torch.cuda.set_device(self.device)  # or a `DeviceMesh` would choose the card with the number of the local rank

    def synchronize(self) -> None:
        """Wait for the device in its driver, where nothing of Holdfast's can end the wait."""
        if self.stand_in is not None:
            self.stand_in.synchronize()
        elif self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def capture(self) -> AbstractContextManager[Any]:
        """Capture a graph of what is computed within the context. The host has none."""
        if self.stand_in is not None:
            return self.stand_in.capture()
        assert self.kind == "cuda"
        # not "global", which forbids calls in other threads, such as those of torch's watchdog
        return torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
