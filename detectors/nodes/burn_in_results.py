"""Results of burn-in checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

LONGEST: Final = 2000
"""Maximum length of a text: it comes from a node that may be faulty."""


def _cut(text: str) -> str:
    return text[:LONGEST]


Text = Annotated[str, _cut]


class CheckMark(str, Enum):  # noqa: UP042 (nodes may have Python 3.10, without StrEnum)
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not run: neither passed nor failed."""

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check on a node."""

    name: Text
    mark: CheckMark
    words: Text
    """What was found, or why the check could not run."""
    figures: dict[Text, float] = field(default_factory=dict)
    """Measured values; each name ends in its unit."""
    seconds: float = 0.0
    needed: bool = True
    """Whether a node is not proven healthy while this check is skipped."""
    devices: tuple[Text, ...] = ()
    """Devices that the check used, by all their names (PCI address, interface, disk, mount point); empty: unknown."""
