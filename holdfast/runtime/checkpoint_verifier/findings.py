"""What a verification found: what is broken, what is proven, and what cannot be proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_NAMED: Final = 3
"""Ranks or tensors that a sentence names."""


@dataclass(slots=True)
class Findings:
    """The sentences of a report, each kind in the order in which they were found."""

    broken: list[str] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def prove(self, proven: str, broken: Iterable[str]) -> None:
        """Note that *proven* holds unless something is *broken*."""
        found = list(broken)
        self.broken += found
        if not found:
            self.proven.append(proven)

    def add(self, others: Findings) -> None:
        """Append the *others*."""
        self.broken += others.broken
        self.proven += others.proven
        self.unproven += others.unproven


def listed(names: Iterable[object]) -> str:
    """Return *names* as a sentence lists them, the first few by name."""
    all_names = [str(name) for name in names]
    more = len(all_names) - _NAMED
    return ", ".join(all_names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def apart(what: str, values: Mapping[int, Any]) -> list[str]:
    """Say which ranks differ from the others in *what*; nothing when all agree."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    if len(by_value) < 2:  # noqa: PLR2004 (one value: all agree)
        return []
    (usual, _), *others = sorted(by_value.items(), key=lambda item: -len(item[1]))
    return [f"{what} of rank {listed(ranks)} is {value}, that of the others {usual}" for value, ranks in others]
