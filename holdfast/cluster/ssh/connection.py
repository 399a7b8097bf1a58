"""An authenticated connection to a machine, directly or through another one."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import paramiko
from paramiko import PKey, Transport

from holdfast.cluster.ssh.certificates import SUFFIX
from holdfast.cluster.ssh.credentials import Keys, log_in
from holdfast.cluster.ssh.endpoints import Endpoint
from holdfast.cluster.ssh.errors import of_channel, of_handshake, of_socket
from holdfast.cluster.ssh.known_hosts import KnownHosts
from holdfast.cluster.ssh.watchdog import Watchdog, in_time
from holdfast.probe.remote.errors import NoAnswer, NodeUnreachable, ProbeFailed

LAZY: Final = 3600.0
"""Seconds between two idle rounds of a connection's thread. paramiko has it wake ten times a second, to see whether it is to end: that
is 3 % of a core for a hundred idle connections. Ours are ended by shutting their socket, which wakes it."""
KEEP_IDLE, KEEP_EVERY, KEEP_COUNT = 20, 5, 3
"""Seconds of silence, seconds between probes, and probes without an answer after which the kernel gives an idle connection up."""


LOG: Final = "holdfast.cluster.ssh.paramiko"
logging.getLogger(LOG).setLevel(logging.CRITICAL)  # what it has to say comes as exceptions too


@dataclass(slots=True)
class Connection:
    """A way to a machine on which commands can be run, and other machines be reached."""

    endpoint: Endpoint
    transport: Transport
    sock: socket.socket | paramiko.Channel

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be used, as far as is known."""
        return self.transport.is_active()

    def cut(self) -> None:
        """End it at once. Whoever waits on it is woken."""
        cut(self.sock)
        self.transport.close()


def cut(sock: socket.socket | paramiko.Channel) -> None:
    """Wake whoever waits for *sock*, and let it end."""
    with suppress(OSError, EOFError):
        if isinstance(sock, socket.socket):
            sock.shutdown(socket.SHUT_RDWR)  # closing alone would leave its reader waiting
        else:
            sock.close()


class Opener:
    """Opens connections with what the user trusts and has."""

    def __init__(self, known: KnownHosts, keys: Keys, watchdog: Watchdog) -> None:
        self._known, self._keys, self._watchdog = known, keys, watchdog

    def open(self, endpoint: Endpoint, until: float, *, via: Connection | None = None, then: float | None = None) -> Connection:
        """Return a connection to *endpoint* by *until* (monotonic); raise `NodeUnreachable` or `ProbeFailed`.

        With *then* the machine has until *until* to take a connection, which its kernel does, and until *then* to let us in.
        """
        sock = _direct(endpoint, until) if via is None else _through(via, endpoint, until)
        until = until if then is None else then
        try:
            with self._watchdog.over(until, lambda: cut(sock)):
                return self._shake_hands(endpoint, sock, until)
        except BaseException:
            cut(sock)
            if isinstance(sock, socket.socket):
                sock.close()
            raise

    def key_of(self, endpoint: Endpoint, until: float, *, via: Connection | None = None) -> PKey:
        """Return the key that *endpoint* shows, trusted or not; nobody logs in. Raise `NodeUnreachable` or `ProbeFailed`."""
        sock = _direct(endpoint, until) if via is None else _through(via, endpoint, until)
        try:
            with self._watchdog.over(until, lambda: cut(sock)):
                transport = self._greeted(endpoint, sock, until)
                key = transport.get_remote_server_key()
                _end(transport)
                return key
        finally:
            cut(sock)
            if isinstance(sock, socket.socket):
                sock.close()

    def _shake_hands(self, endpoint: Endpoint, sock: socket.socket | paramiko.Channel, until: float) -> Connection:
        transport = self._greeted(endpoint, sock, until)
        try:
            self._known.check(endpoint.known_as, transport.get_remote_server_key())
            with closing(self._keys.of(endpoint.key, endpoint.passphrase)) as keys:
                log_in(transport, endpoint.user, keys, str(endpoint))
        except (paramiko.SSHException, EOFError, OSError) as error:
            _end(transport)
            raise of_handshake(error, str(endpoint)) from error
        except NoAnswer:
            _end(transport)
            raise
        sock.settimeout(LAZY)
        return Connection(endpoint, transport, sock)

    def _greeted(self, endpoint: Endpoint, sock: socket.socket | paramiko.Channel, until: float) -> Transport:
        """Return an encrypted way to whoever shows the key that it has."""
        transport = None
        try:
            transport = Transport(sock)
            transport.set_log_channel(LOG)
            left = max(0.01, until - time.monotonic())
            transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = left
            _ask_for_known_keys(transport, self._known.types_of(endpoint.known_as), vouched=self._known.has_authority(endpoint.known_as))
            transport.start_client(timeout=left)
            if not transport.initial_kex_done:
                raise EOFError  # noqa: TRY301 (as paramiko does where it notices by itself)
        except (paramiko.SSHException, EOFError, OSError) as error:
            _end(transport)
            raise of_handshake(error, str(endpoint)) from error
        return transport


