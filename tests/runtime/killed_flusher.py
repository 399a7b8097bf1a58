"""Flush one order again and again, killed each time one file event later, until it comes through: a line of JSON a round."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from holdfast import flush
from holdfast.runtime import manifest
from holdfast.runtime.flusher.job import Job
from holdfast.runtime.link import Link
from holdfast.runtime.storage import Pace
from holdfast.runtime.trouble import Teller

EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"})


def whole(directory: Path) -> list[int]:
    """Return the steps of the checkpoints of which every byte is as it was written; fail for a torn one."""
    steps = []
    for folder in manifest.candidates(directory):
        for name, wanted in manifest.read(folder).files.items():
            manifest.check(folder, name, wanted)
        steps.append(int(folder.name.removeprefix("step-")))
    return steps


def flushed(vault: Path, directory: Path, *, until: int | None) -> bool:
    """Carry the order out in a fork; kill it at its event number *until*. Tell whether it was killed."""
    (order,) = flush.orders(vault)
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if (event in EVENTS and str(directory) in str(arguments[0])) or (event in EVENTS and str(vault) in str(arguments[0])):
                if seen == until:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(hook)
        Job(order, vault, Link(None), Pace(None), Teller()).run()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def main() -> None:
    """Go through all events."""
    vault, directory = Path(sys.argv[1]), Path(sys.argv[2])
    before = directory.with_name("before")
    shutil.copytree(directory, before)
    (order,) = flush.orders(vault)
    number, killed = 0, True
    while killed:
        killed = flushed(vault, directory, until=number)
        there = whole(directory)
        if flush.orders(vault):
            assert not flushed(vault, directory, until=None)
        print(json.dumps({"at": number, "killed": killed, "whole": bool(there), "after": whole(directory)}), flush=True)
        shutil.rmtree(directory)
        shutil.copytree(before, directory)
        order.write(vault)
        number += 1


if __name__ == "__main__":
    main()
