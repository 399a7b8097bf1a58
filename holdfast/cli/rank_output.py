"""Read what ranks write, for the terminal of `holdfast run`, in a thread of its own, and never more than one can read.

Reading delays no rank: ranks write into files, and what is written faster than it is shown is left out, with a line that says so.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from holdfast.cli.commands.watch.logs import THREADS, Log, as_shown
from holdfast.cluster import NodeBackend, open_cluster
from holdfast.errors import HoldfastError
from holdfast.history.models import Job
from holdfast.report.text.wording import size
from holdfast.spec import cluster_of

POLL_INTERVAL: Final = 0.25
"""Seconds between two polls of the logs."""
CHUNK: Final = 64 * 1024
"""Bytes of one rank that are read at once."""
MAX_LAG: Final = 4 * CHUNK
"""Bytes that one rank may be ahead of what is shown; beyond that all but the last chunk is left out."""
MAX_LINES: Final = 2000
"""Lines that wait to be shown; the thread waits with them."""
MAX_LINE: Final = 2000
"""Characters of a line."""
SEARCHED: Final = 8 * 1024 * 1024
"""Bytes in which the beginning of this job's output is searched: a log may hold that of earlier jobs of the same name."""
MAX_ERRORS: Final = 8
LAST_READ: Final = 5.0
"""Seconds for the last poll, when the job has ended."""
_END: Final = re.compile(rb"[\r\n]")
_HEADER: Final = re.compile(rb"^--- holdfast: [^\n]*\n?$")

Line = tuple[int | None, str]
"""A rank (None: a message of our own) and what it wrote."""


@dataclass(slots=True)
class _Tail:
    """One rank's log, as far as it was shown."""

    rank: int
    log: Log
    begun: bool = False
    """The beginning of this job's output was found, or all that is written from now on belongs to it."""


