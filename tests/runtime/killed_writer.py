"""Carry out the request in each memory store over and over, one writer killed each time one file event later: a line of JSON a round."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from holdfast.memstore import write_requests
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.agent_client import AgentLink
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.storage import WriteRate
from holdfast.runtime.checkpoint.storage_errors import StorageErrorReporter
from holdfast.runtime.checkpoint_writer import rendezvous
from holdfast.runtime.checkpoint_writer.service import WriteTask

EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"})
rendezvous.STALL = 60.0  # type: ignore[misc]  # a writer that waits too long fails: then the checkpoint is missing


def whole(directory: Path) -> list[int]:
    """Return the steps of the checkpoints of which every byte is as it was written; fail for a torn one."""
    steps = []
    for folder in manifest.candidates(directory):
        try:
            for name, wanted in manifest.read(folder).files.items():
                manifest.check(folder, name, wanted)
        except manifest.UnusableCheckpoint:
            if folder.exists():
                raise
            return whole(directory)  # another checkpoint writer has retired it meanwhile
        steps.append(int(folder.name.removeprefix("step-")))
    return steps


def begun(request: WriteRequest, memstore: Path, directory: Path, *, until: int | None = None) -> int:
    """Carry *request* out in a fork that is killed at its event number *until*; return its pid."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event in EVENTS and (str(directory) in str(arguments[0]) or str(memstore) in str(arguments[0])):
                if seen == until:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(hook)
        WriteTask(request, memstore, AgentLink(None), WriteRate(None), StorageErrorReporter()).run()
        os._exit(0)
    return pid


def was_killed(pid: int) -> bool:
    """Wait for the end of a checkpoint writer."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def main() -> None:
    """Go through all events of the checkpoint writer of the first memory store; those of the others live."""
    directory, memstores = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    before = directory.with_name(f"{directory.name}-before")
    shutil.copytree(directory, before)
    requests = [(request, memstore) for memstore in memstores for request in write_requests.pending(memstore)]
    number, killed = 0, True
    while killed:
        (mine, memstore), *others = requests
        alive = [begun(request, its, directory) for request, its in others]
        killed = was_killed(begun(mine, memstore, directory, until=number))
        there, since = whole(directory), time.monotonic()
        if write_requests.pending(memstore):
            assert not was_killed(begun(mine, memstore, directory))
        ends = [was_killed(pid) for pid in alive]
        assert not any(ends)
        result = {"at": number, "killed": killed, "whole": bool(there), "after": whole(directory), "seconds": time.monotonic() - since}
        print(json.dumps(result), flush=True)
        shutil.rmtree(directory)
        shutil.copytree(before, directory)
        for request, its in requests:
            request.write(its)
        number += 1


if __name__ == "__main__":
    main()
