"""What goes from one node to another is measured by who was told the token, whoever else knocks."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from holdfast.agent.interfaces import bandwidth_to, listening, meet

HOST = "127.0.0.1"


def test_strangers_are_sent_away_and_the_measurement_goes_on() -> None:
    """One that connects and goes, one that says something else, and one with a wrong token of the right length."""
    door = listening()
    assert meet(HOST, door["port"], 5.0) == {"why": ""}
    for knock in (b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n", b"0" * len(door["token"])):
        with socket.create_connection((HOST, door["port"])) as stranger:
            stranger.settimeout(20)
            stranger.sendall(knock)
            with suppress(ConnectionResetError):  # where more was said than heard
                assert stranger.recv(1) == b""
    told = bandwidth_to(HOST, door["port"], door["token"], 0.05)
    assert told["bytes"] > 1 << 20


def test_who_shows_no_token_learns_nothing() -> None:
    """The way counts as closed."""
    door = listening()
    with pytest.raises(OSError, match=r"\w"):
        bandwidth_to(HOST, door["port"], "0" * len(door["token"]), 0.05)


def test_a_node_is_measured_by_its_address_of_either_kind() -> None:
    """The port is open for both."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    door = listening()
    assert bandwidth_to("::1", door["port"], door["token"], 0.05)["bytes"] > 0
