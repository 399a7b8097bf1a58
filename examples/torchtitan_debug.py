"""Train torchtitan's Llama 3 debug model on synthetic tokens; `with_holdfast` is the only line about Holdfast.

holdfast run --nproc-per-node 2 examples/torchtitan_debug.py --training.steps 50

torchtitan is made for GPUs: `adapt_to_cpu` has what a machine without one needs besides.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

GPU = torch.accelerator.is_available()


class Cpu:
    """What torchtitan asks of the module of a device."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None  # a CPU has no streams and no cache

    def current_device(self) -> int:
        """Return the only one."""
        return 0

    def get_device_name(self, _: object) -> str:
        """Return its name."""
        return "CPU"

    def get_device_properties(self, _: object) -> SimpleNamespace:
        """Return a memory of which nothing is used."""
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, _: object) -> dict[str, int]:
        """Return nothing."""
        return {}


def adapt_to_cpu() -> None:
    """Have torchtitan take the CPU for its device; call it before torchtitan is imported."""
    torch_utils: Any = torch._utils  # noqa: SLF001
    torch_utils._get_available_device_type = lambda: "cpu"  # noqa: SLF001
    torch_utils._get_device_module = lambda _: Cpu()  # noqa: SLF001
    distributed: Any = dist
    if not hasattr(distributed, "set_timeout"):  # torchtitan 0.3 uses it, and torch 2.13 does not have it
        distributed.set_timeout = distributed.distributed_c10d._set_pg_timeout  # noqa: SLF001


if not GPU:
    adapt_to_cpu()

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.train import main  # noqa: E402

from holdfast.integrations.torchtitan import with_holdfast  # noqa: E402


class Counting(torch.utils.data.IterableDataset[Any]):
    """Sequences that count upwards from a random token, others on each rank."""

    def __init__(self, rank: int, ranks: int, length: int) -> None:
        self._rank, self._ranks, self._length, self._number = rank, ranks, length, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            source = torch.Generator().manual_seed(self._number * self._ranks + self._rank)
            self._number += 1
            tokens = (torch.randint(64, (1,), generator=source) + torch.arange(self._length + 1)) % 64
            yield {"input": tokens[:-1], "positions": torch.arange(self._length)}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next sequence."""
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that sequence."""
        self._number = state["number"]


class CountingLoader(ParallelAwareDataloader):  # type: ignore[misc]
    """The data loader of the config below."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """It has no settings of its own."""

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **_: object) -> None:  # noqa: ARG002
        data = Counting(dp_rank, dp_world_size, seq_len)
        super().__init__(data, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The data are tokens already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """It has no settings."""

    def __init__(self, config: Config, **_: object) -> None:  # noqa: ARG002
        super().__init__()

    def encode(self, *_: object) -> list[int]:
        """Return nothing."""
        return []

    def decode(self, *_: object) -> str:
        """Return nothing."""
        return ""

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 64


def debug() -> Any:  # noqa: ANN401
    """Return the config: torchtitan finds it by its name, as those in a ``config_registry``."""
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer, config.hf_assets_path = CountingLoader.Config(), NoTokenizer.Config(), "."
    config.training.seq_len, config.training.local_batch_size = 64, 4
    if not GPU:
        replace_gpu_parts(config)
    return with_holdfast(config)


def replace_gpu_parts(config: Any) -> None:  # noqa: ANN401
    """Replace what runs on GPUs only: FlexAttention, CUDA graphs, and how gradients are averaged."""
    spec = config.model_spec
    for _, _, parent, attribute in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    spec.model.layers = spec.model.layers[:2]
    config.training.disable_cuda_graphs, config.parallelism.spmd_backend = True, "partial_dtensor"
    real: Callable[..., Any] = spec.parallelize_fn

    def parallelize(model: Any, **given: Any) -> Any:  # noqa: ANN401
        """Have FSDP sum and then divide: gloo has no other mean."""
        model = real(model, **given)
        for one in model.modules():
            if isinstance(one, FSDPModule):
                one.set_force_sum_reduction_for_comms(enable=True)
        return model

    spec.parallelize_fn = parallelize


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "torchtitan_debug", "--config", "debug"]
    main()
