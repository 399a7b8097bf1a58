"""The ends of logs on other machines: each file once, and few in memory at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from holdfast.agent.workers.log_files import AGENT
from holdfast.cluster import Logs, NodeBackend
from holdfast.cluster.interface import allocator_of
from holdfast.plurals import plural
from holdfast.support.archive import TAIL, Bundle

MAX_NODES: Final = 128
"""Logs of further nodes can be read with `holdfast logs`."""
MAX_BYTES: Final = 256 * 1024 * 1024
"""Bytes of all these logs before compression; with many logs, less is taken of each."""
MIN_LOG_BYTES: Final = 64 * 1024
"""Bytes of each log that are taken in any case."""
MAX_LOGS: Final = MAX_BYTES // MIN_LOG_BYTES
MAX_LOGS_PER_NODE: Final = MAX_LOGS // 4
"""A node reports its own list of logs; a limit keeps it from displacing those of all others."""
THREADS: Final = 16
AHEAD: Final = 2 * THREADS
"""Logs that are being read, or wait to be written."""

Item = TypeVar("Item")
Made = TypeVar("Made")
File = tuple[str, str]
"""Location of a folder and a file in it, or a node and a file there."""


@dataclass(frozen=True, slots=True)
class RemoteLogs:
    """Collects the logs of one job."""

    bundle: Bundle
    source: NodeBackend
    job: str
    ranks_held: Mapping[str, Collection[int]]
    """Node to the ranks that it has held, nodes of the newest generation first."""

    def run(self, faulty: Sequence[str], taken: Collection[File]) -> None:
        """Add the ends of logs that were not *taken* yet, those of *faulty* nodes first; an unreachable node loses only its own."""
        nodes = self._nodes(faulty)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="support") as pool:
            wanted, known = list[File](), set(taken)
            for node, listed in in_order(pool, self._listed, nodes):
                own = list(self._wanted(node, listed, known))
                wanted += own[:MAX_LOGS_PER_NODE]
                if rest := own[MAX_LOGS_PER_NODE:]:
                    self.bundle.record_missing(f"nodes/{node}", f"{plural(len(rest), 'log')} beyond the first {MAX_LOGS_PER_NODE}")
            if rest := wanted[MAX_LOGS:]:
                del wanted[MAX_LOGS:]
                self.bundle.record_missing("nodes", f"{plural(len(rest), 'log')} beyond the first {MAX_LOGS}")
            size = max(MIN_LOG_BYTES, min(TAIL, MAX_BYTES // max(1, len(wanted))))
            if size < TAIL:
                self.bundle.record_missing("nodes", f"of {plural(len(wanted), 'log')} more than the last {size // 1024} KiB of each")
            for (node, name), end in in_order(pool, lambda one: self._end(*one, size), wanted):
                self._add(node, name, end)

    def _nodes(self, faulty: Sequence[str]) -> list[str]:
        """Return the nodes to read: relevant ones first, then others; of a cluster that allocates its nodes only allocated ones."""
        relevant = list(dict.fromkeys([*faulty, *self.ranks_held]))
        try:
            names = self.source.names()
        except Exception as error:  # noqa: BLE001 (a bundle is needed most when much is broken)
            self.bundle.record_failure("nodes", error)
            names = relevant
        known, allocator = set(names), allocator_of(self.source)
        relevant = [node for node in relevant if node in known]
        others = [node for node in names if allocator is None or allocator.is_allocated(node)]
        if rest := relevant[MAX_NODES:]:
            self.bundle.record_missing(
                "nodes", f"{plural(len(rest), 'node')} that held ranks: `holdfast logs --node NODE` shows what lies there"
            )
        return list(dict.fromkeys([*relevant, *others]))[:MAX_NODES]

    def _listed(self, node: str) -> Logs | Exception:
        try:
            return self.source.logs(node, self.job)
        except Exception as error:  # noqa: BLE001 (a node that is unreachable, or of another version)
            return error

    def _wanted(self, node: str, listed: Logs | Exception, known: set[File]) -> Iterator[File]:
        """Yield the files to read on *node*: those that were not found in a folder that it shares."""
        if isinstance(listed, Exception):
            self.bundle.record_failure(f"nodes/{node}/logs", listed)
            return
        yield node, AGENT
        for name in listed.of(node, self.ranks_held):
            location = listed.place or node
            if (location, name) not in known:
                known.add((location, name))
                yield node, name

    def _end(self, node: str, name: str, size: int) -> bytes | Exception:
        try:
            return self.source.log(node, self.job, name, None, size)
        except Exception as error:  # noqa: BLE001 (as above)
            return error

    def _add(self, node: str, name: str, end: bytes | Exception) -> None:
        if isinstance(end, bytes):
            self.bundle.add(f"nodes/{node}/{name}", end.decode(errors="replace"))
        elif not isinstance(end, FileNotFoundError) or node in self.ranks_held:  # other nodes may never have had an agent
            self.bundle.record_failure(f"nodes/{node}/{name}", end)


def in_order(pool: ThreadPoolExecutor, act: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[tuple[Item, Made]]:
    """Yield each item with the result of *act*, in order; at most `AHEAD` results are computed ahead."""
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    for item in items:
        waiting.append((item, pool.submit(act, item)))
        if len(waiting) >= AHEAD:
            item, made = waiting.popleft()  # noqa: PLW2901 (the oldest one)
            yield item, made.result()
    for item, made in waiting:
        yield item, made.result()
