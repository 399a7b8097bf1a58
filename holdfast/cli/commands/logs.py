"""`holdfast logs`: what the ranks of a job have written, on whatever machine they run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.cli.job_view import find_job
from holdfast.cli.output import hint, say, say_json
from holdfast.cluster import Logs, NodeBackend, open_cluster
from holdfast.errors import UnknownNode, WorldError
from holdfast.history import queries
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.wording import visible
from holdfast.stored_job import recorded_cluster

POLL: Final = 0.5
"""Seconds between two looks at logs that are followed."""
BACK: Final = 256 * 1024
"""Bytes from the end of a log among which its last lines are looked for."""
PIECE: Final = 256 * 1024
HANDS: Final = 16


@dataclass(slots=True, kw_only=True)
class Log:
    """One log, and how far it was read."""

    node: str
    name: str
    at: int = 0
    rest: bytes = b""
    """The beginning of a line whose end is not written yet."""

    @property
    def title(self) -> str:
        """Return whose it is."""
        return self.name.removesuffix(".log").replace("-", " ")

    def taken(self, data: bytes) -> list[str]:
        """Take in *data*, which follows what was read before; return the lines that are whole now."""
        self.at += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [as_shown(line) for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which logs are asked for."""

    ranks: tuple[int, ...] = ()
    """None: all."""
    node: str | None = None
    """What lies there; None: the logs of each rank where it is now."""


@dataclass(slots=True)
class LogReader:
    """Reads the logs of one job."""

    job: Job
    source: NodeBackend
    which: LogFilter
    away: dict[str, str] = field(default_factory=dict)
    """Nodes that could not be asked, and why."""
    _held: tuple[int | None, dict[str, set[int]]] | None = None
    """The newest generation that was seen, and which ranks each node has held up to it."""

    def find(self, history: History) -> list[Log]:
        """Return the logs of the ranks where they are now, or all that lie on the node that was asked for."""
        if self.which.node is not None:
            if self.which.node not in self.source.names():
                raise UnknownNode(self.which.node, self.source.name, tuple(self.source.names()[:4]))
            return [log for log in self._on(self.which.node, history) if self._wanted(log)]
        row = queries.newest_generation(history, self.job.id)
        places = {rank: node for node, held in (row.ranks if row is not None else {}).items() for rank in held}
        return [
            Log(node=places[rank], name=f"rank-{rank}.log") for rank in sorted(places) if not self.which.ranks or rank in self.which.ranks
        ]

    def _wanted(self, log: Log) -> bool:
        return not self.which.ranks or log.name in {f"rank-{rank}.log" for rank in self.which.ranks}

    def _on(self, node: str, history: History) -> Iterator[Log]:
        """Yield what *node* has written: where nodes share a folder, the logs of all lie there."""
        if (found := self.listed(node)) is not None:
            yield from (Log(node=node, name=name) for name in found.of(node, self._held_now(history)))

    def _held_now(self, history: History) -> dict[str, set[int]]:
        newest = queries.newest_generation(history, self.job.id)
        number = None if newest is None else newest.number
        if self._held is None or self._held[0] != number:
            self._held = number, queries.ranks_held(history, self.job.id)
        return self._held[1]

    def listed(self, node: str) -> Logs | None:
        """Return the logs where *node* writes its own; nothing when it cannot be asked."""
        try:
            return self.source.logs(node, self.job.name)
        except (WorldError, OSError) as error:
            self.away[node] = _words(error)
            return None

    def ends(self, found: list[Log], lines: int) -> list[list[str]]:
        """Return the last *lines* of each log; a node is asked once how long its logs are."""
        nodes = list(dict.fromkeys(log.node for log in found))
        with ThreadPoolExecutor(HANDS, thread_name_prefix="logs") as hands:
            sizes = dict(zip(nodes, hands.map(self.listed, nodes), strict=True))
            return list(hands.map(lambda log: self.last(log, sizes[log.node], lines), found))

    def last(self, log: Log, listed: Logs | None, lines: int) -> list[str]:
        """Return the last *lines* of a log."""
        size = listed.sizes.get(log.name) if listed is not None else None
        if size is None:
            return []
        try:
            log.at = max(0, size - BACK)
            begun = log.at
            found = log.taken(self.source.log(log.node, self.job.name, log.name, log.at, BACK))
            whole = found[1:] if begun else found  # the first one began before
            return [*whole, *([as_shown(log.rest)] if log.rest else [])][-lines:] if lines else []
        except (WorldError, OSError) as error:
            self.away[log.node] = _words(error)
            return []

    def more(self, log: Log) -> list[str]:
        """Return the lines that a log has got since it was read last."""
        try:
            data = self.source.log(log.node, self.job.name, log.name, log.at, PIECE)
        except (WorldError, OSError) as error:
            self.away[log.node] = _words(error)
            return []
        self.away.pop(log.node, None)
        return log.taken(data) if data else []


def logs(reference: str | None, which: LogFilter, *, lines: int, follow: bool, as_json: bool) -> int:
    """Print the last lines of a job's logs, and follow them where that is asked for."""
    history = History.open(create=False)
    try:
        job = find_job(history, reference)
        with closing(open_cluster(recorded_cluster(job))) as source:
            reader = LogReader(job, source, which)
            found = reader.find(history)
            ends = reader.ends(found, lines)
            if as_json:
                say_json({"job": job.name, "logs": [_record(log, end) for log, end in zip(found, ends, strict=True)], "away": reader.away})
                return 1 if reader.away else 0
            _tell(found, ends)
            if not found and not reader.away:
                hint(f"job '{job.name}' has no logs{f' on {which.node}' if which.node else ''}{_of(which.ranks)}")
            if follow:
                _follow(history, reader, found)
            for name, why in reader.away.items():
                hint(f"{name} could not be asked: {why}")
            return 1 if reader.away else 0
    finally:
        history.close()


def _record(log: Log, end: list[str]) -> dict[str, Any]:
    return {"node": log.node, "log": log.name, "lines": end}


def _of(ranks: tuple[int, ...]) -> str:
    return f" of rank {', '.join(map(str, ranks))}" if ranks else ""


def _tell(found: list[Log], ends: list[list[str]]) -> None:
    for log, end in zip(found, ends, strict=True):
        if len(found) > 1 or not end:
            say(f"== {log.title} on {log.node}{'' if end else ': nothing yet'}")
        for line in end:
            say(line)


def _follow(history: History, reader: LogReader, found: list[Log]) -> None:
    """Print lines as they come until the job has ended, each with its rank where there are several; ranks that move are followed."""
    known = {(log.node, log.name): log for log in found}
    for log in found:
        log.rest = b""  # it was shown
    while True:
        over = queries.has_ended(history, reader.job.id)
        for log in reader.find(history):
            log = known.setdefault((log.node, log.name), log)  # noqa: PLW2901 (the one that was read before)
            for line in reader.more(log):
                say(f"[{log.title}] {line}" if len(known) > 1 else line)
        if over:
            return
        time.sleep(POLL)


def as_shown(data: bytes) -> str:
    """Return a line as a terminal would show it: of what was written over itself, as progress bars are, the last state."""
    states = [state for state in data.decode("utf-8", "replace").split("\r") if state]
    return visible(states[-1]) if states else ""


def _words(error: Exception) -> str:
    return getattr(error, "why", "") or (error.strerror if isinstance(error, OSError) else "") or str(error)
