"""The warm starter: an interpreter that has imported what a training script needs, and forks a worker from itself on demand.

It never runs a thread, an operator or a CUDA call before it forks, so that a fork of it is as good as a fresh interpreter
(torch starts its threads with the first operator, CUDA its context with the first call).
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.machinery
import importlib.util
import multiprocessing.process
import os
import random
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from holdfast.process import die_with_parent, survive_sigterm
from holdfast.protocol import LineBuffer, Message, encode
from holdfast.runtime.process import fast_exit, restart_script, successor
from holdfast.runtime.process.restart_script import RestartScript


def main() -> None:
    """Serve starts until the agent goes away; in a fork, become the worker."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    begin = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    survive_sigterm()
    gc.disable()  # a fifth of the time that imports take goes into collections, and they find next to nothing
    done = _preload(sys.argv[2:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or every fork would print what is left in it
    gc.collect()
    gc.freeze()  # what is imported stays: collections in workers need not look at it, and leave its memory shared
    gc.enable()
    channel.sendall(encode({"ready": True, "preloaded": done, "seconds": time.monotonic() - begin}))
    worker = _serve(channel)
    if worker is None:
        fast_exit.note(None)
    else:
        worker()


def _preload(modules: list[str]) -> list[str]:
    """Import *modules*, and tell which could be: one that cannot is the script's matter, not ours."""
    done = []
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a foreign package may raise anything, and the script may not need it)
            print(f"{name} is not imported ahead: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 (our log)
        else:
            done.append(name)
    return done


# -- forking ----------------------------------------------------------------------------------------------------------


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
        _tell(channel, order, error=str(error), errno=error.errno)
        return None
    if middle:
        _, status = os.waitpid(middle, 0)
        if status:
            _tell(channel, order, error="the process that was to start it was killed")
        return None
    return _split(channel, order, begin)


def _split(channel: socket.socket, order: Message, begin: float) -> Callable[[], None]:
    """Tell the agent the worker's pid before the worker may go on: none runs that the agent does not know."""
    middle = os.getpid()
    told, tell = os.pipe()
    try:
        worker = os.fork()
    except OSError as error:
        _tell(channel, order, error=str(error), errno=error.errno)
        os._exit(0)
    if worker:
        with suppress(OSError):  # the agent is gone: so is the worker, by the end of its pipe
            _tell(channel, order, pid=worker)
            os.write(tell, b".")
        os._exit(0)
    channel.close()
    os.close(tell)
    if not os.read(told, 1):
        os._exit(1)
    os.close(told)
    return lambda: _become(order, middle, begin)


def _tell(channel: socket.socket, order: Message, **facts: object) -> None:
    channel.sendall(encode({"rank": order["rank"], **facts}))


def _become(order: Message, middle: int, begin: float) -> None:
    """Turn this fork into the worker that *order* describes, and run its script as ``__main__``."""
    while os.getppid() == middle:  # until it is gone and the agent has become our parent
        time.sleep(0.0002)
    die_with_parent(order["agent"])
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ["HOLDFAST_STARTED"] = repr(begin)
    os.chdir(order["directory"])
    if "HOLDFAST_STANDBY" in os.environ:
        _leave_behind(order["agent"])
    _reseed()
    _run(list(order["argv"]))


def _leave_behind(agent: int) -> None:
    """Have another process wait for the case that a standby's script must run again; in that one, return as the rank that it becomes."""
    told = successor.fork(agent)
    if told is not None:
        os.environ.clear()
        os.environ.update(told["environment"])
        for order in told["orders"]:
            restart_script.keep(order)


def _reseed() -> None:
    """Give this fork random streams of its own, as a fresh interpreter has; `random` does so by itself."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


# -- running the script -----------------------------------------------------------------------------------------------


def _run(argv: list[str]) -> None:
    """Run the script as ``python script.py`` would: same ``__main__``, same ``sys.path[0]``, same exit status."""
    script = str(Path(argv[0]).absolute())  # as Python does: neither links nor dots are resolved
    if _is_program(script):
        os.execv(sys.executable, [sys.executable, *argv])  # noqa: S606 (a folder, an archive or bytecode: for an interpreter of its own)
    source, code = _read(script), None
    while True:
        main = _as_main(argv, script)
        try:
            # Compiled once: what torch.compile keeps for a function, it keeps by the function's code.
            code = code or compile(source, script, "exec", dont_inherit=True)  # our own `from __future__` is not the script's
            exec(code, main.__dict__)  # noqa: S102 (running the user's script is what this is for)
        except RestartScript as again:
            _start_over(again)
        except BaseException as error:
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                _report(error)
            _hide_our_frames()
            fast_exit.note(error)
            raise  # the interpreter does what it does for any script: print, run exit handlers, end with the right status
        else:
            fast_exit.note(None)
            return


def _start_over(again: RestartScript) -> None:
    """Make ready for another run of the script by a standby: here in another role, in its successor as the rank it was given."""
    from holdfast.runtime.process import standby  # noqa: PLC0415 (whoever is here has imported torch)

    again.__traceback__ = None  # it holds the frames of the run that is over, and with them its model
    if "HOLDFAST_FRESH" in again.environment:
        standby.leave_to_successor(again.environment)
    standby.start_over(again.environment)


def _is_program(script: str) -> bool:
    if os.path.isdir(script) or zipfile.is_zipfile(script):  # noqa: PTH112 (a script's name is a string everywhere here)
        return True
    try:
        with Path(script).open("rb") as file:
            return file.read(4) == importlib.util.MAGIC_NUMBER
    except OSError:
        return False


def _read(script: str) -> bytes:
    """Return the script's source; end as Python does when there is none."""
    try:
        return Path(script).read_bytes()
    except OSError as error:
        _report(error)
        _complain(f"{sys.executable}: can't open file {os.fspath(Path(script).absolute())!r}: [Errno {error.errno}] {error.strerror}")


def _complain(text: str) -> NoReturn:
    print(text, file=sys.stderr)  # noqa: T201 (the worker's own output)
    sys.exit(2)


def _as_main(argv: list[str], script: str) -> ModuleType:
    """Make an empty ``__main__`` for *script* (its whole path), and tell Python that it was started for it."""
    main = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__.update(__file__=script, __builtins__=builtins, __loader__=loader, __spec__=None, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv, sys.orig_argv = argv, [sys.executable, *argv]
    folder = os.path.dirname(os.path.realpath(script))  # noqa: PTH120 (a string, as Python puts there)
    if not sys.flags.safe_path and sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109 (as above)
    return main


def _hide_our_frames() -> None:
    """Have an exception printed from the script's first line on, by whatever hook the script has left."""
    print_it = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not _run.__code__:
            trace = trace.tb_next
        trace = trace.tb_next if trace is not None else None
        print_it(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _report(error: BaseException) -> None:
    """Tell the agent what left the script, before the process ends."""
    with suppress(Exception):  # what the script has left of its environment must not hide what ended it
        from holdfast.runtime.agent_client import link  # noqa: PLC0415 (only a failing worker needs it)

        link().exception(error)
