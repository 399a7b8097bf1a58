"""Who takes a standby's place when the script must run again for the rank that it was given: a process in which no line of it has run.

Libraries keep which rank they are in (Accelerate's `PartialState`, a logger's prefix, a file's name), and nobody knows them all. So the
standby forks another process of itself before the script's first line. That one waits, and imports what the script has imported from
installed packages while the standby is parked, but for what asks for its rank when it is imported. Standard library only, so that the
starter of a worker can use it without torch.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from holdfast.process import die_with_parent
from holdfast.protocol import LineBuffer, Message, encode

IDENTITY: Final = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"})
"""Variables by which a process knows which rank it is."""

_line: socket.socket | None = None
_pid = 0
_asking: set[str] = set()
"""Modules during whose import somebody asked for the rank."""
_imported: list[str] = []
"""What the script had imported before its groups were made."""


class _WatchedEnviron(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001 (what `os.environ` is)
    """The environment, which sees who asks for the rank while modules are imported."""

    def __getitem__(self, name: str) -> str:
        if name in IDENTITY:
            _note_modules()
        return super().__getitem__(name)  # type: ignore[no-any-return]


def _note_modules() -> None:
    """Note every module that is being imported now: each leads to the question."""
    frame = sys._getframe(1)  # noqa: SLF001 (the interpreter's own)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            _asking.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back  # type: ignore[assignment]


# -- the standby's side -----------------------------------------------------------------------------------------------


def fork(agent: int) -> Message | None:
    """Fork the successor. Return nothing in the standby; in the successor, once it is to go on, what with."""
    global _line, _pid
    standby, (ours, theirs) = os.getpid(), socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if not pid:
        ours.close()
        return _stand_by(theirs, standby, agent)
    theirs.close()
    ours.set_inheritable(False)
    _line, _pid = ours, pid
    os.environ.__class__ = _WatchedEnviron
    return None


def record_imports() -> None:
    """Note what the script has imported so far: what comes later may depend on the groups that are made now."""
    if _line is not None and not _imported:
        _imported.extend(sys.modules)


def send_imports() -> None:
    """Have the successor import what the script has imported from installed packages and what does not ask for its rank."""
    if _line is not None:
        with suppress(OSError):
            _line.sendall(encode({"do": "import", "modules": [name for name in _imported if _is_installed(name)], "not": sorted(_asking)}))


def _is_installed(name: str) -> bool:
    """Tell whether a module is of an installed package, and no file of the script's own."""
    file, home = getattr(sys.modules.get(name), "__file__", None), {sysconfig.get_path(one) for one in ("purelib", "platlib", "stdlib")}
    return bool(file) and any(str(file).startswith(f"{folder}{os.sep}") for folder in home)


def ready() -> int | None:
    """Have the successor outlive this process; return its pid, or nothing where it is no more."""
    if _line is None:
        return None
    with suppress(OSError):
        _line.sendall(encode({"do": "ready"}))
        while answer := _line.recv(1):
            if answer == b"r":
                return _pid
    return None


def go(environment: Mapping[str, str], orders: Sequence[Message]) -> None:
    """Have the successor run the script, with this process's output; whoever calls this ends."""
    assert _line is not None
    told = encode({"do": "go", "environment": dict(environment), "orders": list(orders)})
    socket.send_fds(_line, [told[:1]], [1, 2])
    _line.sendall(told[1:])


# -- the successor's side ---------------------------------------------------------------------------------------------


class _Asks(BaseException):
    """A module is to be imported that asks for the rank: nothing may stop this but who began."""


class _Closed:
    """Finds no module that is closed to the successor."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names, self.met = frozenset(names), 0

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Find nothing, or raise."""
        if name in self.names:
            self.met += 1
            raise _Asks(name)


def _stand_by(line: socket.socket, standby: int, agent: int) -> Message:
    """Wait for what the standby says, and return what to go on with; end with the standby when there is nothing to go on with."""
    die_with_parent(standby)
    os.setsid()
    for name in IDENTITY:
        os.environ.pop(name, None)
    lines, files = LineBuffer(), list[int]()
    while True:
        data, found, _, _ = socket.recv_fds(line, 1 << 20, 2)
        files += found
        if not data:
            os._exit(0)
        for message in lines.feed(data):
            if message["do"] == "import":
                _import(message["modules"], message["not"])
            elif message["do"] == "ready":
                die_with_parent(standby, 0)  # the standby ends before this process goes on
                line.sendall(b"r")
            else:
                _take_over(standby, agent, files)
                line.close()
                return message


def _import(names: Sequence[str], closed: Sequence[str]) -> None:
    """Import modules ahead; one that cannot be is left to the script."""
    finder: Any = _Closed(closed)
    os.environ.__class__ = _WatchedEnviron
    sys.meta_path.insert(0, finder)
    for name in names:
        if name in sys.modules or name in finder.names:
            continue
        before = finder.met
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001, S112 (a foreign module may raise anything, and the script will meet it again)
            continue
        if finder.met > before:
            os._exit(0)  # somebody went on without a module that it wanted: what it is now it would not be in the script
    sys.meta_path.remove(finder)
    os.environ.__class__ = os._Environ  # noqa: SLF001 (as above)
    if _asking:
        os._exit(0)  # what asked for a rank then, got the answer that there is none


def _take_over(standby: int, agent: int, files: Sequence[int]) -> None:
    """Become the agent's own child, with the standby's output."""
    while os.getppid() == standby:
        time.sleep(0.0005)
    die_with_parent(agent)
    for target, file in zip((1, 2), files, strict=True):
        os.dup2(file, target)
        os.close(file)
