"""Fork real ranks for each scenario: a program that `ranks.Ranks` speaks with, itself forked from a process that has torch imported.

Nothing here runs an operator before the fork, so a fork is as good as a fresh interpreter, and costs no import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401 (all of these: a rank finds them imported, as the starter of a real worker leaves them)
import torch
import torch._dynamo
import torch.distributed.checkpoint

import holdfast.runtime.data.loader
import holdfast.runtime.session  # noqa: F401 (as numpy)
from holdfast.host.process import die_with_parent
from holdfast.runtime.agent_client import link


def main() -> None:
    """Serve one scenario after another until the pipe ends."""
    say({"ready": torch.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        pids = [fork(order, rank) for rank in range(order["ranks"])]
        say({"pids": pids})
        say({"statuses": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]})


def fork(order: dict[str, Any], rank: int) -> int:
    """Start one rank; return its pid."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(server)
    folder = Path(order["folder"])
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target in (1, 2):
        os.dup2(log, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    status, answer = 1, (folder / f"{rank}.json").open("w")  # opened now: a scenario may give up its rights
    try:
        home, _, name = order["scenario"].partition(":")
        result = getattr(importlib.import_module(home), name)(**order["arguments"])
        with answer:
            json.dump(result, answer)
        status = 0
    except BaseException as error:  # noqa: BLE001 (whatever it is belongs into the rank's log)
        traceback.print_exc()
        link().exception(error)  # as the starter of a real worker does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def say(message: dict[str, Any]) -> None:
    """Answer with one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