@dataclass
class RankOutput:
    """The output of some ranks of one job: all of it, or what they write *from_now*."""

    ranks: Collection[int] | None
    """None: all."""
    from_now: bool = False
    job: Job | None = None
    _nodes: Mapping[int, str] = field(default_factory=dict)
    _lines: deque[Line] = field(default_factory=deque)
    _tails: dict[tuple[str, int], _Tail] = field(default_factory=dict)
    _folders: dict[str, str] = field(default_factory=dict)
    """Node to the identity of its folder of logs, which nodes may share."""
    _errors: set[str] = field(default_factory=set)
    _room: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _deadline: float = 0.0
    """End of the last poll (monotonic)."""
    _thread: threading.Thread | None = None

    def shows(self, rank: int) -> bool:
        """Return whether all output of *rank* is shown."""
        return not self.from_now and (self.ranks is None or rank in self.ranks)

    def follow(self, job: Job, members: Mapping[str, Collection[int]]) -> None:
        """Read on from the present nodes of the ranks."""
        self.job = job
        self._nodes = {rank: node for node, held in members.items() for rank in held if self.ranks is None or rank in self.ranks}
        if self._nodes and self._thread is None:
            self._thread = threading.Thread(target=self._read, name="rank-output", daemon=True)
            self._thread.start()

    def take(self) -> list[Line]:
        """Return what is new."""
        found = [self._lines.popleft() for _ in range(len(self._lines))]
        self._room.set()
        return found

    def last(self) -> Iterator[list[Line]]:
        """Yield what remains when the job has ended; nodes that do not answer in time are left out."""
        self._deadline = time.monotonic() + LAST_READ
        self._ended.set()
        while self._thread is not None and (self._thread.is_alive() or self._lines):
            yield self.take()
            if time.monotonic() > self._deadline:
                return
            self._thread.join(0.05)
        yield self.take()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self.job is not None
        try:
            with closing(open_cluster(cluster_of(self.job.cluster))) as source, ThreadPoolExecutor(THREADS, "rank-output") as pool:
                while not self._ended.wait(POLL_INTERVAL if not source.remote else 2 * POLL_INTERVAL):
                    self._poll(source, pool)
                for _ in range(MAX_LAG // CHUNK + 1):
                    self._poll(source, pool)
                for tail in self._tails.values():
                    if tail.begun and tail.log.rest:
                        self._add(tail.rank, as_shown(tail.log.rest))
        except Exception as error:  # noqa: BLE001 (whatever reaching the nodes may raise; the job is watched all the same)
            self._report(f"the output of ranks cannot be shown: {error}")

    def _poll(self, source: NodeBackend, pool: ThreadPoolExecutor) -> None:
        found = sorted(self._nodes.items())
        for (rank, _), lines in zip(found, pool.map(lambda place: self._more(source, *place), found), strict=True):
            for line in lines:
                self._add(rank, line)

    def _tail(self, source: NodeBackend, rank: int, node: str) -> _Tail | None:
        """Return the log of *rank* on *node*, if there is one yet; nodes that share a folder share its logs."""
        assert self.job is not None
        name = f"rank-{rank}.log"
        if node not in self._folders:
            listed = source.logs(node, self.job.name)
            if name not in listed.sizes:
                return None
            self._folders[node] = listed.place or node
        tail = self._tails.setdefault((self._folders[node], rank), _Tail(rank, Log(node=node, name=name)))
        tail.log.node = node
        return tail

    def _add(self, rank: int | None, line: str) -> None:
        """Add a line; wait while nobody takes them, but once the job has ended only until the deadline."""
        while len(self._lines) >= MAX_LINES:
            self._room.clear()
            if not self._room.wait(POLL_INTERVAL) and self._ended.is_set() and time.monotonic() > self._deadline:
                return
        self._lines.append((rank, line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} …"))

    def _report(self, text: str) -> None:
        if text not in self._errors and len(self._errors) < MAX_ERRORS:
            self._errors.add(text)
            self._lines.append((None, text))

    def _more(self, source: NodeBackend, rank: int, node: str) -> list[str]:
        """Return the lines that a rank has written since the last poll, or the newest of them."""
        assert self.job is not None
        try:
            tail = self._tail(source, rank, node)
            if tail is None or not (tail.begun or self._begins(source, tail)):
                return []
            log = tail.log
            data = source.log(log.node, self.job.name, log.name, log.at, CHUNK)
            skipped = self._skip(source, log) if len(data) == CHUNK else 0
            if skipped:
                data = source.log(log.node, self.job.name, log.name, log.at, CHUNK)
                cut = _END.search(data)  # what comes before began in what is left out
                data, log.at = (data[cut.end() :], log.at + cut.end()) if cut else (data, log.at)
        except FileNotFoundError:
            return []
        except (HoldfastError, OSError) as error:
            self._report(f"the output of ranks on {node} cannot be read: {error}")
            return []
        lines = [as_shown(line) for line in log.lines_in(data) if not _HEADER.match(line)]
        log.rest = log.rest[-CHUNK:]  # a progress bar that never ends its line
        if skipped:
            lines.insert(0, f"… {size(skipped)} left out here; `holdfast logs {self.job.name} --rank {rank}` shows all output of the rank")
        return lines

    def _skip(self, source: NodeBackend, log: Log) -> int:
        """Continue with the last chunk of a log that has grown too fast; return the number of bytes left out."""
        assert self.job is not None
        end = source.logs(log.node, self.job.name).sizes.get(log.name, 0)
        if end - log.at <= MAX_LAG:
            return 0
        skipped, log.at, log.rest = end - CHUNK - log.at, end - CHUNK, b""
        return skipped

    def _begins(self, source: NodeBackend, tail: _Tail) -> bool:
        """Search for the beginning of this job's output in a log; return whether it was found."""
        assert self.job is not None
        log, name = tail.log, self.job.name
        size_now = source.logs(log.node, name).sizes.get(log.name, 0)
        if self.from_now:
            log.at, tail.begun = size_now, True
            return True
        mark, end = f" of job {self.job.id}\n".encode(), size_now
        while end > max(log.at, size_now - SEARCHED):
            begin = max(log.at, end - CHUNK)
            found = source.log(log.node, name, log.name, begin, min(end + len(mark), size_now) - begin)
            if mark in found:
                tail.begun, log.at = True, begin + found.index(mark) + len(mark)
                end = log.at - len(mark)
                continue  # an earlier generation of the job may have written before
            end = begin
        if not tail.begun:
            log.at = max(log.at, size_now - len(mark))  # it is another job's; half a mark may be at its end
        return tail.begun
