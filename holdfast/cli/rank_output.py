"""What ranks write, for the terminal of `holdfast run`: read from their logs by a thread of its own, and never more than one can read.

Nothing here holds anybody up: ranks write into files, and what is written faster than it is shown is left out, with a word of it.
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

from holdfast.cli.commands.logs import HANDS, Log, as_shown
from holdfast.cluster import NodeBackend, open_cluster
from holdfast.errors import HoldfastError, UnknownOptionValue
from holdfast.history.models import Job
from holdfast.report.wording import size
from holdfast.spec import cluster_of

POLL: Final = 0.25
"""Seconds between two looks at the logs."""
PIECE: Final = 64 * 1024
"""Bytes of one rank that are shown at once."""
BEHIND: Final = 4 * PIECE
"""Bytes that one rank may be ahead of what is shown; then all but the last piece is left out."""
LINES: Final = 2000
"""Lines that wait to be shown; the thread waits with them."""
LONGEST: Final = 2000
"""Characters of a line."""
BACK: Final = 8 * 1024 * 1024
"""Bytes in which the beginning of this job's output is looked for: a log may hold that of earlier jobs of the same name."""
COMPLAINTS: Final = 8
LAST: Final = 5.0
"""Seconds for the last look, when the job has ended."""
_END: Final = re.compile(rb"[\r\n]")
_HEADER: Final = re.compile(rb"^--- holdfast: [^\n]*\n?$")

Line = tuple[int | None, str]
"""A rank (None: a word of our own) and what it wrote."""


def ranks_in(text: str, world: int) -> frozenset[int] | None:
    """Return the ranks of a job of *world* that ``0,2-3``, ``all`` (None) or ``none`` names; raise `UnknownOptionValue` otherwise."""
    word = text.strip().lower()
    if word in {"all", "none"}:
        return None if word == "all" else frozenset()
    known, found = (f"ranks from 0 to {world - 1} such as `0,2-3`", "`all`", "`none`"), set[int]()
    for part in word.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 24:  # noqa: PLR2004 (two numbers of any job)
            raise UnknownOptionValue("log-ranks", text, known)
        begin, end = int(first), int(last or first)
        if not begin <= end < world:
            raise UnknownOptionValue("log-ranks", text, known)
        found.update(range(begin, end + 1))
    return frozenset(found)


@dataclass(slots=True)
class _Tail:
    """One rank's log, as far as it was shown."""

    rank: int
    log: Log
    begun: bool = False
    """The beginning of this job's output was found, or all that is written from now on is its."""


