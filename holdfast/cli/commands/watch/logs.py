"""`holdfast logs`: what the ranks of a job have written, on whatever machine they run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.cli.arguments import known_nodes
from holdfast.cli.job_view import find_job
from holdfast.cli.output import echo, echo_json, hint
from holdfast.cluster import Logs, NodeBackend, open_cluster
from holdfast.errors import UnknownRank, WorldError
from holdfast.history import queries
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.text.wording import ranks as in_ranges
from holdfast.report.text.wording import visible
from holdfast.stored_job import recorded_cluster

POLL_INTERVAL: Final = 0.5
"""Seconds between two polls of logs that are followed."""
TAIL_BYTES: Final = 256 * 1024
"""Bytes at the end of a log in which its last lines are searched, and bytes read at once."""
THREADS: Final = 16


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
        """Return whose log it is."""
        return self.name.removesuffix(".log").replace("-", " ")

    @property
    def prefix(self) -> str:
        """Return what begins each line on request."""
        return f"[{self.title} on {self.node}]"

    def lines_in(self, data: bytes) -> list[bytes]:
        """Add *data*, which follows what was read before; return the lines that are complete now."""
        self.at += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which logs are requested."""

    ranks: tuple[int, ...] = ()
    """Empty: all."""
    nodes: tuple[str, ...] = ()
    """All logs on these nodes; none: the log of each rank on its present node."""
    running_at: int | None = None
    """Only the output of processes that ran in this generation or later, as far as a log says where that begins."""

    def includes(self, name: str) -> bool:
        """Return whether the log *name* is of a requested rank."""
        return not self.ranks or name in {f"rank-{rank}.log" for rank in self.ranks}


@dataclass(slots=True)
class LogReader:
    """Reads the logs of one job."""

    job: Job
    source: NodeBackend
    which: LogFilter
    unreachable: dict[str, str] = field(default_factory=dict)
    """Nodes that could not be read, and why."""
    _held: tuple[int | None, dict[str, set[int]]] | None = None
    """The newest generation, and which ranks each node has had up to it."""
    _lists: dict[str, Logs | None] = field(default_factory=dict)
    """The logs of the requested nodes, as they were found last; None where a node could not be read."""

    def find(self, history: History) -> list[Log]:
        """Return the logs of the ranks on their present nodes, or all on the requested nodes."""
        row = queries.newest_generation(history, self.job.id)
        if not self.which.nodes:
            nodes = {rank: name for name, held in (row.ranks if row is not None else {}).items() for rank in held}
            found = [Log(node=nodes[rank], name=f"rank-{rank}.log") for rank in sorted(nodes)]
        else:
            known_nodes(self.which.nodes, self.source.name, self.source.names())
            number = None if row is None else row.number
            if self._held is None or self._held[0] != number:
                self._held = number, queries.ranks_held(history, self.job.id)
            found = []
            self._lists = self._listed(self.which.nodes)
            for node, listed in self._lists.items():  # where nodes share a folder, it has the logs of all
                found += [Log(node=node, name=name) for name in listed.of(node, self._held[1])] if listed is not None else []
        return [log for log in found if self.which.includes(log.name)]

    def _listed(self, nodes: Iterable[str]) -> dict[str, Logs | None]:
        """Return the logs in the folder of each node, all asked at once."""
        wanted = list(dict.fromkeys(nodes))
        with ThreadPoolExecutor(THREADS, thread_name_prefix="logs") as pool:
            return dict(zip(wanted, pool.map(self._listed_on, wanted), strict=True))

    def _listed_on(self, node: str) -> Logs | None:
        """Return the logs in the folder of *node*; None when it cannot be read."""
        try:
            return self.source.logs(node, self.job.name)
        except (WorldError, OSError) as error:
            self._failed(node, error)
            return None

    def _failed(self, node: str, error: Exception) -> None:
        self.unreachable[node] = getattr(error, "why", "") or (error.strerror if isinstance(error, OSError) else "") or str(error)

    def ends(self, found: list[Log], lines: int) -> list[list[str]]:
        """Return the last *lines* of each log; each node is asked once for the sizes of its logs, when they were found or now."""
        lists = self._lists | self._listed(log.node for log in found if log.node not in self._lists)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="logs") as pool:
            return list(pool.map(lambda log: self.last(log, lists[log.node], lines), found))

    def last(self, log: Log, listed: Logs | None, lines: int) -> list[str]:
        """Return the last *lines* of a log."""
        size = listed.sizes.get(log.name) if listed is not None else None
        if size is None:
            return []
        begin = log.at = max(0, size - TAIL_BYTES)
        found = self._read(log) or []
        complete = found[1:] if begin else found  # the first one begins before
        whole = [*complete, *([as_shown(log.rest)] if log.rest else [])]
        return whole[self._start(whole) :][-lines:] if lines else []

    def _start(self, lines: Sequence[str]) -> int:
        """Return the first of *lines* that is requested: where the process began that ran at `LogFilter.running_at`, as its header says."""
        wanted = self.which.running_at
        if wanted is None:
            return 0
        headers = [(place, int(found["number"])) for place, line in enumerate(lines) if (found := self._header.fullmatch(line))]
        before = [place for place, number in headers if number <= wanted]
        return before[-1] if before else headers[0][0] if headers else 0

    @property
    def _header(self) -> re.Pattern[str]:
        return re.compile(rf"--- holdfast: rank \d+, generation (?P<number>\d{{1,9}}) of job {self.job.id}")

    def more(self, log: Log) -> list[str]:
        """Return the lines that a log has received since it was last read; its node is reachable again if it was not."""
        found = self._read(log)
        if found is not None:
            self.unreachable.pop(log.node, None)
        return found or []

    def _read(self, log: Log) -> list[str] | None:
        """Return the next complete lines of a log; None, with the reason in `unreachable`, when it cannot be read."""
        try:
            data = self.source.log(log.node, self.job.name, log.name, log.at, TAIL_BYTES)
        except (WorldError, OSError) as error:
            self._failed(log.node, error)
            return None
        return [as_shown(line) for line in log.lines_in(data)]


