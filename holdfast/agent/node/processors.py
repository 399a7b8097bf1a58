"""Count the GPUs and CPUs that processes of this node may use, as torchrun does for ``--nproc-per-node``. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.agent.schema import Text
from holdfast.host.gpu_assignment import DEVICES, VISIBLE, visible_gpus
from holdfast.probe.readers.nvml import NoNvml, nvml
from holdfast.protocol import Message


def processors(visible: Text | None, environment: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> Message:
    """Return the numbers of GPUs and CPUs; *visible* is the job's own ``CUDA_VISIBLE_DEVICES``, which replaces this node's."""
    named = {**environment, **({} if visible is None else {VISIBLE: visible})}
    return {"gpus": len(usable_gpus(visible_gpus(named, devices), _gpus_of_nvml())), "cpus": len(os.sched_getaffinity(0))}


def usable_gpus(named: tuple[str, ...], present: int | None) -> tuple[str, ...]:
    """Return those of the *named* GPUs that CUDA uses where *present* ones exist (None: unknown): it stops at the first that does not."""
    end = next((place for place, one in enumerate(named) if present is not None and one.isdecimal() and int(one) >= present), len(named))
    return named[:end]


def _gpus_of_nvml() -> int | None:
    """Return how many GPUs the driver has; None where it cannot be asked."""
    try:
        with nvml() as asked:
            return int(asked.nvmlDeviceGetCount())
    except NoNvml:
        return None
    except Exception:  # noqa: BLE001 (NVML's error, whose class comes with the module)
        return None
