"""Causes of faults: the kind in the catalogue, how it shows, and how often it came in published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import holdfast.detectors.all_kinds  # noqa: F401 (registers every kind in the catalogue: causes name them)
from holdfast.detectors.catalogue import CATALOGUE, Attribution


class Symptom(StrEnum):
    """How a fault shows, which decides how soon it is detected."""

    CRASH = "crash"
    """A process ends, or the driver reports an error."""
    NODE_LOST = "node lost"
    """Neither the agent nor the node answers."""
    HANG = "hang"
    """Nothing ends, and no step is finished."""
    SILENT = "silent"
    """Training continues with wrong results."""
    NO_FIRST_STEP = "no first step"
    """What a recovery has started comes to no end: only the recovery's timeout shows that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What happens to one node."""

    name: str
    """As its source calls it."""
    kind: str
    """Fault kind of the catalogue."""
    symptom: Symptom = Symptom.CRASH
    of_process: bool = False
    """Only one process ends: its node needs no repair."""
    names_rank: bool = False
    """The rank is known although its process has not ended: of a hang, the rank that did not arrive."""
    degrades: bool = False
    """The node still works, but is taken out for repair as soon as another one can replace it."""

    def __post_init__(self) -> None:
        assert self.kind in CATALOGUE, self.kind

    @property
    def attributed_to(self) -> Attribution:
        """Return what the catalogue attributes the kind to."""
        return CATALOGUE[self.kind].attributed_to


LLAMA_3: Final[Mapping[Cause, int]] = {
    Cause(name="faulty GPU", kind="gpu-off-bus"): 148,
    Cause(name="GPU HBM3 memory", kind="gpu-ecc-uncorrectable"): 72,
    Cause(name="software bug", kind="worker-exit-code", of_process=True): 54,
    Cause(name="network switch or cable", kind="link-down", symptom=Symptom.HANG): 35,
    Cause(name="unplanned maintenance of a host", kind="node-lost", symptom=Symptom.NODE_LOST): 32,
    Cause(name="GPU SRAM memory", kind="gpu-memory-double-bit"): 19,
    Cause(name="GPU system processor", kind="gpu-gsp-timeout"): 17,
    Cause(name="NIC", kind="mlx5-health", symptom=Symptom.HANG): 7,
    Cause(name="NCCL watchdog timeout", kind="torch-collective-timeout", symptom=Symptom.HANG, of_process=True): 7,
    Cause(name="silent data corruption", kind="silent-corruption"): 6,
    Cause(name="GPU thermal interface and sensor", kind="gpu-heat-shutdown"): 6,
    Cause(name="SSD", kind="nvme-gone"): 3,
    Cause(name="power supply", kind="power-lost", symptom=Symptom.NODE_LOST): 3,
    Cause(name="server chassis", kind="board-watchdog", symptom=Symptom.NODE_LOST): 2,
    Cause(name="IO expansion board", kind="pcie-fatal"): 2,
    Cause(name="dependency", kind="service-unreachable", of_process=True): 2,
    Cause(name="CPU", kind="cpu-machine-check", symptom=Symptom.NODE_LOST): 2,
    Cause(name="system memory", kind="memory-uncorrected", symptom=Symptom.NODE_LOST): 2,
}
"""Causes of the 419 unplanned interruptions of the Llama 3 run (arXiv:2407.21783, table 5), by their number.

The counts of silent corruption are those that were noticed as such; they interrupt training like the others.
"""
NODES_ONLY: Final[Mapping[Cause, int]] = {Cause(name="lost node", kind="node-lost", symptom=Symptom.NODE_LOST): 1}
PROCESSES_ONLY: Final[Mapping[Cause, int]] = {Cause(name="crashed process", kind="worker-exit-code", of_process=True): 1}
RACK: Final = Cause(name="rack", kind="power-lost", symptom=Symptom.NODE_LOST)
LEMON: Final = Cause(name="lemon node", kind="gpu-off-bus")
PEER: Final = Cause(name="peer of a lost rank", kind="worker-peer-lost", of_process=True)
OVERRUN: Final = Cause(name="recovery without a step", kind="recovery-overrun", symptom=Symptom.HANG, of_process=True)
CORRUPTION: Final = Cause(name="silent data corruption", kind="silent-corruption", symptom=Symptom.SILENT)
BUG: Final = Cause(name="bug of the script", kind="worker-exception", of_process=True)

_OF_TRACE: Final[Sequence[tuple[str, str, Cause]]] = (
    ("GPU", "DBE", Cause(name="GPU double-bit errors", kind="gpu-ecc-uncorrectable")),
    ("GPU", "SBE", Cause(name="GPU single-bit errors", kind="gpu-recovery-drain", degrades=True)),
    ("GPU", "PCI link width", Cause(name="GPU link width", kind="pcie-limited", degrades=True)),
    ("GPU", "nvidia-smi", Cause(name="nvidia-smi timeout", kind="gpu-query-stuck", symptom=Symptom.HANG)),
    ("GPU", "Temperature", Cause(name="GPU temperature", kind="gpu-heat-shutdown")),
    ("GPU", "Silent", Cause(name="silent data corruption", kind="silent-corruption")),
    ("GPU", "", Cause(name="GPU", kind="gpu-off-bus")),
    ("Parameter Plane Cable", "", Cause(name="cable", kind="link-down", symptom=Symptom.HANG)),
    ("NIC", "Lost", Cause(name="NIC lost", kind="mlx5-health", symptom=Symptom.HANG)),
    ("NIC", "", Cause(name="NIC", kind="ib-rate-low", degrades=True)),
    ("Fan", "", Cause(name="fan", kind="fan-failed", degrades=True)),
    ("Power Supply", "", Cause(name="power supply", kind="psu-failed", degrades=True)),
    ("Stress Test Failure", "", Cause(name="stress test failed", kind="gpu-diagnostic-failed")),
    ("CPU", "", Cause(name="CPU", kind="cpu-machine-check", symptom=Symptom.NODE_LOST)),
    ("Motherboard", "", Cause(name="motherboard", kind="board-watchdog", symptom=Symptom.NODE_LOST)),
    ("File System", "", Cause(name="file system", kind="filesystem-read-only")),
    ("Operating System", "", Cause(name="kernel panic", kind="kernel-panic", symptom=Symptom.NODE_LOST)),
)
_OTHER: Final = Cause(name="unknown", kind="node-lost", symptom=Symptom.NODE_LOST)


def cause_in_trace(group: str, description: str) -> Cause:
    """Return the cause of a fault in the trace by its class and description; what names no part counts as a lost node."""
    return next((cause for known, part, cause in _OF_TRACE if known == group and part in description), _OTHER)
