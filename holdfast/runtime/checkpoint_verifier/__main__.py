"""`python -m holdfast.runtime.checkpoint_verifier FOLDER ...` verifies checkpoints; without a folder it takes tasks as JSON lines.

A task: ``{"disk": FOLDER or null, "memory": [FILE, ...], "world": N}``. With both, the snapshots
are judged and then compared with the checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint_verifier import disk, memory
from holdfast.runtime.checkpoint_verifier.findings import Findings


def findings(task: Mapping[str, Any]) -> Findings:
    """Do one task; whatever goes wrong with it is a finding."""
    found = Findings()
    moment: memory.VerifiedSnapshots | None = None
    try:
        checkpoint = disk.VerifiedCheckpoint(Path(task["disk"])) if task.get("disk") else None
        moment = memory.VerifiedSnapshots([Path(file) for file in task["memory"]]) if task.get("memory") else None
        if checkpoint is not None and not moment:
            disk.audit(checkpoint, found)
        if moment is not None:
            memory.audit(moment, int(task["world"]), found)
            if checkpoint is not None:
                memory.compare(moment, checkpoint, found)
    except manifest.UnusableCheckpoint as unusable:
        found.broken.append(unusable.why)
    except Exception as error:  # noqa: BLE001 (an audit that ends without a word would look like one that found nothing)
        found.broken.append(
            f"it could not be read to its end: {type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        )
    finally:
        if moment is not None:
            moment.close()
    return found


def by_hand(folders: Sequence[str]) -> int:
    """Audit *folders* and tell a person."""
    status = 0
    for folder in folders:
        found = Findings()
        try:
            for name, file in manifest.read(Path(folder).absolute()).files.items():
                manifest.check(Path(folder), name, file)
            found = findings({"disk": str(Path(folder).absolute())})
            found.proven.insert(0, "every file has the SHA-256 that the manifest names")
        except manifest.UnusableCheckpoint as unusable:
            found.broken.append(unusable.why)
        for word, lines in (("proven", found.proven), ("BROKEN", found.broken), ("open", found.unproven)):
            for line in lines:
                print(f"{folder}: {word}: {line}")
        status = max(status, int(bool(found.broken)))
    return status


def main(folders: Sequence[str]) -> int:
    """Audit *folders*, or what comes in."""
    if folders:
        return by_hand(folders)
    for line in sys.stdin:
        print(json.dumps(findings(json.loads(line)).as_record()), flush=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # nothing is open; an interpreter takes most of a second to take torch's modules apart, and somebody waits