def _end(transport: Transport | None) -> None:
    if transport is not None:
        cut(transport.sock)
        transport.close()


def _ask_for_known_keys(transport: Transport, types: list[str], *, vouched: bool) -> None:
    """Prefer certificates where somebody may vouch, then the types of keys that are known: of a server's several the files may hold one."""
    options = transport.get_security_options()
    certificates = [f"{kind}{SUFFIX}" for kind in options.key_types] if vouched else []
    wanted = [kind for name in types for kind in (("rsa-sha2-512", "rsa-sha2-256") if name == "ssh-rsa" else (name,))]
    known = [kind for kind in wanted if kind in options.key_types]
    options.key_types = tuple(dict.fromkeys([*certificates, *known, *options.key_types]))


def _direct(endpoint: Endpoint, until: float) -> socket.socket:
    """Return a connected socket: the first of the machine's addresses that takes a connection."""
    try:
        left = until - time.monotonic()
        found = in_time(left, lambda: socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM))
    except TimeoutError:
        raise ProbeFailed(f"no name server said in time where {endpoint.address} is. Mend /etc/resolv.conf, or write its address") from None
    except OSError as error:
        raise of_socket(error, endpoint.address) from error
    except UnicodeError as error:
        raise ProbeFailed(f"the name {endpoint.address} cannot be asked for: {error}. Mend the address") from error
    trouble: OSError = TimeoutError()
    for number, (family, kind, protocol, _name, address) in enumerate(found):
        try:
            return _connected(socket.socket(family, kind, protocol), address, (until - time.monotonic()) / (len(found) - number))
        except OSError as error:
            trouble = error
    raise of_socket(trouble, str(endpoint)) from trouble


def _connected(sock: socket.socket, address: object, seconds: float) -> socket.socket:
    try:
        sock.settimeout(max(0.01, seconds))
        sock.connect(address)  # type: ignore[arg-type]  # what getaddrinfo found
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each question waits 40 ms for the answer to the packet before
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ((socket.TCP_KEEPIDLE, KEEP_IDLE), (socket.TCP_KEEPINTVL, KEEP_EVERY), (socket.TCP_KEEPCNT, KEEP_COUNT)):
            sock.setsockopt(socket.IPPROTO_TCP, name, value)
    except BaseException:
        sock.close()
        raise
    return sock


def _through(via: Connection, endpoint: Endpoint, until: float) -> paramiko.Channel:
    """Return a channel through a jump host."""
    left = max(0.01, until - time.monotonic())
    try:
        return via.transport.open_channel("direct-tcpip", (endpoint.address, endpoint.port), ("127.0.0.1", 0), timeout=left)
    except paramiko.ChannelException as error:
        raise of_channel(error, str(endpoint), str(via.endpoint)) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if via.is_alive:
            raise NodeUnreachable(f"{endpoint}, through {via.endpoint}: {error}") from error
        raise ProbeFailed(f"the connection to jump host {via.endpoint} broke: {error}") from error
