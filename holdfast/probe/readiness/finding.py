"""What was found of one node in one respect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class ReadinessState(StrEnum):
    """How a node stands in one respect."""

    OK = "ok"
    UNSEEN = "unknown"
    """It could not be looked at."""
    DOUBTFUL = "degraded"
    """Jobs run, and something should be mended."""
    MISSING = "missing"
    """No job runs there before it is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessFinding:
    """One thing about one node."""

    node: str
    check: str
    state: ReadinessState
    words: str
    cure: str = ""


Found: TypeAlias = Iterator[tuple[ReadinessState, str, str]]
"""What one check finds: how a node stands, in words, and the cure."""


@dataclass(slots=True, kw_only=True)
class Facts:
    """What one node told of itself; each answer is JSON, `{"blind": why}` where there is none. None: it was not asked."""

    node: str
    away: str = ""
    """Why nobody could log in, or run the cluster's interpreter."""
    cure: str = ""
    """And what helps, where the words do not say so themselves."""
    probe: dict[str, Any] | None = None
    gpus: dict[str, Any] | None = None
    clock: tuple[float, float] | None = None
    """By how many seconds it is ahead of this machine's clock, and by how many that may be wrong."""
    environment: dict[str, Any] | None = None
    torch: dict[str, Any] | None = None
    node_proxy: dict[str, Any] | None = None
    paths: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] | None = None
    """What came of the folder that one node made among the checkpoints: its `place`, `by` whom, whether it is `seen`, and what failed."""
    link: dict[str, Any] | None = None
    """What came of a connection to the next node: `to`, and `bytes` a second."""


def blind(answer: dict[str, Any] | None) -> str:
    """Return why there is no answer; nothing where there is one."""
    if answer is None:
        return "it was not asked"
    return str(answer["blind"]) if set(answer) == {"blind"} else ""
