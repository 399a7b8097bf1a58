"""Which addresses and adapters the ranks of a node use: a network device with none of them cannot have cut their connections."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.agent.node.devices import processes_of
from holdfast.agent.workers.worker import Worker

_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_VERBS: Final = re.compile(r".*/infiniband/(uverbs\d+)")
_OTHER_FABRIC: Final = re.compile(r".*/(?:hfi1_\d+|cxi\d+)")
"""Devices of fabrics whose adapters are not known from their open files."""
LISTENS: Final = "0A"
"""State of a socket that listens, in /proc/net/tcp."""


class LinkUse:
    """What the ranks have used so far, by process: a connection that was cut is gone when one asks for it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._addresses: dict[int, set[str]] = {}
        """Process to the addresses of its connections on this node, without those of the loopback."""

    def look(self, workers: Iterable[Worker]) -> None:
        """Note the connections that *workers* have now."""
        running = [one for one in workers if one.pid and not one.exited]  # a worker without a process has no children either
        pids = [pid for one in running for pid in processes_of(one)]
        self._addresses = {pid: self._addresses.get(pid, set()) | set(connected_addresses(pid)) for pid in pids}

    def is_unused(self, addresses: Collection[str], adapters: Collection[str], workers: Sequence[Worker], *, stacked: bool) -> bool:
        """Return whether an interface with *addresses*, on a card with *adapters*, carries nothing of *workers* for sure.

        *stacked*: other interfaces send through it. False where that is not known: while a worker has exited or is not connected, or where
        its adapters cannot be told.
        """
        if not addresses and not adapters and not stacked:
            return True  # no packet has an address there
        if not workers or any(one.exited or not one.pid for one in workers):
            return False
        self.look(workers)
        opened = [name for pid in self._addresses for name in _open_files(pid)]
        if any(map(_OTHER_FABRIC.fullmatch, opened)):
            return False
        verbs = {found[1] for name in opened if (found := _VERBS.fullmatch(name))}
        used = {self._adapter(name) for name in verbs}
        if "" in used or used & set(adapters):
            return False
        if not addresses and not stacked:
            return True
        mine = {_plain(one) for one in addresses}
        connected = [{one for pid in processes_of(worker) for one in self._addresses.get(pid, ())} for worker in workers]
        return bool(mine) and all(connected) and not mine & set().union(*connected)

    def _adapter(self, verbs: str) -> str:
        """Return the adapter of the device `/dev/infiniband/uverbsN`; empty if that is not known."""
        with suppress(OSError):
            return (self._root / "sys/class/infiniband_verbs" / verbs / "ibdev").read_text().strip()
        return ""


def connected_addresses(pid: int) -> Iterator[str]:
    """Yield the addresses of this node from which process *pid* has TCP connections, without loopback ones and sockets that only listen."""
    sockets = {found[1] for name in _open_files(pid) if (found := _SOCKET.fullmatch(name))}
    for table in ("tcp", "tcp6") if sockets else ():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in sockets and fields[3] != LISTENS:
                    address = _address(fields[1].partition(":")[0])
                    if not ipaddress.ip_address(address).is_loopback:
                        yield address


def _address(text: str) -> str:
    """Return an address of /proc/net/tcp, where each 32 bits are a number of this machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    data = b"".join(words)
    return _plain(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, data))


def _plain(address: str) -> str:
    """Return *address* in one form: an IPv4 address in an IPv6 socket as itself."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(descriptor.readlink())
