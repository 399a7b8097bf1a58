"""The fault catalogue: every fault kind that Holdfast knows, with its recommended action, samples and reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Final, ParamSpec

from holdfast.detectors.evidence import LogLine, Sample


class RecommendedAction(StrEnum):
    """What a fault recommends, least severe first."""

    RECORD = "record"
    MONITOR = "monitor"
    RETRY_STEP = "retry-step"
    RESTART = "restart"
    RESET_GPU = "reset-gpu"
    DRAIN = "drain"
    EVICT = "evict"
    USER_ERROR = "user-error"


class Attribution(StrEnum):
    """What a fault is attributed to."""

    GPU = "gpu"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    PROCESS = "process"
    USER_CODE = "user_code"
    NONE = "none"


HARDWARE_OF_NODE: Final = frozenset({Attribution.GPU, Attribution.NODE})
"""Attributions that count against the node itself."""
TAKES_NODE_OUT: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
"""Recommended actions after which a node has no ranks."""


KERNEL_LOG: Final = "kernel log"
WORKER_OUTPUT: Final = "worker output"
SYSTEM_LOG: Final = "log"
"""The logs that lines come from: the node's kernel, a worker's output, and any other (a service's, a scheduler's)."""
LOGS: Final = (KERNEL_LOG, WORKER_OUTPUT, SYSTEM_LOG)
DRIVER_EVENTS: Final = "GPU driver events"
"""Source of the Xids that NVML reports: the numbers of lines that the same driver writes into the kernel log, without their text."""
NODE_CONDITIONS: Final = "node conditions"
"""Source of what monitors report as conditions of a Kubernetes node: most of it is what they read in its kernel log."""
NODE_EVENTS: Final = "node events"
"""Source of what monitors report as events of a Kubernetes node. Many programs of a cluster may write events, in any monitor's name."""


DCGM: Final = "DCGM health check"
"""Source of what DCGM's host engine says of the GPUs."""


class Area(StrEnum):
    """Area of a fault kind, the coarsest grouping of the catalogue."""

    HARDWARE = "hardware"
    NETWORK = "network"
    STORAGE = "storage"
    HOST = "host"
    SOFTWARE = "software"
    PROGRESS = "progress"


COMPONENTS: Final[dict[Area, tuple[str, ...]]] = {
    Area.HARDWARE: ("gpu", "gpu memory", "nvlink", "nvswitch", "accelerator", "pcie", "cpu", "memory module", "power", "cooling", "board"),
    Area.NETWORK: ("network", "infiniband", "ethernet", "rdma", "collectives"),
    Area.STORAGE: ("storage", "disk", "raid", "file system", "network file system", "checkpoint"),
    Area.HOST: ("node", "host", "agent", "kernel", "host memory", "memory", "service", "clock", "limits"),
    Area.SOFTWARE: (
        "worker", "communication", "user code", "cuda", "pytorch", "nccl", "data loader", "container", "scheduler", "driver",
    ),
    Area.PROGRESS: ("job", "performance"),
}  # fmt: skip
"""All components by area."""

AREAS: Final[dict[str, Area]] = {component: area for area, components in COMPONENTS.items() for component in components}


@lru_cache(maxsize=256)
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault: what it is, how it is detected, and what to do."""

    id: str
    title: str
    component: str
    source: str
    recommended_action: RecommendedAction
    attributed_to: Attribution
    action: str
    unhealthy: Sample
    healthy: Sample
    reference: str = "docs/explanation/diagnosis.md"
    weight: int = 50
    """How close to the root cause this kind usually is (100: always the root cause, 0: always a secondary failure)."""
    confused_with: tuple[str, ...] = ()
    """Kinds that are easily confused with it, or often come with it."""
    in_logs: str = ""
    """For a kind that devices and logs both show: title, advice and sample line of the logs' definition."""
    logs: tuple[str, ...] = ()
    """Logs whose writers can know of it, of `LOGS`. A line of this kind in any other log is shown, and nothing is done because of it."""
    certain: str = ""
    """Expression for the lines that prove it by themselves; empty: a line takes a node out only with a second, independent signal."""

    @property
    def area(self) -> Area:
        """The area of its component."""
        return AREAS[self.component]

    def proves(self, line: str) -> bool:
        """Return whether *line*, in one of `logs`, can only mean this fault."""
        return bool(self.certain) and _expression(self.certain).search(line) is not None