def logs(  # noqa: PLR0913 (as many as the command has options)
    job: str | None,
    *,
    ranks: tuple[int, ...],
    nodes: tuple[str, ...],
    lines: int,
    since: float | None,
    follow: bool,
    prefix: bool,
    as_json: bool,
) -> int:
    """Print the last lines of a job's logs, and follow them on request; return 1 when a node could not be read."""
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        with closing(open_cluster(recorded_cluster(row))) as source:
            running_at = None if since is None else _generation_at(history, row, since)
            reader = LogReader(row, source, LogFilter(ranks=ranks, nodes=nodes, running_at=running_at))
            found = reader.find(history)
            if not reader.unreachable:  # a node that cannot be read may have the log
                _check_ranks(history, row, ranks, found)
            ends = reader.ends(found, lines if since is None or not _ended_before(history, row, since) else 0)
            if as_json:
                rows: list[dict[str, Any]] = [
                    {"node": log.node, "log": log.name, "lines": end} for log, end in zip(found, ends, strict=True)
                ]
                echo_json({"job": row.name, "logs": rows, "unreachable": reader.unreachable})
                return int(bool(reader.unreachable))
            _show(found, ends, prefix=prefix)
            if not found and not reader.unreachable:
                of_ranks = f" of rank {', '.join(map(str, ranks))}" if ranks else ""
                on_nodes = f" on {', '.join(nodes)}" if nodes else ""
                hint(f"job '{row.name}' has no logs{on_nodes}{of_ranks}")
            if follow:
                for line in _followed(history, reader, found, prefix=prefix):
                    echo(line)
            for name, why in reader.unreachable.items():
                hint(f"{name} could not be read: {why}")
            return int(bool(reader.unreachable))


def _check_ranks(history: History, job: Job, ranks: Iterable[int], found: Iterable[Log]) -> None:
    """Raise `UnknownRank` for *ranks* that *job* never had, and of which no log was *found*; before it has any, none is unknown."""
    held = {rank for some in queries.ranks_held(history, job.id).values() for rank in some}
    names = {log.name for log in found}
    unknown = [rank for rank in ranks if rank not in held and f"rank-{rank}.log" not in names]
    if held and unknown:
        raise UnknownRank(in_ranges(sorted(unknown)), job.name, in_ranges(sorted(held)))


def _generation_at(history: History, job: Job, at: float) -> int:
    """Return the generation of *job* that ran at a time; 0 before the first."""
    return max((one.number for one in queries.generations(history, job.id) if one.at <= at), default=0)


def _ended_before(history: History, job: Job, at: float) -> bool:
    state = queries.state_of(history, job.id)
    return state is not None and state.after in queries.TERMINAL and state.at < at


def _show(found: list[Log], ends: list[list[str]], *, prefix: bool) -> None:
    for log, end in zip(found, ends, strict=True):
        if (len(found) > 1 and not prefix) or not end:
            echo(f"== {log.title} on {log.node}{'' if end else ': empty so far'}")
        for line in end:
            echo(f"{log.prefix} {line}" if prefix else line)


def _followed(history: History, reader: LogReader, found: list[Log], *, prefix: bool) -> Iterator[str]:
    """Yield lines as they are written until the job has ended, each with its rank where there are several; ranks that move are followed."""
    known = {(log.node, log.name): log for log in found}
    for log in found:
        log.rest = b""  # it was shown
    while True:
        over = queries.has_ended(history, reader.job.id)
        for log in reader.find(history):
            log = known.setdefault((log.node, log.name), log)  # noqa: PLW2901 (the one that was read before)
            for line in reader.more(log):
                yield f"{log.prefix} {line}" if prefix else f"[{log.title}] {line}" if len(known) > 1 else line
        if over:
            return
        time.sleep(POLL_INTERVAL)


def as_shown(data: bytes) -> str:
    """Return a line as a terminal would show it: of one that overwrites itself, as progress bars do, the last state."""
    states = [state for state in data.decode("utf-8", "replace").split("\r") if state]
    return visible(states[-1]) if states else ""
