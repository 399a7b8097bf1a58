"""What NCCL's own monitor (RAS) says of a job that may hang: which ranks have launched fewer collectives than the others.

Every process with NCCL 2.24 or newer runs it, and answers on ``localhost:28028`` (``NCCL_RAS_ADDR``) for the whole job. Ranks whose groups
are not managed by Holdfast are compared by it: nothing else counts their operations. Counts that differ mean nothing while a job runs, as
RAS does not read them at one moment; they are only asked for, and only used, where no rank makes progress.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch.distributed as dist

from holdfast.protocol import Message
from holdfast.runtime.groups.process_group import ManagedGroup

ADDRESS: Final = "localhost:28028"
"""Where RAS answers unless ``NCCL_RAS_ADDR`` says otherwise."""
SECONDS: Final = 3
"""How long RAS waits for processes that do not answer it."""
PATIENCE: Final = SECONDS + 5.0
"""Seconds to wait for its whole answer: it adds some of its own."""
LARGEST: Final = 4 * 2**20
"""Bytes of an answer that are read."""
FRESH: Final = 20.0
"""Seconds for which an answer is passed on."""
_LISTED: Final = 64

_DIFFER: Final = re.compile(r"^\s*Communicator ranks have different (?P<name>\S+) operation counts\s*$")
_MANY: Final = re.compile(r"^\s*(?P<ranks>\d+) ranks have (?:launched up to operation (?P<number>\d+)|not launched any operations)\s*$")
_ONE: Final = re.compile(r"^\s*Rank (?P<rank>\d+) has (?:launched up to operation (?P<number>\d+)|not launched any operations) -- ")
_MEMBER: Final = re.compile(r"^\s*Rank (?P<rank>\d+) -- ")


class LaunchCounts(NamedTuple):
    """How many operations the ranks of one communicator have launched, where they differ."""

    name: str
    """The collective, as NCCL names it; ``collective`` for all together."""
    ranks: int
    """How many ranks were compared."""
    most: int
    """The number of the newest operation that any rank has launched."""
    behind: dict[int, int]
    """By rank within the communicator, the newest operation of those that RAS names and that have launched fewer."""


def parse(text: str) -> list[LaunchCounts]:
    """Return the communicators whose ranks have launched different numbers of operations, from the *text* of RAS."""
    found: list[LaunchCounts] = []
    name, size, number, most, by_rank = "", 0, 0, 0, dict[int, int]()
    for line in (*text.splitlines(), ""):
        if match := _MANY.match(line):
            number = int(match["number"] or 0)
            size, most = size + int(match["ranks"]), max(most, number)
        elif match := _ONE.match(line):
            number = int(match["number"] or 0)
            size, most, by_rank[int(match["rank"])] = size + 1, max(most, number), number
        elif match := _MEMBER.match(line):
            by_rank[int(match["rank"])] = number
        else:  # any other line ends the comparison before it
            if name and size:
                found.append(LaunchCounts(name, size, most, {rank: own for rank, own in by_rank.items() if own < most}))
            match = _DIFFER.match(line)
            name, size, number, most, by_rank = match["name"] if match else "", 0, 0, 0, {}
    return found


def ask(address: str = ADDRESS, *, seconds: float = PATIENCE) -> str:
    """Return the verbose status that RAS at *address* (``host:port``) gives; raise ``OSError`` where none answers in time."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as sock, sock.makefile("rb") as answers:
        for command in ("CLIENT PROTOCOL 2", f"TIMEOUT {SECONDS}"):
            sock.sendall(f"{command}\n".encode())
            answers.readline(4096)
        sock.settimeout(seconds)
        sock.sendall(b"VERBOSE STATUS\n")
        text = bytearray()
        while len(text) < LARGEST and (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            if not (data := answers.read1(65536)):
                break
            text += data
    return text.decode(errors="replace")


class RasQuery:
    """Asks RAS in a thread of its own, at most one at a time, and keeps its newest answer."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._thread: threading.Thread | None = None
        self._found: tuple[float, list[LaunchCounts]] = (-FRESH, [])

    def poll(self) -> list[Message]:
        """Return what RAS last said, if that is recent, and have it asked again."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="holdfast-nccl-ras", daemon=True)
            self._thread.start()
        at, found = self._found
        if time.monotonic() - at > FRESH:
            return []
        return [
            {"name": one.name, "ranks": one.ranks, "most": one.most, "behind": dict(sorted(one.behind.items())[:_LISTED])} for one in found
        ]

    def _ask(self) -> None:
        begin = time.monotonic()
        try:
            found = parse(ask(self._environment.get("NCCL_RAS_ADDR") or ADDRESS))
        except (OSError, ValueError):  # it is switched off, older than 2.24, or its process is gone
            found = []
        self._found = begin, found


_query = RasQuery()


def launch_counts() -> list[Message]:
    """Return how many collectives the ranks have launched, where they differ and nobody else counts them.

    Only the first and the last rank ask, as each answer is for the whole job.
    """
    if not dist.is_available() or not dist.is_initialized() or "nccl" not in str(dist.get_backend()):
        return []
    if isinstance(dist.group.WORLD, ManagedGroup) or dist.get_rank() not in {0, dist.get_world_size() - 1}:
        return []
    return _query.poll()
