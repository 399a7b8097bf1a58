"""The result of a verification, and the files of a checkpoint: whether those in its manifest are there unchanged. Starts without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Flaw, Manifest, UnusableCheckpoint

_NAMED: Final = 3
"""Ranks or tensors that a message names."""


@dataclass(slots=True)
class Findings:
    """The lines of a report: what is broken, what is proven, and what cannot be proven."""

    broken: list[str] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def prove(self, proven: str, broken: Iterable[str]) -> None:
        """Record that *proven* holds, unless something is *broken*."""
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
    """Return *names* separated by commas, the first few by name."""
    all_names = [str(name) for name in names]
    more = len(all_names) - _NAMED
    return ", ".join(all_names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def differing_ranks(what: str, values: Mapping[int, Any]) -> list[str]:
    """Return a line for each group of ranks that differs from the majority in *what*; none when all agree."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    if len(by_value) < 2:  # noqa: PLR2004 (one value: all agree)
        return []
    (usual, _), *others = sorted(by_value.items(), key=lambda item: -len(item[1]))
    return [f"{what} of rank {listed(ranks)} is {value}, that of the others {usual}" for value, ranks in others]


@dataclass(slots=True)
class StoredCheckpoint:
    """One checkpoint on disk."""

    path: Path
    manifest: Manifest | None = None
    flaw: Flaw | None = None
    findings: Findings = field(default_factory=Findings)

    @property
    def step(self) -> int:
        """Return the step in the name of its folder."""
        return manifest.step_of(self.path)

    @property
    def complete(self) -> bool:
        """Whether no flaw is known."""
        return not self.findings.broken

    @property
    def status(self) -> str:
        """Return ``complete``, ``torn`` or ``corrupt``."""
        return "complete" if self.complete else "torn" if self.flaw == "checkpoint-torn" else "corrupt"

    def add(self, findings: Findings) -> None:
        """Add the result of verifying its tensors."""
        self.findings.add(findings)
        if findings.broken:
            self.flaw = "checkpoint-corrupt"


def inspect_checkpoint(folder: Path, *, verify: bool) -> StoredCheckpoint:
    """Return what is known of the checkpoint in *folder*; with *verify* every byte of it is read."""
    one = StoredCheckpoint(folder)
    try:
        one.manifest = manifest.read(folder)
    except UnusableCheckpoint as unusable:
        one.flaw, one.findings.broken = unusable.flaw, [unusable.why]
        return one
    for name, file in sorted(one.manifest.files.items()):
        try:
            (manifest.check if verify else manifest.check_size)(folder, name, file)
        except UnusableCheckpoint as unusable:
            one.flaw = one.flaw or unusable.flaw
            one.findings.broken.append(unusable.why)
    if verify and one.complete:
        one.findings.proven.append(f"all {len(one.manifest.files)} files have the SHA-256 in the manifest")
    return one
