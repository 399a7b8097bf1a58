"""Open authenticated SSH connections, directly or through another one, and say what their errors mean."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import paramiko
from paramiko import PKey, Transport

from holdfast.cluster.ssh.credentials import Keys, log_in
from holdfast.cluster.ssh.deadlines import cut_at, in_time
from holdfast.cluster.ssh.known_hosts import CERTIFICATE_SUFFIX, KnownHosts, name_in_file
from holdfast.probe.remote.program import NoAnswer, NodeUnreachable, ProbeFailed

IDLE_SECONDS: Final = 3600.0
"""Time between two wake-ups of an idle connection's thread. By default paramiko's wakes ten times a second to see whether it must end:
3 % of a core for a hundred idle connections. Ours are ended by shutting down their socket, which wakes it."""
KEEP_IDLE, KEEP_INTERVAL, KEEP_COUNT = 20, 5, 3
"""TCP keepalive: seconds of silence, seconds between probes, and unanswered probes after which the kernel ends an idle connection."""
LOG: Final = "holdfast.cluster.ssh.paramiko"
logging.getLogger(LOG).setLevel(logging.CRITICAL)  # paramiko raises what it logs
OUR_ERRORS: Final = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max",
    errno.ENOBUFS: "",
    errno.ENOMEM: "",
    errno.EADDRNOTAVAIL: "",
    errno.ENETUNREACH: "this machine has no route there: fix its network",
    errno.ENETDOWN: "fix this machine's network",
    errno.EACCES: "this machine's firewall or sandbox does not let it connect",
    errno.EPERM: "this machine's firewall or sandbox does not let it connect",
}
"""Errors of our own machine, which say nothing about a node, each with its cure."""
CONNECT_FAILED: Final = 2
"""SSH_OPEN_CONNECT_FAILED of RFC 4254, 5.1: the target accepts no connection. Any other reason is the jump host's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An SSH server to log in to."""

    address: str
    port: int
    user: str
    key: str | None
    passphrase: str | None = None
    """Where to read it from."""

    @property
    def known_as(self) -> str:
        """Return its name in known_hosts."""
        return name_in_file(self.address, self.port)

    def __str__(self) -> str:
        return f"{self.address} port {self.port}"


@dataclass(slots=True)
class Connection:
    """A connection on which commands run, and through which other machines are reached."""

    endpoint: Endpoint
    transport: Transport
    sock: socket.socket | paramiko.Channel

    @property
    def is_alive(self) -> bool:
        """Return whether it can be used, as far as is known."""
        return self.transport.is_active()

    def cut(self) -> None:
        """End it at once; blocked calls return."""
        _shut(self.sock)
        self.transport.close()


class Opener:
    """Opens connections with the host keys that the user trusts and the user's own keys."""

    def __init__(self, known: KnownHosts, keys: Keys) -> None:
        self._known, self._keys = known, keys

    def open(self, endpoint: Endpoint, until: float, *, via: Connection | None = None, then: float | None = None) -> Connection:
        """Return a connection to *endpoint* by *until* (monotonic); raise `NodeUnreachable` or `ProbeFailed`.

        With *then* the machine must accept a connection by *until*, which its kernel does, and complete the login by *then*.
        """
        sock = _direct(endpoint, until) if via is None else _through(via, endpoint, until)
        until = until if then is None else then
        try:
            with cut_at(until, lambda: _shut(sock)):
                transport = self._start_transport(endpoint, sock, until)
                try:
                    self._known.check(endpoint.known_as, transport.get_remote_server_key())
                    with closing(self._keys.of(endpoint.key, endpoint.passphrase)) as keys:
                        log_in(transport, endpoint.user, keys, str(endpoint))
                except (paramiko.SSHException, EOFError, OSError) as error:
                    _end(transport)
                    raise handshake_error(error, str(endpoint)) from error
                except NoAnswer:
                    _end(transport)
                    raise
        except BaseException:
            _shut(sock)
            if isinstance(sock, socket.socket):
                sock.close()
            raise
        sock.settimeout(IDLE_SECONDS)
        return Connection(endpoint, transport, sock)

    def key_of(self, endpoint: Endpoint, until: float, *, via: Connection | None = None) -> PKey:
        """Return the key that *endpoint* shows, trusted or not, without a login. Raise `NodeUnreachable` or `ProbeFailed`."""
        sock = _direct(endpoint, until) if via is None else _through(via, endpoint, until)
        try:
            with cut_at(until, lambda: _shut(sock)):
                transport = self._start_transport(endpoint, sock, until)
                key = transport.get_remote_server_key()
                _end(transport)
                return key
        finally:
            _shut(sock)
            if isinstance(sock, socket.socket):
                sock.close()

    def _start_transport(self, endpoint: Endpoint, sock: socket.socket | paramiko.Channel, until: float) -> Transport:
        """Return an encrypted transport; the server is not authenticated yet.

        Certificates are preferred where an authority may vouch for the server, then the types of keys that are known: of a server's
        several keys known_hosts may have one.
        """
        transport = None
        try:
            transport = Transport(sock)
            transport.set_log_channel(LOG)
            left = max(0.01, until - time.monotonic())
            transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = left
            options = transport.get_security_options()
            vouched, types = self._known.has_authority(endpoint.known_as), self._known.types_of(endpoint.known_as)
            certificates = [f"{kind}{CERTIFICATE_SUFFIX}" for kind in options.key_types] if vouched else []
            wanted = [kind for name in types for kind in (("rsa-sha2-512", "rsa-sha2-256") if name == "ssh-rsa" else (name,))]
            known = [kind for kind in wanted if kind in options.key_types]
            options.key_types = tuple(dict.fromkeys([*certificates, *known, *options.key_types]))
            transport.start_client(timeout=left)
            if not transport.initial_kex_done:
                raise EOFError  # noqa: TRY301 (paramiko raises it where it notices by itself)
        except (paramiko.SSHException, EOFError, OSError) as error:
            _end(transport)
            raise handshake_error(error, str(endpoint)) from error
        return transport


