"""The successor of a hot spare: a process without any line of the script in it, for when the script must run again for the given rank.

Libraries remember which rank they are in (Accelerate's `PartialState`, a logger's prefix, a file's name), and nobody knows them all. So the
hot spare forks another process before the script's first line. That one waits, and while the hot spare is offloaded it imports what the
script has imported from installed packages, except modules that read their rank on import. Standard library only, so that the fork server
can use it without torch.
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

from holdfast.host.process import die_with_parent
from holdfast.protocol import LineBuffer, Message, encode

IDENTITY: Final = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"})
"""Environment variables by which a process knows its rank."""

_connection: socket.socket | None = None
_pid = 0
_rank_readers: set[str] = set()
"""Modules during whose import the rank was read."""
_imported: list[str] = []
"""What the script had imported before its groups were made."""


class _WatchedEnviron(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001 (the class of `os.environ`)
    """An environment that records which modules read the rank while they are imported."""

    def __getitem__(self, name: str) -> str:
        if name in IDENTITY:
            frame = sys._getframe(1)  # noqa: SLF001 (the interpreter's own)
            while frame is not None:  # each module that is being imported now leads to this read
                if frame.f_code.co_name == "<module>":
                    _rank_readers.add(str(frame.f_globals.get("__name__")))
                frame = frame.f_back  # type: ignore[assignment]
        return super().__getitem__(name)  # type: ignore[no-any-return]


# -- in the hot spare -----------------------------------------------------------------------------------------------------


def fork(agent: int) -> Message | None:
    """Fork the successor. Return None in the hot spare; in the successor, once it is to continue, the message ``go``."""
    global _connection, _pid
    hot_spare, (ours, theirs) = os.getpid(), socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if not pid:
        ours.close()
        return _wait(theirs, hot_spare, agent)
    theirs.close()
    ours.set_inheritable(False)
    _connection, _pid = ours, pid
    os.environ.__class__ = _WatchedEnviron
    return None


def record_imports() -> None:
    """Record what the script has imported so far: later imports may depend on the groups that are made now."""
    if _connection is not None and not _imported:
        _imported.extend(sys.modules)


def send_imports() -> None:
    """Have the successor import what the script has imported from installed packages, except modules that read the rank."""
    if _connection is not None:
        folders = tuple(f"{sysconfig.get_path(one)}{os.sep}" for one in ("purelib", "platlib", "stdlib"))
        modules = [name for name in _imported if str(getattr(sys.modules.get(name), "__file__", None)).startswith(folders)]
        with suppress(OSError):
            _connection.sendall(encode({"do": "import", "modules": modules, "not": sorted(_rank_readers)}))


def ready() -> int | None:
    """Have the successor outlive this process; return its pid, or None where it has exited."""
    if _connection is None:
        return None
    with suppress(OSError):
        _connection.sendall(encode({"do": "ready"}))
        while answer := _connection.recv(1):
            if answer == b"r":
                return _pid
    return None


def go(environment: Mapping[str, str], commands: Sequence[Message]) -> None:
    """Have the successor run the script, with this process's output; the caller then exits."""
    assert _connection is not None
    line = encode({"do": "go", "environment": dict(environment), "commands": list(commands)})
    socket.send_fds(_connection, [line[:1]], [1, 2])
    _connection.sendall(line[1:])


# -- in the successor ---------------------------------------------------------------------------------------------------


class _ReadsRank(BaseException):
    """A module is to be imported that reads the rank: only `_import` may catch this."""


class _ForbiddenModules:
    """An import finder that raises for modules that the successor must not import."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names, self.met = frozenset(names), 0

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Find nothing, or raise."""
        if name in self.names:
            self.met += 1
            raise _ReadsRank(name)


def _wait(connection: socket.socket, hot_spare: int, agent: int) -> Message:
    """Serve the hot spare's requests until the message ``go``, and return it; exit with the hot spare before that."""
    die_with_parent(hot_spare)
    os.setsid()
    for name in IDENTITY:
        os.environ.pop(name, None)
    lines, files = LineBuffer(), list[int]()
    while True:
        data, found, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        files += found
        if not data:
            os._exit(0)
        for message in lines.feed(data):
            if message["do"] == "import":
                _import(message["modules"], message["not"])
            elif message["do"] == "ready":
                die_with_parent(hot_spare, 0)  # the hot spare exits before this process continues
                connection.sendall(b"r")
            else:
                _replace(hot_spare, agent, files)
                connection.close()
                return message


def _import(names: Sequence[str], forbidden: Sequence[str]) -> None:
    """Import modules ahead; one that fails is left to the script."""
    finder: Any = _ForbiddenModules(forbidden)
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
            os._exit(0)  # a module continued without one that it wanted: in the script it would be another
    sys.meta_path.remove(finder)
    os.environ.__class__ = os._Environ  # noqa: SLF001 (as above)
    if _rank_readers:
        os._exit(0)  # a module that read the rank just now found none


def _replace(hot_spare: int, agent: int, files: Sequence[int]) -> None:
    """Become the agent's own child, with the hot spare's output."""
    while os.getppid() == hot_spare:
        time.sleep(0.0005)
    die_with_parent(agent)
    for target, file in zip((1, 2), files, strict=True):
        os.dup2(file, target)
        os.close(file)