CATALOGUE: Final[dict[str, FaultKind]] = {}
"""Fault kind by id."""
P = ParamSpec("P")


def register(entry: FaultKind) -> FaultKind:
    """Add *entry* to the catalogue and return the registered kind; raise ``ValueError`` if its id is already taken.

    A kind that devices and logs both show is defined twice. The definition with the device's evidence wins; the other one is kept as
    `in_logs`.
    """
    present = CATALOGUE.get(entry.id)
    if present is not None:
        if _is_from_logs(entry) == _is_from_logs(present):
            raise ValueError(f"fault kind {entry.id} is defined twice")
        measured, logged = (present, entry) if _is_from_logs(entry) else (entry, present)
        line = logged.unhealthy.evidence.text if isinstance(logged.unhealthy.evidence, LogLine) else ""
        confused_with = tuple(dict.fromkeys((*measured.confused_with, *logged.confused_with)))
        in_logs = f"{logged.title} ({logged.recommended_action}: {logged.action}): {line}"
        entry = replace(measured, confused_with=confused_with, in_logs=in_logs, logs=logged.logs, certain=logged.certain)
    CATALOGUE[entry.id] = entry
    return entry


def _is_from_logs(entry: FaultKind) -> bool:
    return isinstance(entry.unhealthy.evidence, LogLine)


def _registering(make: Callable[P, FaultKind]) -> Callable[P, FaultKind]:
    return lambda *args, **fields: register(make(*args, **fields))


fault_kind = _registering(FaultKind)
"""Define a fault kind: takes the fields of `FaultKind` and adds the kind to the catalogue."""


class Certainty(IntEnum):
    """How much a report says of a fault."""

    CONTRADICTED = 0
    """A line that a measurement contradicts."""
    LINE = 1
    """A line that a healthy node may write."""
    PROOF = 2
    """What proves the fault."""


