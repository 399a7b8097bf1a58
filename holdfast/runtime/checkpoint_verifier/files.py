"""The files of a checkpoint: whether those that its manifest names are there as they were written. Starts without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Flaw, Manifest, UnusableCheckpoint
from holdfast.runtime.checkpoint_verifier.findings import Findings


@dataclass(slots=True)
class StoredCheckpoint:
    """One checkpoint on disk."""

    path: Path
    manifest: Manifest | None = None
    flaw: Flaw | None = None
    findings: Findings = field(default_factory=Findings)

    @property
    def step(self) -> int:
        """Return the step that its folder is named after."""
        return manifest.step_of(self.path)

    @property
    def complete(self) -> bool:
        """Tell whether nothing is known against it."""
        return not self.findings.broken

    @property
    def status(self) -> str:
        """Return ``complete``, ``torn`` or ``corrupt``."""
        return "complete" if self.complete else "torn" if self.flaw == "checkpoint-torn" else "corrupt"

    def add(self, findings: Findings) -> None:
        """Take what was found by reading its tensors."""
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
            if verify:
                manifest.check(folder, name, file)
            else:
                manifest.check_size(folder, name, file)
        except UnusableCheckpoint as unusable:
            one.flaw = one.flaw or unusable.flaw
            one.findings.broken.append(unusable.why)
    if verify and one.complete:
        one.findings.proven.append(f"all {len(one.manifest.files)} files have the SHA-256 that the manifest names")
    return one
