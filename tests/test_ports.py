"""Who listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from holdfast.ports import free_port, is_free, listens

HOLDS = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('there', flush=True); sys.stdin.read()"


def test_who_listens_on_a_port_is_told_from_who_only_wanted_to() -> None:
    """Another process may have taken the port that was free a moment ago, and answers there."""
    port = free_port()
    assert is_free(port)
    assert not listens(os.getpid(), port)
    command = [sys.executable, "-c", HOLDS, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"there\n"
        with socket.create_connection(("127.0.0.1", port)):
            assert listens(other.pid, port)
            assert not listens(os.getpid(), port), "a connection to it is no listening"
        assert not is_free(port)
        other.communicate()
    assert not listens(other.pid, port)
