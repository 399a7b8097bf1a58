"""The warm starter: an interpreter that has imported what a training script needs, and forks a worker from itself on demand.

It never runs a thread, an operator or a CUDA call before it forks, so that a fork of it is as good as a fresh interpreter
(torch starts its threads with the first operator, CUDA its context with the first call).
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.process import die_with_parent
from holdfast.wire import LineBuffer, Message, encode

def _preload(modules: list[str]) -> list[str]:
    """Import *modules*, and tell which could be: a missing one is the script's matter, not ours."""
    done = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        done.append(name)
    return done


def main() -> None:
    """Serve starts until the agent goes away; in a fork, become the worker."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    begin = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = _preload(sys.argv[2:])
    channel.sendall(encode({"ready": True, "preloaded": done, "seconds": time.monotonic() - begin}))
    worker = _serve(channel)
    if worker is not None:
        worker()


def _serve(channel: socket.socket) -> Callable[[], None] | None:
    """Fork a worker for each order. Return in the fork with what it has to run, in the starter when the agent is gone."""
    lines = LineBuffer()
    while data := channel.recv(1 << 20):
        for order in lines.feed(data):
            worker = _fork(channel, order)
            if worker is not None:
                return worker
    return None


def _fork(channel: socket.socket, order: Message) -> Callable[[], None] | None:
    """Fork twice, so that the worker becomes a child of the agent (its subreaper) and the agent sees its end at once."""
    begin = time.time()
    try:
        middle = os.fork()
    except OSError as error:
        channel.sendall(encode({"rank": order["rank"], "error": str(error), "errno": error.errno}))
        return None
    if middle:
        os.waitpid(middle, 0)
        return None
    middle = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        channel.sendall(encode({"rank": order["rank"], "error": str(error), "errno": error.errno}))
        os._exit(0)
    if worker:
        channel.sendall(encode({"rank": order["rank"], "pid": worker}))
        os._exit(0)
    channel.close()
    return lambda: _become(order, middle, begin)


def _become(order: Message, middle: int, begin: float) -> None:
    """Turn this fork into the worker that *order* describes, and run its script as ``__main__``."""
    while os.getppid() == middle:  # until it is gone and the agent has become our parent
        time.sleep(0.0002)
    die_with_parent(order["agent"])
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ["HOLDFAST_STARTED"] = repr(begin)
    _reseed()
    _run(list(order["argv"]), order["directory"])


def _reseed() -> None:
    """Give this fork its own entropy, as a fresh interpreter has."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run(argv: list[str], directory: str) -> None:
    """Run the script as ``python script.py`` would: same ``__main__``, same ``sys.path[0]``, same exit status."""
    try:
        os.chdir(directory)
        with open(argv[0], "rb") as file:
            source = file.read()
        main = ModuleType("__main__")
        main.__dict__.update({"__file__": argv[0], "__builtins__": __builtins__, "__spec__": None, "__cached__": None})
        code = compile(source, argv[0], "exec")
    except (OSError, SyntaxError, ValueError) as error:
        _report(error)
        traceback.print_exception(error)
        sys.exit(1)
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)  # noqa: S102 (running the user's script is what this is for)
    except Exception as error:  # noqa: BLE001 (whatever leaves the script is told to the agent, printed, and ends it)
        _report(error)
        _print(error)
        sys.exit(1)


def _print(error: BaseException) -> None:
    """Print the traceback without our own frames in front."""
    first = error.__traceback__
    shown: Any = first.tb_next if first is not None and first.tb_next is not None else first
    traceback.print_exception(type(error), error, shown)


def _report(error: BaseException) -> None:
    """Tell the agent what left the script, before the process ends."""
    from holdfast.runtime.link import link  # noqa: PLC0415 (only a failing worker needs it)

    link().exception(error)


if __name__ == "__main__":
    # Under its importable name, so that nothing of the starter is left in the ``__main__`` that a worker replaces.
    from holdfast.runtime import warm

    warm.main()
