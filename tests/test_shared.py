"""A server that all workers of a run share: started once, started again when it dies, ended with its last user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from holdfast.host.ports import free_port
from tests.shared import ROOT, shared_server
from tests.waiting import wait_until

USER = """
import os, signal, sys
from pathlib import Path
from tests.shared import shared_server
place, ready = Path(sys.argv[1]), lambda: (Path(sys.argv[1]) / "up").exists()
with shared_server(place, ["sh", "-c", f"touch {place}/up; exec sleep 600"], dict(os.environ), ready, 60):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Server:
    """A small web server, and those that use it."""

    def __init__(self, place: Path) -> None:
        self.place, port = place, free_port()
        self.url = f"http://127.0.0.1:{port}/own"
        program = (
            "import http.server, os, pathlib\n"
            "pathlib.Path('own').write_text(str(os.getpid()))\n"
            f"http.server.ThreadingHTTPServer(('127.0.0.1', {port}), http.server.SimpleHTTPRequestHandler).serve_forever()"
        )
        self.command = ["sh", "-c", 'cd "$0" && exec "$@"', str(place), sys.executable, "-c", program]

    def pid(self) -> int:
        """Return the number of the server's process; 0 while none answers."""
        try:
            with urllib.request.urlopen(self.url, timeout=10) as answer:  # noqa: S310 (our own http address)
                return int(answer.read() or 0)
        except (urllib.error.URLError, OSError):
            return 0

    def used(self, command: list[str] | None = None) -> AbstractContextManager[None]:
        """Return one use."""
        return shared_server(self.place, command or self.command, dict(os.environ), lambda: bool(self.pid()), 60)


def test_the_last_user_ends_the_server_and_a_later_one_starts_it_again(tmp_path: Path) -> None:
    """Whoever comes first or goes first."""
    server = Server(tmp_path)
    with ExitStack() as stack:
        with server.used():
            first = server.pid()
            stack.enter_context(server.used())
            assert server.pid() == first
        assert server.pid() == first, "another one uses it"
    assert server.pid() == 0
    with server.used():
        assert server.pid() not in {0, first}
    assert server.pid() == 0


def test_a_server_that_died_is_started_again_for_those_who_use_it(tmp_path: Path) -> None:
    """Its log says that it died."""
    server = Server(tmp_path)
    with server.used():
        died = server.pid()
        os.kill(died, signal.SIGKILL)
        wait_until(lambda: server.pid() not in {0, died}, seconds=60)
        assert "status -9" in (tmp_path / "server.log").read_text()
    assert server.pid() == 0


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    """Not a wait for a server that is gone; the next user tries again."""
    server = Server(tmp_path)
    with (
        pytest.raises(AssertionError, match=r"does not start.*\n.*\n(.*\n)*no such port"),
        server.used(["sh", "-c", "echo no such port; exit 3"]),
    ):
        pass
    with server.used():
        assert server.pid()


def test_a_server_ends_when_its_last_user_is_killed(tmp_path: Path) -> None:
    """Nobody else would end it."""
    done = subprocess.run([sys.executable, "-c", USER, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "up").exists()
    wait_until(lambda: not named(tmp_path), seconds=60, explain=lambda: str(named(tmp_path)))
    assert not (tmp_path / "pid").exists()


def named(place: Path) -> list[str]:
    """Return the command lines of processes that name *place*."""
    found: Callable[[Path], str] = lambda one: one.read_bytes().replace(b"\0", b" ").decode(errors="replace")  # noqa: E731
    lines = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(found(one))
        except OSError:
            continue  # it has ended meanwhile
    return [line for line in lines if str(place) in line]
