"""The amounts and thresholds of a burn-in, from the cluster's settings and the caller's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from holdfast.policies.nodes.burn_in import BurnInThresholds

if TYPE_CHECKING:
    from holdfast.spec.cluster_settings import BurnInSettings

SHORT_SECONDS: Final = 0.4
"""The work of a short burn-in: enough to find what is dead, not what is weak."""
SHORT_MEMORY, SHORT_SIZE = 64_000_000, 8_000_000
"""Bytes of memory, and of disk and network, in a short burn-in."""
ROUNDS: Final = 3
"""Rounds in which nodes are paired for the network check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInPlan:
    """Amounts and thresholds of one burn-in."""

    seconds: float
    """All checks of one node together, without the network."""
    memory_share: float
    memory_most: int
    """Bytes."""
    disk_size: int
    """Bytes."""
    network_size: int
    """Bytes in each direction."""
    rounds: int
    port: int
    torch: bool
    limits: BurnInThresholds
    short: bool = False
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Node to how many GPUs the cluster file says it has."""

    @classmethod
    def of(cls, settings: BurnInSettings, *, seconds: float | None = None, short: bool = False) -> Self:
        """Return the plan of *settings*, or one of other *seconds*; *short*: under a second, not enough to lift a quarantine."""
        default = SHORT_SECONDS if short else settings.duration.total_seconds()
        return cls(
            seconds=default if seconds is None else seconds,
            memory_share=settings.memory,
            memory_most=min(settings.max_memory, SHORT_MEMORY) if short else settings.max_memory,
            disk_size=min(settings.disk_size, SHORT_SIZE) if short else settings.disk_size,
            network_size=min(settings.network_size, SHORT_SIZE) if short else settings.network_size,
            rounds=1 if short else ROUNDS,
            port=settings.port,
            torch=settings.torch and not short,
            limits=settings.thresholds.limits,
            short=short,
        )

    @property
    def max_seconds(self) -> float:
        """Return the time after which a burn-in of one node has ended, or is stuck: its result counts until then."""
        return 4 * self.seconds + 600.0
