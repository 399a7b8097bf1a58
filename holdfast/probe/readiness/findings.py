"""The facts about a node, what most nodes have in common, and what is found of one node in one respect. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class ReadinessState(StrEnum):
    """The state of a node in one respect."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It could not be examined."""
    DEGRADED = "degraded"
    """Jobs run, and something should be fixed."""
    MISSING = "missing"
    """No job runs there before it is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessFinding:
    """The result of one check of one node."""

    node: str
    check: str
    state: ReadinessState
    message: str
    cure: str = ""


Found: TypeAlias = Iterator[tuple[ReadinessState, str, str]]
"""The results of one check: the state, a message, and the cure."""


@dataclass(slots=True, kw_only=True)
class Facts:
    """What one node reported; each answer is JSON, `{"blind": why}` where it could not be had. None: it was not asked."""

    node: str
    unreachable: str = ""
    """Why nobody could log in, or run the cluster's interpreter."""
    cure: str = ""
    """What helps, where the reason does not say so itself."""
    probe: dict[str, Any] | None = None
    gpus: dict[str, Any] | None = None
    clock: tuple[float, float] | None = None
    """By how many seconds it is ahead of this machine's clock, and the error of that."""
    environment: dict[str, Any] | None = None
    torch: dict[str, Any] | None = None
    node_proxy: dict[str, Any] | None = None
    paths: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] | None = None
    """The result for the folder that one node made among the checkpoints: its `place`, `by` whom, whether it is `seen`, and what failed."""
    link: dict[str, Any] | None = None
    """The result of a connection to the next node: `to`, and the `rate` in bytes per second."""


def blind(answer: dict[str, Any] | None) -> str:
    """Return why there is no answer; nothing where there is one."""
    if answer is None:
        return "it was not asked"
    return str(answer["blind"]) if set(answer) == {"blind"} else ""


class Baseline:
    """What most nodes have: a node with something else is the one to fix. The cluster file takes precedence."""

    def __init__(self, facts: Sequence[Facts], declared: Mapping[str, int]) -> None:
        reached = [one for one in facts if not one.unreachable]
        self._declared = declared
        self.torch = _most_common([(one.torch or {}).get("version") for one in reached])
        self.python = _most_common([minor((one.probe or {}).get("python")) for one in reached])
        self._gpus = max([len(gpus_of(one) or ()) for one in reached if one.node not in declared], default=0)
        self.driver = _most_common([(one.gpus or {}).get("driver_version") for one in reached if gpus_of(one)])

    def declared(self, node: str) -> int | None:
        """Return how many GPUs *node* has by the cluster file; None where that does not say."""
        return self._declared.get(node)

    def gpus_for(self, node: str) -> tuple[int, str]:
        """Return how many GPUs *node* should have, and who says so: the cluster file, or the other nodes that it does not mention."""
        declared = self.declared(node)
        return (self._gpus, "other nodes have") if declared is None else (declared, "the cluster file says")


def _most_common(values: Sequence[Any]) -> Any:  # noqa: ANN401 (whatever is counted)
    counted = Counter(value for value in values if isinstance(value, str))
    return counted.most_common(1)[0][0] if counted else None


def minor(version: object) -> str | None:
    """Return the first two numbers of a version of Python."""
    return ".".join(version.split(".")[:2]) if isinstance(version, str) else None


def gpus_of(one: Facts) -> list[dict[str, Any]] | None:
    """Return a node's GPUs as NVML reported them; None where it did not."""
    gpus = (one.gpus or {}).get("gpus")
    return gpus if isinstance(gpus, list) else None
