"""Programs of the tests that need what takes seconds to import: one process imports it, once for a whole run, and forks them from itself.

python -m tests.imported SOCKET MODULE...: for each connection, a fork runs the `main` of a module, with the connection as its standard
input and output. Nothing that is imported here may start a thread or run an operator, so a fork is as good as a fresh interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.shared import ROOT, shared_server

START_SECONDS: Final = 120.0
"""For the imports, on a busy machine."""


class Program:
    """A forked program that answers each order, a line of JSON, with another; it ends when it is closed, or this process ends."""

    def __init__(self, server: Path, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        """Have the server at the socket *server* run *module* with *arguments* and *environment*, and nothing else of ours."""
        self._module, self._lock, self._socket = module, threading.Lock(), socket.socket(socket.AF_UNIX)
        self._socket.connect(str(server))
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self.say({"module": module, "arguments": arguments, "environment": dict(environment)})

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to *order*; threads may take turns."""
        with self._lock:
            self.say(order)
            return self.answer()

    def say(self, order: Mapping[str, Any]) -> None:
        """Send *order*."""
        self._lines.write(json.dumps(order) + "\n")
        self._lines.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        line = self._lines.readline()
        assert line, f"{self._module} ended; its errors are in the log of the server that forked it"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end, and wait until it has."""
        self._socket.shutdown(socket.SHUT_WR)
        self._lines.read()
        self._lines.close()
        self._socket.close()


@contextmanager
def imported(place: Path, environment: Mapping[str, str], *modules: str) -> Iterator[Path]:
    """Give the socket of a process that has *modules* imported, with its files in *place*; all who name the same place share it."""
    place.mkdir(exist_ok=True)
    path = place / "s"
    command = [sys.executable, "-m", "tests.imported", str(path), *modules]
    with shared_server(place, command, {**environment, "PYTHONPATH": str(ROOT)}, lambda: answers(path), START_SECONDS):
        yield path


def answers(path: Path) -> bool:
    """Return whether a server takes connections at the socket *path*."""
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(str(path)) == 0


def main(path: Path, modules: list[str]) -> NoReturn:
    """Import *modules*, then fork a program for each connection."""
    gc.disable()  # collections take a fifth of the time of imports, and find next to nothing
    for name in modules:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lack the threads of what was imported"
    gc.collect()
    gc.freeze()  # collections in the forks are short, and their memory stays shared
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                if not os.fork():
                    listener.close()
                    become(connection)


def become(connection: socket.socket) -> NoReturn:
    """Run the program that *connection* asks for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    if not (line := sys.stdin.readline()):
        os._exit(0)  # of `answers`
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environment"])
    with redirect_stdout(sys.stderr):  # the connection is for answers alone, and some libraries print when they are imported
        for name in order["arguments"]:
            importlib.import_module(name)
    importlib.import_module(order["module"]).main()
    os._exit(0)  # the interpreter's own end takes all modules apart: that is half a second of work


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
