"""What an error of a socket, a handshake or a channel says of a node, or of ourselves."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

import paramiko

from holdfast.probe.remote.errors import NodeUnreachable, ProbeFailed

OURS: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EADDRNOTAVAIL,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EACCES,
        errno.EPERM,
    }
)
"""Errors by which our own machine refuses to try: they say nothing of a node."""
CURES: Final = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max",
    errno.ENETUNREACH: "this machine has no route there: mend its network",
    errno.ENETDOWN: "mend this machine's network",
    errno.EACCES: "this machine's firewall or sandbox does not let it connect",
    errno.EPERM: "this machine's firewall or sandbox does not let it connect",
}
CONNECT_FAILED: Final = 2
"""SSH_OPEN_CONNECT_FAILED of RFC 4254, 5.1: whom we asked for did not take the connection. Any other reason is the jump host's own."""


def of_socket(error: OSError, where: str) -> NodeUnreachable | ProbeFailed:
    """Return what an *error* of a connection to *where* means."""
    if isinstance(error, socket.gaierror):
        return ProbeFailed(f"the name {where} does not resolve: {error.strerror}. Mend the address, /etc/hosts or the name server")
    if isinstance(error, TimeoutError):
        return NodeUnreachable(f"{where} did not take a connection in time")
    number = error.errno or 0
    what = os.strerror(number) if number else str(error)
    if number in OURS:
        return ProbeFailed(f"no connection to {where} could be made from here: {what}{f'; {CURES[number]}' if number in CURES else ''}")
    return NodeUnreachable(f"{where}: {what}")


def of_handshake(error: Exception, where: str) -> NodeUnreachable | ProbeFailed:
    """Return what an *error* on the way to an authenticated connection means; wrong keys have been told apart before."""
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return ProbeFailed(f"{where} and this machine share no way to encrypt: {error}")
    if isinstance(error, OSError) and not isinstance(error, EOFError):
        return of_socket(error, where)
    words = str(error) or type(error).__name__
    return NodeUnreachable(f"{where} took the connection and did not speak SSH in time: {words}")


def of_channel(error: paramiko.ChannelException, where: str, jump: str) -> NodeUnreachable | ProbeFailed:
    """Return what it means that the *jump* host did not connect us to *where*."""
    if error.code == CONNECT_FAILED:
        return NodeUnreachable(f"{where}, through {jump}: it takes no connection, or {jump} does not know where that is")
    return ProbeFailed(f"jump host {jump} connects nobody to {where}: {error.text or error}. Allow `AllowTcpForwarding` there")
