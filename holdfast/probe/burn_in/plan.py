"""How hard nodes are tried: what the cluster's settings, and who asks, come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from policies.burn_in import BurnInThresholds

if TYPE_CHECKING:
    from holdfast.spec.burn_in import BurnInSettings

MB: Final = 10**6
SHORT: Final = 0.4
"""Seconds of work of a short burn-in: enough to see what is dead, not what is weak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInPlan:
    """Amounts and limits of one burn-in."""

    seconds: float
    """All checks of one node together, but the network."""
    memory_share: float
    memory_most: int
    """Bytes."""
    disk_size: int
    """Bytes."""
    network_size: int
    """Bytes in each direction."""
    rounds: int
    """Of pairing."""
    port: int
    torch: bool
    limits: BurnInThresholds
    short: bool = False
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Node to how many GPUs the cluster file says it has."""

    @classmethod
    def of(cls, settings: BurnInSettings, *, seconds: float | None = None, short: bool = False) -> Self:
        """Return what *settings* ask for; with other *seconds*, or *short*: in well under a second, and too little to lift a quarantine."""
        wanted = settings.seconds.total_seconds() if seconds is None else seconds
        limits = settings.limits.limits
        if short:
            return cls(
                seconds=SHORT if seconds is None else seconds,
                memory_share=settings.memory_share,
                memory_most=min(settings.memory_most, 64 * MB),
                disk_size=min(settings.disk_size, 8 * MB),
                network_size=min(settings.network_size, 8 * MB),
                rounds=1,
                port=settings.port,
                torch=False,
                limits=limits,
                short=True,
            )
        return cls(
            seconds=wanted,
            memory_share=settings.memory_share,
            memory_most=settings.memory_most,
            disk_size=settings.disk_size,
            network_size=settings.network_size,
            rounds=3,
            port=settings.port,
            torch=settings.torch,
            limits=limits,
        )

    @property
    def at_most(self) -> float:
        """Return after how many seconds a burn-in on one node is surely over, if it is not stuck: what it tells counts until then."""
        return 4 * self.seconds + 600.0
