"""`python -m holdfast.runtime.checkpoint_verifier FOLDER ...` verifies checkpoints; without a folder it reads tasks as JSON lines.

A task: ``{"disk": FOLDER or null, "memory": [FILE, ...], "world": N}``. With both, the snapshots are verified and then compared with the
checkpoint. The answer is a line with the fields of `Findings`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint_verifier.checkpoint import VerifiedCheckpoint, verify_checkpoint
from holdfast.runtime.checkpoint_verifier.findings import Findings, inspect_checkpoint
from holdfast.runtime.checkpoint_verifier.snapshots import VerifiedSnapshots, compare, verify_snapshots


def findings(task: Mapping[str, Any]) -> Findings:
    """Carry out one task; every error is a finding."""
    found = Findings()
    snapshots: VerifiedSnapshots | None = None
    try:
        checkpoint = VerifiedCheckpoint(Path(task["disk"])) if task.get("disk") else None
        snapshots = VerifiedSnapshots([Path(file) for file in task["memory"]]) if task.get("memory") else None
        if checkpoint is not None and not snapshots:
            verify_checkpoint(checkpoint, found)
        if snapshots is not None:
            verify_snapshots(snapshots, int(task["world"]), found)
            if checkpoint is not None:
                compare(snapshots, checkpoint, found)
    except manifest.UnusableCheckpoint as unusable:
        found.broken.append(unusable.why)
    except Exception as error:  # noqa: BLE001 (a verification that ends silently would look like one that found nothing)
        first_line = str(error).splitlines()[0][:300] if str(error) else ""
        found.broken.append(f"it could not be read completely: {type(error).__name__}: {first_line}")
    finally:
        if snapshots is not None:
            snapshots.close()
    return found


def main(folders: Sequence[str]) -> int:
    """Verify *folders* and print the findings, or carry out the tasks on standard input; return the exit status."""
    if not folders:
        for line in sys.stdin:
            print(json.dumps(asdict(findings(json.loads(line)))), flush=True)
        return 0
    broken = False
    for folder in folders:
        one = inspect_checkpoint(Path(folder).absolute(), verify=True)
        if one.complete:
            one.add(findings({"disk": str(one.path)}))
        found = one.findings
        for word, lines in (("proven", found.proven), ("BROKEN", found.broken), ("open", found.unproven)):
            for line in lines:
                print(f"{folder}: {word}: {line}")
        broken |= bool(found.broken)
    return int(broken)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # nothing is open, and a normal exit takes most of a second to unload torch
