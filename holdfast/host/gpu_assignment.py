"""Distribute the GPUs of this machine among the nodes of a local cluster: each node has its own, and no two share one.

A node sees its GPUs through ``CUDA_VISIBLE_DEVICES``. On a machine without GPUs nothing is distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.plurals import plural

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""CUDA's variable for the GPUs of a process; empty in the `env` of a job, it means that its ranks need none."""
NONE: Final = frozenset({"-1", "none", "void", "NoDevFiles"})
"""Values that mean no GPU."""
DEVICES: Final = Path("/dev")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> tuple[str, ...]:
    """Return the machine's GPUs that *environment* leaves to this process, by the names that CUDA accepts."""
    value = environment.get(VISIBLE)
    if value is None:
        return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))
    named = [one.strip() for one in value.split(",")]
    end = next((place for place, one in enumerate(named) if not one or one in NONE), len(named))  # as CUDA reads it
    return tuple(named[:end])


def own_gpu(environment: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> str | None:
    """Return the name of the GPU that torch gives to a rank with this *environment*: that of its local rank, or the only visible one.

    None where it sees none, or none of its own. By its name and not its number: a launcher may show each process one GPU, which is number 0
    for all of them.
    """
    gpus, local_rank = visible_gpus(environment, devices), environment.get("LOCAL_RANK") or "0"
    if len(gpus) == 1:
        return gpus[0]
    return gpus[int(local_rank)] if local_rank.isdecimal() and int(local_rank) < len(gpus) else None


def gpus_of(pid: int) -> tuple[str, ...]:
    """Return the GPUs in the initial environment of the process *pid*; none where that does not set them."""
    begin = f"{VISIBLE}=".encode()
    with suppress(OSError):  # it has exited, or is another user's
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(begin):
                return visible_gpus({VISIBLE: entry.removeprefix(begin).decode(errors="replace")})
    return ()


def split(gpus: Sequence[str], nodes: int) -> list[tuple[str, ...]]:
    """Return the GPUs of each of *nodes*: equal numbers in order; if there are fewer GPUs than nodes, the first nodes have one each."""
    each = max(1, len(gpus) // nodes)
    return [tuple(gpus[place * each : (place + 1) * each]) for place in range(nodes)]


def too_few(gpus: Sequence[str], nodes: int, ranks: int, environment: Mapping[str, str]) -> list[int]:
    """Return which of *nodes* have fewer GPUs than the *ranks* of a job with this *environment* need."""
    if not gpus or VISIBLE in environment:
        return []
    return [place for place, own in enumerate(split(gpus, nodes)) if len(own) < ranks]


def advice(gpus: Sequence[str], wanted: int, ranks: int) -> str:
    """Return what to do where the GPUs of the machine do not give *wanted* nodes with *ranks* GPUs each."""
    cpu = f'a job that needs no GPU sets `env: {{{VISIBLE}: ""}}`'
    if len(gpus) >= wanted * ranks:
        return f"Give the cluster as many nodes as the GPUs allow (`cluster: {{kind: local, nodes: {len(gpus) // ranks}}}`); {cpu}"
    return f"Lower `nproc_per_node`, `nnodes` or `spare_nodes` to {plural(len(gpus), 'rank')} in all; {cpu}"
