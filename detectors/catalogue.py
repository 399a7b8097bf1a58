"""The fault catalogue: every kind Holdfast can name, in one table that the command line, the docs and the history walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, ParamSpec

from detectors.evidence import LogLine, Sample


class RecommendedAction(StrEnum):
    """How much a fault asks for, least to most."""

    RECORD = "record"
    MONITOR = "monitor"
    RETRY_STEP = "retry-step"
    RESTART = "restart"
    RESET_GPU = "reset-gpu"
    DRAIN = "drain"
    EVICT = "evict"
    USER_ERROR = "user-error"


class Blame(StrEnum):
    """What a fault speaks against."""

    GPU = "gpu"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    PROCESS = "process"
    USER_CODE = "user_code"
    NONE = "none"


class Area(StrEnum):
    """Where faults of a kind have their place: the coarsest sorting of the catalogue."""

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
"""Every component, by its area."""

AREAS: Final[dict[str, Area]] = {component: area for area, components in COMPONENTS.items() for component in components}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault: what it is, how it is seen, and what it asks for."""

    id: str
    title: str
    component: str
    source: str
    recommended_action: RecommendedAction
    blame: Blame
    action: str
    unhealthy: Sample
    healthy: Sample
    reference: str = "docs/architecture.md"
    weight: int = 50
    """How near the root of an incident this kind usually is (100: always a root, 0: always an echo of another)."""
    confused_with: tuple[str, ...] = ()
    """Kinds that it is often taken for, or that often come with it."""
    in_logs: str = ""
    """What is seen on devices and in logs too: what the logs' entry calls it and asks for, and its line."""

    @property
    def area(self) -> Area:
        """Where faults of this kind have their place."""
        return AREAS[self.component]


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
        entry = replace(measured, confused_with=confused_with, in_logs=in_logs)
    CATALOGUE[entry.id] = entry
    return entry


def _is_from_logs(entry: FaultKind) -> bool:
    return isinstance(entry.unhealthy.evidence, LogLine)


def _registering(make: Callable[P, FaultKind]) -> Callable[P, FaultKind]:
    return lambda *args, **fields: register(make(*args, **fields))


fault_kind = _registering(FaultKind)
"""Define a fault kind: takes the fields of `FaultKind` and adds the kind to the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A catalogue kind seen on a subject."""

    kind: str
    at: float
    node: str | None = None
    rank: int | None = None
    step: int | None = None
    quote: str = ""
    """The evidence in a person's words."""
    signature: str = ""
    """What makes two failures the same one (exception type and place, exit status)."""
    detail: str = ""
    """Longer evidence: a traceback, the last lines printed."""
    source: str = ""
    """Who told of it: ``kernel log on node-1``, ``worker output of rank 3``; `see` fills it in where a detector does not."""
    device: str = ""
    """The part of the node it was seen on, where a detector knows it (a PCI address, an interface, a mount)."""

    @property
    def entry(self) -> FaultKind:
        """The catalogue's entry of this fault."""
        return CATALOGUE[self.kind]

    @property
    def subject(self) -> str:
        """Whom it was seen on."""
        if self.rank is not None:
            return f"rank {self.rank} on {self.node}"
        return f"node {self.node}" if self.node else "job"


NO_ACTION_NEEDED: Final = frozenset({RecommendedAction.RECORD, RecommendedAction.MONITOR})
"""Levels of faults that need no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedActions:
    """How much faults ask for: what the catalogue says, but for the kinds of which a policy says otherwise."""

    changed: Mapping[str, RecommendedAction] = field(default_factory=dict)
    """Kind to its level."""

    def of(self, fault: Fault) -> RecommendedAction:
        """Return how much *fault* asks for."""
        return self.changed.get(fault.kind, fault.entry.recommended_action)

    def needs_action(self, fault: Fault) -> bool:
        """Tell whether *fault* asks for an answer."""
        return self.of(fault) not in NO_ACTION_NEEDED


CATALOGUE_ACTIONS: Final = RecommendedActions()
"""Those of the catalogue, unchanged."""