@dataclass
class RankOutput:
    """The output of some ranks of one job: all of it, or what comes *from_now*."""

    ranks: Collection[int] | None
    """None: all."""
    from_now: bool = False
    job: Job | None = None
    _places: Mapping[int, str] = field(default_factory=dict)
    _lines: deque[Line] = field(default_factory=deque)
    _tails: dict[tuple[str, int], _Tail] = field(default_factory=dict)
    _folders: dict[str, str] = field(default_factory=dict)
    """Node to what tells its folder of logs from those of others."""
    _complaints: set[str] = field(default_factory=set)
    _room: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _until: float = 0.0
    """When the last look is over (monotonic)."""
    _thread: threading.Thread | None = None

    def follow(self, job: Job, members: Mapping[str, Collection[int]]) -> None:
        """Read on where the ranks are now."""
        wanted = {rank: node for node, held in members.items() for rank in held if self.ranks is None or rank in self.ranks}
        self.job, self._places = job, wanted
        if wanted and self._thread is None:
            self._thread = threading.Thread(target=self._read, name="rank-output", daemon=True)
            self._thread.start()

    def take(self) -> list[Line]:
        """Return what is new."""
        found = [self._lines.popleft() for _ in range(len(self._lines))]
        self._room.set()
        return found

    def last(self) -> Iterator[list[Line]]:
        """Yield what is left when the job has ended; of a node that does not answer in time nothing more."""
        self._until = time.monotonic() + LAST
        self._ended.set()
        while self._thread is not None and (self._thread.is_alive() or self._lines):
            yield self.take()
            if time.monotonic() > self._until:
                return
            self._thread.join(0.05)
        yield self.take()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self.job is not None
        try:
            with closing(open_cluster(cluster_of(self.job.cluster))) as source, ThreadPoolExecutor(HANDS, "rank-output") as hands:
                while not self._ended.wait(POLL if not source.remote else 2 * POLL):
                    self._look(source, hands)
                for _ in range(BEHIND // PIECE + 1):
                    self._look(source, hands)
                for tail in self._tails.values():
                    if tail.begun and tail.log.rest:
                        self._say(tail.rank, as_shown(tail.log.rest))
        except Exception as error:  # noqa: BLE001 (whatever it takes to reach nodes may fail; the job is watched all the same)
            self._complain(f"what ranks write cannot be shown: {error}")

    def _look(self, source: NodeBackend, hands: ThreadPoolExecutor) -> None:
        found = sorted(self._places.items())
        for (rank, _), lines in zip(found, hands.map(lambda place: self._more(source, *place), found), strict=True):
            for line in lines:
                self._say(rank, line)

    def _tail(self, source: NodeBackend, rank: int, node: str) -> _Tail | None:
        """Return the log of *rank* on *node*, if there is one yet; nodes that share a folder have it in common."""
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

    def _say(self, rank: int | None, line: str) -> None:
        """Add a line; wait while nobody takes them, but not for ever once the job has ended."""
        while len(self._lines) >= LINES:
            self._room.clear()
            if not self._room.wait(POLL) and self._ended.is_set() and time.monotonic() > self._until:
                return
        self._lines.append((rank, line if len(line) <= LONGEST else f"{line[:LONGEST]} …"))

    def _complain(self, text: str) -> None:
        if text not in self._complaints and len(self._complaints) < COMPLAINTS:
            self._complaints.add(text)
            self._lines.append((None, text))

    def _more(self, source: NodeBackend, rank: int, node: str) -> list[str]:
        """Return the lines that a rank has written since the last look, or the newest of them."""
        assert self.job is not None
        try:
            tail = self._tail(source, rank, node)
            if tail is None or not (tail.begun or self._begins(source, tail)):
                return []
            log = tail.log
            data = source.log(log.node, self.job.name, log.name, log.at, PIECE)
            left_out = self._skip(source, log) if len(data) == PIECE else 0
            if left_out:
                data = source.log(log.node, self.job.name, log.name, log.at, PIECE)
                cut = _END.search(data)  # what comes before began in what is left out
                data, log.at = (data[cut.end() :], log.at + cut.end()) if cut else (data, log.at)
        except FileNotFoundError:
            return []
        except (HoldfastError, OSError) as error:
            self._complain(f"what ranks on {node} write cannot be read: {error}")
            return []
        words = f"… {size(left_out)} left out here; `holdfast logs {self.job.name} --rank {rank}` has all that a rank wrote"
        return [*([words] if left_out else []), *_shown(log, data)]

    def _skip(self, source: NodeBackend, log: Log) -> int:
        """Go on with the last piece of a log that has grown too fast; return how many bytes are left out."""
        assert self.job is not None
        whole = source.logs(log.node, self.job.name).sizes.get(log.name, 0)
        if whole - log.at <= BEHIND:
            return 0
        left_out, log.at, log.rest = whole - PIECE - log.at, whole - PIECE, b""
        return left_out

    def _begins(self, source: NodeBackend, tail: _Tail) -> bool:
        """Find where the output of this job begins in a log; tell whether it does."""
        assert self.job is not None
        log, name = tail.log, self.job.name
        whole = source.logs(log.node, name).sizes.get(log.name, 0)
        if self.from_now:
            log.at, tail.begun = whole, True
            return True
        mark, end = f" of job {self.job.id}\n".encode(), whole
        while end > max(log.at, whole - BACK):
            begin = max(log.at, end - PIECE)
            found = source.log(log.node, name, log.name, begin, min(end + len(mark), whole) - begin)
            if mark in found:
                tail.begun, log.at = True, begin + found.index(mark) + len(mark)
                end = log.at - len(mark)
                continue  # an earlier generation of the job may have written before
            end = begin
        if not tail.begun:
            log.at = max(log.at, whole - len(mark))  # it is another job's; half a mark may stand at its end
        return tail.begun


def _shown(log: Log, data: bytes) -> list[str]:
    """Take in *data*; return the lines that are whole now without what Holdfast wrote itself."""
    log.at += len(data)
    *lines, log.rest = (log.rest + data).split(b"\n")
    if len(log.rest) > PIECE:  # a bar that is written over itself again and again
        log.rest = log.rest[-PIECE:]
    return [as_shown(line) for line in lines if not _HEADER.match(line)]
