"""What one rank's snapshots have cost, and what a step was like."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.runtime.telemetry.wait_windows import WaitWindow


@dataclass(slots=True)
class SnapshotCounts:
    """What snapshots have cost so far."""

    steps: int = 0
    taken: int = 0
    given_up: int = 0
    held: int = 0
    """Left out because replicas were behind."""
    copied: float = 0.0
    """Seconds of copying."""
    overlapped: float = 0.0
    """Seconds of it while training waited."""
    paused: float = 0.0
    """Seconds for which training stood still."""
    prepared: float = 0.0
    """Seconds of the training thread to begin them."""
    slowed: float = 0.0
    """Seconds by which snapshots made steps longer, measured by steps without one; at least `prepared` and `paused`."""
    trained: float = 0.0
    """Seconds of all steps."""
    size: int = 0
    """Bytes of the newest."""
    newest: int | None = None
    """The step of the newest whole one."""
    newest_at: float | None = None
    """When it was begun, and so its state was the present one (wall clock)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """A step as it was: when it began (wall clock), how long it took, and what happened, in seconds since its begin."""

    began: float
    took: float
    windows: list[WaitWindow]
    operations: list[tuple[str, int]]
    """Point-to-point operations in their order, with the peer's rank."""
    copies: list[tuple[float, float, bool]]
    """When was copied: begin, end, and whether training waited."""
