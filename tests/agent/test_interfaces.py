"""What goes from one node to another is measured by who knows the token, whoever else connects."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

import pytest

from holdfast.agent.node.interfaces import BLOCK, bandwidth_to, check_connection, listen_for_measurement
from holdfast.security.authenticated_listener import MAX_PENDING

HOST = "127.0.0.1"


def test_unauthenticated_clients_are_disconnected_and_the_measurement_goes_on() -> None:
    """One that connects and goes, one that says something else, and one with a wrong token of the right length."""
    door = listen_for_measurement()
    assert check_connection(HOST, door["port"], 5.0) == {"why": ""}
    for knock in (b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n", b"0" * len(door["token"])):
        with socket.create_connection((HOST, door["port"])) as stranger:
            stranger.settimeout(20)
            stranger.sendall(knock)
            with suppress(ConnectionResetError):  # where more was sent than read
                assert stranger.recv(1) == b""
    measured = bandwidth_to(HOST, door["port"], door["token"], 0.05)
    assert measured["bytes"] >= BLOCK


def test_slow_unauthenticated_clients_delay_no_measurement() -> None:
    """More than are borne with at once: silent ones, and one with a byte now and then."""
    door = listen_for_measurement()
    with ExitStack() as strangers:
        for _ in range(2 * MAX_PENDING):
            strangers.enter_context(socket.create_connection((HOST, door["port"]), timeout=20))
        trickle = strangers.enter_context(socket.create_connection((HOST, door["port"]), timeout=20))
        over = threading.Event()
        thread = threading.Thread(target=_trickled, args=(trickle, over))
        thread.start()
        strangers.callback(thread.join)
        strangers.callback(over.set)
        measured = bandwidth_to(HOST, door["port"], door["token"], 0.05)
    assert measured["bytes"] >= BLOCK


def _trickled(line: socket.socket, over: threading.Event) -> None:
    with suppress(OSError):
        while not over.wait(0.2):
            line.sendall(b"0")


def test_a_client_without_the_token_gets_nothing() -> None:
    """The way counts as closed."""
    door = listen_for_measurement()
    with pytest.raises(OSError, match=r"\w"):
        bandwidth_to(HOST, door["port"], "0" * len(door["token"]), 0.05)


def test_a_node_is_measured_by_its_address_of_either_kind() -> None:
    """The port is open for both."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    door = listen_for_measurement()
    assert bandwidth_to("::1", door["port"], door["token"], 0.05)["bytes"] > 0
