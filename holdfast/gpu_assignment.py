"""Which GPUs of this machine belong to which node of a local cluster: each has its own, and no two share one.

A node sees its GPUs through ``CUDA_VISIBLE_DEVICES``. On a machine without GPUs nothing is shared out, and nothing is said of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""What CUDA takes for the GPUs of a process; empty in the `environment` of a job it says that its ranks need none."""
NONE: Final = frozenset({"-1", "none", "void", "NoDevFiles"})
"""Words by which it is said that there are none."""
DEVICES: Final = Path("/dev")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> tuple[str, ...]:
    """Return the GPUs that this process may use, by the names that CUDA takes: those that its *environment* leaves it of the machine's."""
    said = environment.get(VISIBLE)
    if said is None:
        return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))
    named = [one.strip() for one in said.split(",")]
    until = next((place for place, one in enumerate(named) if not one or one in NONE), len(named))  # as CUDA reads it
    return tuple(named[:until])


def gpus_of(pid: int) -> tuple[str, ...]:
    """Return the GPUs that the process *pid* was shown when it began; none where that was not said."""
    begin = f"{VISIBLE}=".encode()
    with suppress(OSError):  # it has ended, or is another user's
        for said in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if said.startswith(begin):
                return visible_gpus({VISIBLE: said.removeprefix(begin).decode(errors="replace")})
    return ()


def shares(gpus: Sequence[str], nodes: int) -> list[tuple[str, ...]]:
    """Return the GPUs of each of *nodes*: as many for each, in order; where there are fewer than nodes the first ones have one each."""
    each = max(1, len(gpus) // nodes)
    return [tuple(gpus[place * each : (place + 1) * each]) for place in range(nodes)]


def too_few(gpus: Sequence[str], nodes: int, ranks: int, environment: Mapping[str, str]) -> list[int]:
    """Return which of *nodes* have fewer GPUs than the *ranks* of a job with this *environment* would need there."""
    if not gpus or VISIBLE in environment:
        return []
    return [place for place, own in enumerate(shares(gpus, nodes)) if len(own) < ranks]


def advice(gpus: Sequence[str], wanted: int, ranks: int) -> str:
    """Return what to do where a job wants so many nodes with so many ranks, and the machine's GPUs are shared out otherwise."""
    cpu = f'a job that needs no GPU says so with `environment: {{{VISIBLE}: ""}}`'
    if len(gpus) >= wanted * ranks:
        return f"Give the cluster as many nodes as the GPUs are for (`cluster: {{kind: local, nodes: {len(gpus) // ranks}}}`); {cpu}"
    return f"Lower `nodes.ranks`, `nodes.wanted` or `nodes.spare` to {len(gpus)} rank(s) in all; {cpu}"
