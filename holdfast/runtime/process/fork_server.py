"""The fork server: an interpreter that has imported what a training script needs, and forks a worker from itself on request.

It never runs a thread, an operator or a CUDA call before it forks, so a fork of it is as good as a fresh interpreter (torch starts its
threads with the first operator, CUDA its context with the first call).
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
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from holdfast.host.process import die_with_parent, survive_sigterm
from holdfast.protocol import LineBuffer, Message, encode
from holdfast.runtime.peer_errors import STARTING
from holdfast.runtime.process import launcher, restart_script, successor
from holdfast.runtime.process.exit import set_status
from holdfast.runtime.process.restart_script import RestartScript

USUAL_IMPORTS: Final = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # comes with the first use of an optimizer
    "holdfast.runtime.session",
)
"""What a training script imports sooner or later."""


def main() -> None:
    """Serve requests until the agent exits; in a fork, become the worker."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    begin = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    survive_sigterm()
    gc.disable()  # collections take a fifth of the time of imports, and find next to nothing
    done = _preload(sys.argv[2:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or every fork would print what is buffered
    gc.collect()
    gc.freeze()  # imported objects stay: collections in workers skip them, and their memory stays shared
    gc.enable()
    channel.sendall(encode({"ready": True, "preloaded": done, "seconds": time.monotonic() - begin}))
    worker = _serve(channel)
    if worker is None:
        set_status(None)
    else:
        worker()


_NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has `torch.cuda.is_available` ask NVML: asking CUDA would leave forks of this process without it."""


def _preload(modules: list[str]) -> list[str]:
    """Import *modules* and return those that could be; one that fails is left to the script.

    Exit with a message when one of them has used CUDA: no fork of this process could use a GPU.
    """
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    done = []
    for name in modules:
        done += _import(name)
        _refuse_cuda(name)
    del os.environ[_NVML_CHECK]
    if before is not None:
        os.environ[_NVML_CHECK] = before
    return done


def _refuse_cuda(what: str) -> None:
    """Exit if CUDA was used in this process, so that no fork of it can use a GPU; *what* has run since the last look."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch, "cuda", None) is None:
        return
    if torch.cuda.is_initialized() or (_forks_lack_cuda(torch) and torch._C._cuda_getDeviceCount()):  # noqa: SLF001 (no public function tells)
        sys.exit(
            f"the import of {what} initialised CUDA, which no process that is forked from this one could use: move its CUDA calls into "
            "functions, or take it out of `preload` in the job file"
        )


def _forks_lack_cuda(torch: ModuleType) -> bool:
    """Return whether torch refuses CUDA in a fork of this process: counting the GPUs is enough for that, and only a fork can tell.

    The count itself must be asked afterwards: without a GPU it makes no difference.
    """
    if not hasattr(torch._C, "_cuda_isInBadFork"):  # noqa: SLF001 (as above)
        return False  # built without CUDA
    fork = os.fork()
    if not fork:
        os._exit(int(torch._C._cuda_isInBadFork()))  # noqa: SLF001 (as above)
    return bool(os.waitpid(fork, 0)[1])


def _import(name: str) -> list[str]:
    """Return *name* if it could be imported."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a foreign package may raise anything, and the script may not need it)
        print(f"{name} is not preloaded: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 (our log)
        return []
    return [name]


# -- forking ----------------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> Callable[[], None] | None:
    """Fork a worker for each request. Return in the fork with what it has to run, in the server when the agent has exited."""
    lines = LineBuffer()
    while data := channel.recv(1 << 20):
        for request in lines.feed(data):
            worker = _fork(channel, request)
            if worker is not None:
                return worker
    return None


def _fork(channel: socket.socket, request: Message) -> Callable[[], None] | None:
    """Fork twice, so that the worker becomes a child of the agent (its subreaper) and the agent notices its exit at once."""
    begin = time.time()
    try:
        middle = os.fork()
    except OSError as error:
        _answer(channel, request, error=str(error), errno=error.errno)
        return None
    if middle:
        _, status = os.waitpid(middle, 0)
        if status:
            _answer(channel, request, error="the process that was to start it was killed")
        return None
    return _fork_worker(channel, request, begin)


def _fork_worker(channel: socket.socket, request: Message, begin: float) -> Callable[[], None]:
    """Send the agent the worker's pid before the worker continues: the agent knows every worker that runs."""
    middle = os.getpid()
    announced, announce = os.pipe()
    try:
        worker = os.fork()
    except OSError as error:
        _answer(channel, request, error=str(error), errno=error.errno)
        os._exit(0)
    if worker:
        with suppress(OSError):  # the agent has exited: so will the worker, when its pipe closes
            _answer(channel, request, pid=worker)
            os.write(announce, b".")
        os._exit(0)
    channel.close()
    os.close(announce)
    if not os.read(announced, 1):
        os._exit(1)
    os.close(announced)
    return lambda: _become_worker(request, middle, begin)


def _answer(channel: socket.socket, request: Message, **facts: object) -> None:
    channel.sendall(encode({"rank": request["rank"], **facts}))


def _become_worker(request: Message, middle: int, begin: float) -> None:
    """Turn this fork into the worker that *request* describes, and run its script as ``__main__``."""
    while os.getppid() == middle:  # until it has exited and the agent is our parent
        time.sleep(0.0002)
    die_with_parent(request["agent"])
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ["HOLDFAST_STARTED"] = repr(begin)
    os.chdir(request["directory"])
    if "HOLDFAST_HOT_SPARE" in os.environ and (message := successor.fork(request["agent"])) is not None:
        os.environ.clear()  # this is the successor, as the rank that the hot spare was given
        os.environ.update(message["environment"])
        for command in message["commands"]:
            restart_script.store(command)
    launcher.name_process(request["argv"])
    _reseed()
    _run(list(request["argv"]))


def _reseed() -> None:
    """Give this fork random streams of its own, as a fresh interpreter has."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


# -- running the script -----------------------------------------------------------------------------------------------


def run_cold(argv: list[str]) -> None:
    """Run the script in this interpreter, which was started for it alone, as a fork would."""
    os.environ["HOLDFAST_STARTED"] = repr(time.time())
    launcher.name_process(argv)
    _run(argv)


def _run(argv: list[str]) -> None:
    """Run the script as ``python script.py`` would, or ``-m module``: same ``__main__``, same ``sys.path[0]``, same exit status."""
    run = _module(argv) if argv[0] == "-m" else _script(argv)
    launcher.replace_init_process_group()
    while True:
        try:
            run()
        except RestartScript as restart:
            _restart(restart)
        except BaseException as error:
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                _report(error)
            _hide_our_frames()
            set_status(error)
            raise  # the interpreter does what it does for any script: print, run exit handlers, exit with the right status
        else:
            set_status(None)
            return


def _script(argv: list[str]) -> Callable[[], None]:
    """Return what runs the script *argv*[0] once."""
    script = str(Path(argv[0]).absolute())  # as Python does: neither links nor dots are resolved
    if _is_program(script):
        if os.environ.get("HOLDFAST_GROUPS") == "managed":
            why = "is a folder, an archive or bytecode, for which Holdfast cannot replace `init_process_group`"
            sys.exit(f"the job says `groups: managed`, but {script} {why}. Run it as a module (`-m`), or use `groups: auto`")
        os.execv(sys.executable, [sys.executable, *argv])  # noqa: S606 (a folder, an archive or bytecode: for an interpreter of its own)
    source, folder = _read(script), os.path.dirname(os.path.realpath(script))  # noqa: PTH120 (a string, as Python puts it into its path)
    compiled: list[CodeType] = []

    def run() -> None:
        main = _as_main(list(argv), argv, folder)
        loader = importlib.machinery.SourceFileLoader("__main__", script)
        main.__dict__.update(__file__=script, __loader__=loader, __spec__=None, __cached__=None, __annotations__={})
        if not compiled:  # once: torch.compile caches by the function's code object
            compiled.append(compile(source, script, "exec", dont_inherit=True))  # our own `from __future__` is not the script's
        exec(compiled[0], main.__dict__)  # noqa: S102 (running the user's script is what this is for)

    return run


def _module(argv: list[str]) -> Callable[[], None]:
    """Return what runs the module of *argv*, ``-m`` and its name, once."""
    _, name, *arguments = argv
    found: list[tuple[Any, CodeType]] = []

    def run() -> None:
        main = _as_main(["-m", *arguments], argv, os.getcwd())  # noqa: PTH109 (as Python puts it into its path)
        if not found:
            found.append(launcher.find_module(name))
        launcher.run_module(*found[0], main)

    return run


def _restart(restart: RestartScript) -> None:
    """Prepare another run of the script by a hot spare: here in another role, or in its successor as the rank it was given."""
    from holdfast.runtime.process import hot_spare  # noqa: PLC0415 (this process has imported torch)

    restart.__traceback__ = None  # it holds the frames of the run that is over, and with them its model
    if "HOLDFAST_FRESH" in restart.environment:
        hot_spare.leave_to_successor(restart.environment)
    hot_spare.start_over(restart.environment)


def _is_program(script: str) -> bool:
    if os.path.isdir(script) or zipfile.is_zipfile(script):  # noqa: PTH112 (a script's name is a string everywhere here)
        return True
    try:
        with Path(script).open("rb") as file:
            return file.read(4) == importlib.util.MAGIC_NUMBER
    except OSError:
        return False


def _read(script: str) -> bytes:
    """Return the script's source; exit as Python does when it cannot be read."""
    try:
        return Path(script).read_bytes()
    except OSError as error:
        _report(error.with_traceback(None))  # its frames are ours, and the script has none yet
        problem = f"can't open file {os.fspath(Path(script).absolute())!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {problem}", file=sys.stderr)  # noqa: T201 (the worker's own output)
        sys.exit(2)


def _as_main(argv: list[str], original: list[str], folder: str) -> ModuleType:
    """Make an empty ``__main__``, and let Python appear started with the arguments *original*, and *folder* first in its path."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv, sys.orig_argv = argv, [sys.executable, *original]
    if not sys.flags.safe_path and sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109 (as above)
    return main


def _hide_our_frames() -> None:
    """Have exceptions printed from the script's first line on, by whatever hook the script has left."""
    print_it = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not _run.__code__:
            trace = trace.tb_next
        while trace is not None and trace.tb_frame.f_globals.get("__name__") in STARTING:
            trace = trace.tb_next
        print_it(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _report(error: BaseException) -> None:
    """Send the agent the exception that left the script, before the process exits."""
    with suppress(Exception):  # what the script has left of its environment must not hide what ended it
        from holdfast.runtime.agent_client import link  # noqa: PLC0415 (only a failing worker needs it)

        link().exception(error)