FaultKey = tuple[str, str | None, str]
"""Kind, node and signature of a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An occurrence of a fault kind on a rank, a node or the job."""

    kind: str
    at: float
    node: str | None = None
    rank: int | None = None
    step: int | None = None
    quote: str = ""
    """The evidence as text."""
    signature: str = ""
    """Identifies equal failures (exception type and place, exit status)."""
    detail: str = ""
    """Longer evidence: a traceback, the last lines printed."""
    source: str = ""
    """Who reported it: ``kernel log on node-1``, ``worker output of rank 3``; `see` sets it if the detector does not."""
    device: str = ""
    """The part of the node that it was seen on, if known (a PCI address, an interface, a mount)."""
    idle: bool = False
    """No rank of the job uses that device, as the node's agent knows for sure: then it is shown, and no reason to leave the node."""
    contradicted: str = ""
    """What its node measured that contradicts the line: then it is shown, and explains nothing. Empty if nothing does."""
    supported: str = ""
    """What its node measured that agrees with the line: a source beside the log, of the same fault."""

    @property
    def entry(self) -> FaultKind:
        """The fault kind in the catalogue."""
        return CATALOGUE[self.kind]

    @property
    def log(self) -> str:
        """The log that it was read in, one of `LOGS`, or in which its line stands; empty where it was measured."""
        if self.is_driver_event:
            return KERNEL_LOG
        if self.is_condition:
            return next((log for log in (KERNEL_LOG, SYSTEM_LOG) if log in self.entry.logs), "")
        if self.is_dcgm:
            return SYSTEM_LOG if _is_from_logs(self.entry) else ""
        return next((log for log in LOGS if self.source == log or self.source.startswith(f"{log} o")), "")

    @property
    def is_driver_event(self) -> bool:
        """Whether it is the number of an Xid, of which the text is not known; what is inferred from such events is none."""
        return self.source.startswith(DRIVER_EVENTS) and KERNEL_LOG in self.entry.logs

    @property
    def is_condition(self) -> bool:
        """Whether a monitor of a Kubernetes node reported it: it quotes a log, or says what it made of one."""
        return self.source.startswith(NODE_CONDITIONS) or self.is_event

    @property
    def is_event(self) -> bool:
        """Whether a monitor of a Kubernetes node reported it as an event, which proves nothing by itself."""
        return self.source.startswith(NODE_EVENTS)

    @property
    def is_dcgm(self) -> bool:
        """Whether DCGM reported it: a value that it measured, of a kind that readings of GPUs show too, or its verdict in words."""
        return self.source.startswith(DCGM)

    @property
    def is_proven(self) -> bool:
        """Whether its evidence takes a node out: a measured value, or a line that can only mean this fault, of a device in use."""
        if self.is_ruled_out or self.is_event:
            return False
        if not self.log:
            return True
        return self.log in self.entry.logs and self.entry.proves(self.quote)

    @property
    def is_ruled_out(self) -> bool:
        """Whether it is known to have done nothing to the job: its device is not used, or is not as the line says."""
        return self.idle or bool(self.contradicted)

    @property
    def certainty(self) -> Certainty:
        """How much it says of the fault."""
        if self.is_proven:
            return Certainty.PROOF
        return Certainty.CONTRADICTED if self.contradicted else Certainty.LINE

    @property
    def needs_proof(self) -> bool:
        """Whether it is a line that a healthy node may write, of a kind that takes a node out or is of interest beside other faults."""
        action = self.entry.recommended_action
        of_interest = action in TAKES_NODE_OUT or (action is RecommendedAction.MONITOR and self.log == KERNEL_LOG)
        return of_interest and not self.is_proven

    @property
    def key(self) -> FaultKey:
        """What equal reports of one fault have in common: kind, node and signature."""
        return self.kind, self.node, self.signature

    @property
    def target(self) -> str:
        """The rank, node or job that it was seen on."""
        if self.rank is not None:
            return f"rank {self.rank} on {self.node}"
        return f"node {self.node}" if self.node else "job"

    @property
    def place(self) -> str:
        """The target within a sentence: ``node-0``, not ``node node-0``."""
        return self.target.removeprefix("node ")


NO_ACTION_NEEDED: Final = frozenset({RecommendedAction.RECORD, RecommendedAction.MONITOR})
"""Recommended actions that need no reaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedActions:
    """Recommended actions of faults: those of the catalogue, with the overrides of a policy."""

    changed: Mapping[str, RecommendedAction] = field(default_factory=dict)
    """Fault kind to the action that overrides the catalogue's. Who sets one decides, whatever the evidence."""
    confirmed: Mapping[FaultKey, str] = field(default_factory=dict)
    """Faults that a log line alone does not prove, to the second signal that confirms them."""

    def of(self, fault: Fault) -> RecommendedAction:
        """Return the recommended action of *fault*: to monitor it where it would take a node out and is neither proven nor confirmed."""
        if (changed := self.changed.get(fault.kind)) is not None:
            return changed
        return RecommendedAction.MONITOR if self.only_shows(fault) else fault.entry.recommended_action

    def only_shows(self, fault: Fault) -> bool:
        """Return whether *fault* is a line that a healthy node may write, and is neither confirmed nor of a kind that the policy sets."""
        return fault.kind not in self.changed and fault.needs_proof and (fault.is_ruled_out or fault.key not in self.confirmed)

    def needs_action(self, fault: Fault) -> bool:
        """Return whether *fault* needs a reaction."""
        return self.of(fault) not in NO_ACTION_NEEDED


CATALOGUE_ACTIONS: Final = RecommendedActions()
"""The catalogue's actions without overrides."""
