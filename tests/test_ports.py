"""Who listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from holdfast.host.ports import free_port, is_free, listens
from holdfast.security.authenticated_listener import open_port

HOLDS = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('there', flush=True); sys.stdin.read()"


def test_a_process_that_listens_on_a_port_differs_from_one_that_failed_to() -> None:
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


@pytest.mark.long
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_port_is_free_when_no_process_has_it_by_either_family() -> None:
    """Whoever listens later does so for both."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as other:
            assert not is_free(other.getsockname()[1])
    with open_port() as server:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, server.getsockname()[1]), timeout=60).close()
