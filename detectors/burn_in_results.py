"""What came of trying a node out: one value for each thing that was tried. Pure, as what was tried is told by programs elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

LONGEST: Final = 2000
"""Characters of a text that are kept: it comes from a node that is in doubt."""


def _cut(text: str) -> str:
    return text[:LONGEST]


Text = Annotated[str, _cut]


class CheckMark(str, Enum):  # noqa: UP042 (nodes have python 3.10, which knows no StrEnum)
    """How a trial ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not run: that is not a pass, and not a failure."""

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried on a node."""

    name: Text
    mark: CheckMark
    words: Text
    """What was seen, or why nothing was."""
    figures: dict[Text, float] = field(default_factory=dict)
    """What was measured: each name ends in its unit."""
    seconds: float = 0.0
    needed: bool = True
    """A node is not healthy while this check is skipped; otherwise the skip is reported and changes nothing."""
    devices: tuple[Text, ...] = ()
    """Devices that the check used, by every name that the node has for them (PCI address, interface, disk, mount point); empty: unknown."""
