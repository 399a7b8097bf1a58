"""What a node measures of the part of it that a line of its kernel log names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.detectors.evidence import NOT_REQUESTED, Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCheck:
    """What was measured of the part that a line names."""

    contradicted: str = ""
    """Why the line says nothing of this node now; empty if nothing contradicts it."""
    supported: str = ""
    """What was measured that agrees with it."""
    unused: bool = False
    """It is about a disk or a file system of which no process of the job has used anything."""
    addresses: tuple[str, ...] | Unknown = NOT_REQUESTED
    """Addresses of the interfaces that the line names, before it and now; not asked for where it names none of this node."""
    adapters: tuple[str, ...] = ()
    """Adapters on the cards that it names."""
    stacked: bool = False
    """Another interface (a bond, a bridge, a VLAN) sends through the one that it names."""


NOTHING: Final = LineCheck()