def _shut(sock: socket.socket | paramiko.Channel) -> None:
    """Wake every thread that waits for *sock*."""
    with suppress(OSError, EOFError):
        if isinstance(sock, socket.socket):
            sock.shutdown(socket.SHUT_RDWR)  # closing alone would leave its reader waiting
        else:
            sock.close()


def _end(transport: Transport | None) -> None:
    if transport is not None:
        _shut(transport.sock)
        transport.close()


def _direct(endpoint: Endpoint, until: float) -> socket.socket:
    """Return a connected socket: the first of the machine's addresses that accepts a connection."""
    try:
        left = until - time.monotonic()
        found = in_time(left, lambda: socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM))
    except TimeoutError:
        raise ProbeFailed(f"no name server resolved {endpoint.address} in time. Fix /etc/resolv.conf, or write its address") from None
    except OSError as error:
        raise socket_error(error, endpoint.address) from error
    except UnicodeError as error:
        raise ProbeFailed(f"the name {endpoint.address} cannot be looked up: {error}. Correct the address") from error
    problem: OSError = TimeoutError()
    for number, (family, kind, protocol, _name, address) in enumerate(found):
        try:
            return _connected(socket.socket(family, kind, protocol), address, (until - time.monotonic()) / (len(found) - number))
        except OSError as error:
            problem = error
    raise socket_error(problem, str(endpoint)) from problem


def _connected(sock: socket.socket, address: object, seconds: float) -> socket.socket:
    try:
        sock.settimeout(max(0.01, seconds))
        sock.connect(address)  # type: ignore[arg-type]  # what getaddrinfo found
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each request waits 40 ms for the acknowledgement before
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ((socket.TCP_KEEPIDLE, KEEP_IDLE), (socket.TCP_KEEPINTVL, KEEP_INTERVAL), (socket.TCP_KEEPCNT, KEEP_COUNT)):
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
        jump = str(via.endpoint)
        if error.code == CONNECT_FAILED:
            why = f"{endpoint}, through {jump}: it accepts no connection, or {jump} cannot resolve its name"
            raise NodeUnreachable(why) from error
        why = f"jump host {jump} forwards no connection to {endpoint}: {error.text or error}. Set `AllowTcpForwarding yes` there"
        raise ProbeFailed(why) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if via.is_alive:
            raise NodeUnreachable(f"{endpoint}, through {via.endpoint}: {error}") from error
        raise ProbeFailed(f"the connection to jump host {via.endpoint} broke: {error}") from error


def socket_error(error: OSError, where: str) -> NodeUnreachable | ProbeFailed:
    """Return what an *error* of a connection to *where* means."""
    if isinstance(error, socket.gaierror):
        alias = "for an alias from `~/.ssh/config`, which is not read, give the host's `address`"
        cure = f"Correct the address, /etc/hosts or the name server; {alias}"
        return ProbeFailed(f"the name {where} does not resolve: {error.strerror}. {cure}")
    if isinstance(error, TimeoutError):
        return NodeUnreachable(f"{where} accepted no connection in time")
    number = error.errno or 0
    what = os.strerror(number) if number else str(error)
    if number in OUR_ERRORS:
        cure = f"; {OUR_ERRORS[number]}" if OUR_ERRORS[number] else ""
        return ProbeFailed(f"no connection to {where} could be made from here: {what}{cure}")
    return NodeUnreachable(f"{where}: {what}")


def handshake_error(error: Exception, where: str) -> NodeUnreachable | ProbeFailed:
    """Return what an *error* before the end of the login means; an untrusted host key is reported elsewhere."""
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return ProbeFailed(f"{where} and this machine have no encryption in common: {error}")
    if isinstance(error, OSError) and not isinstance(error, EOFError):
        return socket_error(error, where)
    return NodeUnreachable(f"{where} accepted the connection, but no SSH handshake followed in time: {str(error) or type(error).__name__}")
