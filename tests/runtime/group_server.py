"""Fork workers that run scripts as real ones do: a program that `flow_double.Workers` speaks with, forked from one that has torch imported.

Nothing here runs an operator or a thread before the fork, so a fork is as good as a fresh interpreter, and costs no import.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
from typing import Any, NoReturn

import numpy as np  # noqa: F401 (all of these: a worker finds them imported, as the starter of a real one leaves them)
import torch
import torch._dynamo
import torch.distributed.checkpoint
from torch.distributed.fsdp import fully_shard  # noqa: F401 (as numpy)
from torch.nn.parallel import DistributedDataParallel  # noqa: F401 (as numpy)

import holdfast
import holdfast.runtime.init
import holdfast.runtime.session  # noqa: F401 (as numpy)
from holdfast.host.process import become_subreaper
from holdfast.runtime.process import fork_server
from tests.reaping import Children


def main() -> None:
    """Serve one order after another until the pipe ends; in a fork, become the worker."""
    become_subreaper()
    gc.collect()
    gc.freeze()  # as the starter of a real worker does: collections in the forks are short, and their memory stays shared
    say({"ready": torch.__version__})
    children = Children()
    for line in sys.stdin:
        order = json.loads(line)
        if "argv" in order:
            begin, server = time.time(), os.getpid()
            pid = os.fork()
            if not pid:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                fork_server._become_worker({**order, "agent": server}, 0, begin)
                end()
            children.begun(pid)
            say({"pid": pid})
        else:
            say(children.ended())


def end() -> NoReturn:
    """End a worker whose script ended well as the interpreter does, but for taking all modules apart: that is a second of work."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def say(message: dict[str, Any]) -> None:
    """Answer with one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
