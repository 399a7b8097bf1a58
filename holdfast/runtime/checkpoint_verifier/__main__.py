"""`python -m holdfast.runtime.checkpoint_verifier FOLDER ...` verifies checkpoints; without a folder it takes tasks as JSON lines.

A task: ``{"disk": FOLDER or null, "memory": [FILE, ...], "world": N}``. With both, the snapshots
are judged and then compared with the checkpoint.
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
from holdfast.runtime.checkpoint_verifier.files import inspect_checkpoint
from holdfast.runtime.checkpoint_verifier.findings import Findings
from holdfast.runtime.checkpoint_verifier.snapshots import VerifiedSnapshots, compare, verify_snapshots


def findings(task: Mapping[str, Any]) -> Findings:
    """Do one task; whatever goes wrong with it is a finding."""
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
    except Exception as error:  # noqa: BLE001 (a verification that ends without a word would look like one that found nothing)
        found.broken.append(
            f"it could not be read to its end: {type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        )
    finally:
        if snapshots is not None:
            snapshots.close()
    return found


def by_hand(folders: Sequence[str]) -> int:
    """Verify *folders* and print what was found."""
    status = 0
    for folder in folders:
        one = inspect_checkpoint(Path(folder).absolute(), verify=True)
        if one.complete:
            one.add(findings({"disk": str(one.path)}))
        found = one.findings
        for word, lines in (("proven", found.proven), ("BROKEN", found.broken), ("open", found.unproven)):
            for line in lines:
                print(f"{folder}: {word}: {line}")
        status = max(status, int(bool(found.broken)))
    return status


def main(folders: Sequence[str]) -> int:
    """Verify *folders*, or carry out the tasks that come in."""
    if folders:
        return by_hand(folders)
    for line in sys.stdin:
        print(json.dumps(asdict(findings(json.loads(line)))), flush=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # nothing is open; an interpreter takes most of a second to take torch's modules apart, and somebody waits
