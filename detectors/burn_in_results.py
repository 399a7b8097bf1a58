"""What came of trying a node out: one value for each thing that was tried. Pure, as what was tried is told by programs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from detectors.codec import Misshapen


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

    name: str
    mark: CheckMark
    words: str
    """What was seen, or why nothing was."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured: each name ends in its unit."""
    seconds: float = 0.0
    needed: bool = True
    """A node is not healthy while this check is skipped; otherwise the skip is reported and changes nothing."""
    devices: tuple[str, ...] = ()
    """Devices that the check used, by every name that the node has for them (PCI address, interface, disk, mount point); empty: unknown."""


def check_of(told: object) -> Check:
    """Return the check that *told* (JSON) holds; raise `Misshapen` when it is none: it comes from a node that is in doubt."""
    if not isinstance(told, dict):
        raise Misshapen(f"{str(told)[:60]!r} is no check")
    try:
        return Check(
            name=_text(told["name"]),
            mark=CheckMark(told["mark"]),
            words=_text(told["words"]),
            figures={_text(name): _number(value) for name, value in told.get("figures", {}).items()},
            seconds=_number(told.get("seconds", 0.0)),
            needed=told.get("needed", True) is not False,
            devices=tuple(_text(one) for one in told.get("devices", ())),
        )
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise Misshapen(f"{str(told)[:60]!r} is no check: {error}") from None


def _text(value: Any) -> str:  # noqa: ANN401 (any JSON)
    if not isinstance(value, str):
        raise Misshapen(f"{str(value)[:60]!r} is no text")
    return value[:2000]


def _number(value: Any) -> float:  # noqa: ANN401 (any JSON)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misshapen(f"{str(value)[:60]!r} is no number")
    return float(value)
