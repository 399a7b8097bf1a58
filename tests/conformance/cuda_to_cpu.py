"""PyTorch's tests for GPUs on a machine without one: every CUDA device in them is the CPU.

What such a test says of DDP, of its hooks and of its groups holds on a CPU as well. What needs a real GPU fails with gloo too, and is
listed as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


def _is_gpu(value: object) -> bool:
    return isinstance(value, torch.device | str) and torch.device(value).type == "cuda"


class _CpuForCuda(TorchFunctionMode):
    """Has every function of torch that is given a CUDA device take the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in named and (_is_gpu(named["device"]) or isinstance(named["device"], int)):
            named["device"] = "cpu"
        if func is torch.Tensor.to:
            args = (args[0], *("cpu" if _is_gpu(one) or (isinstance(one, int) and not isinstance(one, bool)) else one for one in args[1:]))
        return func(*args, **named)


def _module_to(real: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.nn.Module, *args: Any, **named: Any) -> Any:
        return real(self, *("cpu" if _is_gpu(one) or type(one) is int else one for one in args), **{
            name: "cpu" if name == "device" else value for name, value in named.items()
        })  # fmt: skip

    return to


def _without_devices(real: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **named: Any) -> None:
        real(self, module, None, None, *args, **named)

    return init


def _nothing(*_given: Any, **_named: Any) -> None:
    """Do nothing."""


def _replace_gpus(ranks: int) -> None:
    """Have this process find as many GPUs as there are *ranks*, all of which are the CPU."""
    cuda: Any = torch.cuda
    cuda.set_device = cuda.synchronize = _nothing
    cuda.current_device, cuda.device_count, cuda.device = lambda: 0, lambda: ranks, lambda _device=None: nullcontext()
    module: Any = torch.nn.Module
    module.to, module.cuda = _module_to(module.to), lambda self, _device=None, **_named: self
    ddp: Any = DistributedDataParallel
    ddp.__init__ = _without_devices(ddp.__init__)


def on_cpu(case: type[Any], module: Any) -> type[Any]:
    """Return the test case *case* of *module* with the CPU in place of every GPU."""
    module.init_multigpu_helper = lambda world_size, _backend: {rank: [rank] for rank in range(int(world_size))}

    def run(cls: type[Any], rank: int, *args: Any, **named: Any) -> None:
        _replace_gpus(int(module.os.environ["WORLD_SIZE"]))
        with _CpuForCuda():
            super(made, cls)._run(rank, *args, **named)

    made: type[Any] = type(case.__name__, (case,), {"_run": classmethod(run)})
    return made
