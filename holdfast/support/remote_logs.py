"""The ends of logs that lie on other machines: from each node what it has written, each file once, and few in memory at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from holdfast.agent.workers.log_files import AGENT
from holdfast.cluster import Logs, NodeBackend
from holdfast.cluster.interface import allocator_of
from holdfast.report.wording import plural
from holdfast.support.archive import TAIL, Bundle

MOST_NODES: Final = 128
"""Who has thousands knows by the history which ones matter, and reads them by `holdfast logs`."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Of all these logs together, before they are packed: where there are many, less is taken of each."""
LEAST: Final = 64 * 1024
"""Bytes of each that are taken all the same."""
MOST_LOGS: Final = MOST_BYTES // LEAST
MOST_OF_NODE: Final = MOST_LOGS // 4
"""Logs of one node, which says itself what lies there: none may take the place of all others'."""
HANDS: Final = 16
AHEAD: Final = 2 * HANDS
"""Logs that are read, or were read and wait to be written."""

Item = TypeVar("Item")
Made = TypeVar("Made")
File = tuple[str, str]
"""A folder's place and a file in it; or a node and a file there."""


@dataclass(frozen=True, slots=True)
class RemoteLogs:
    """What is to be gathered of one job."""

    bundle: Bundle
    source: NodeBackend
    job: str
    held: Mapping[str, Collection[int]]
    """Ranks that each node has held, who held some last first."""

    def run(self, faulty: Sequence[str], taken: Collection[File]) -> None:
        """Add the ends of logs that were not *taken* yet, of *faulty* nodes first; a node that cannot be asked costs its own alone."""
        nodes = self._nodes(faulty)
        with ThreadPoolExecutor(HANDS, thread_name_prefix="support") as hands:
            wanted, known = list[File](), set(taken)
            for node, listed in in_turn(hands, self._listed, nodes):
                own = list(self._wanted(node, listed, known))
                wanted += own[:MOST_OF_NODE]
                if left := own[MOST_OF_NODE:]:
                    self.bundle.lacks(f"nodes/{node}", f"{plural(len(left), 'log')} beyond the first {MOST_OF_NODE}")
            if left := wanted[MOST_LOGS:]:
                del wanted[MOST_LOGS:]
                self.bundle.lacks("nodes", f"{plural(len(left), 'log')} beyond the first {MOST_LOGS}")
            most = max(LEAST, min(TAIL, MOST_BYTES // max(1, len(wanted))))
            if most < TAIL:
                self.bundle.lacks("nodes", f"of {plural(len(wanted), 'log')} more than the last {most // 1024} KiB of each")
            for (node, name), end in in_turn(hands, lambda one: self._end(*one, most), wanted):
                self._add(node, name, end)

    def _nodes(self, faulty: Sequence[str]) -> list[str]:
        """Return the nodes to be asked: those that mattered, then others, of a cluster that lends its nodes only those that were lent."""
        mattered = list(dict.fromkeys([*faulty, *self.held]))
        try:
            names = self.source.names()
        except Exception as error:  # noqa: BLE001 (a bundle is wanted most where much is broken)
            self.bundle.fail("nodes", error)
            names = mattered
        known, allocator = set(names), allocator_of(self.source)
        mattered = [node for node in mattered if node in known]
        others = [node for node in names if allocator is None or allocator.is_allocated(node)]
        if left := mattered[MOST_NODES:]:
            self.bundle.lacks("nodes", f"{plural(len(left), 'node')} that held ranks: `holdfast logs --node NODE` shows what lies there")
        return list(dict.fromkeys([*mattered, *others]))[:MOST_NODES]

    def _listed(self, node: str) -> Logs | Exception:
        try:
            return self.source.logs(node, self.job)
        except Exception as error:  # noqa: BLE001 (a node that is away, or of another version)
            return error

    def _wanted(self, node: str, listed: Logs | Exception, known: set[File]) -> Iterator[File]:
        """Yield what is to be read on *node*: what is there and was not found in a folder that it shares."""
        if isinstance(listed, Exception):
            self.bundle.fail(f"nodes/{node}/logs", listed)
            return
        yield node, AGENT
        for name in listed.of(node, self.held):
            place = listed.place or node
            if (place, name) not in known:
                known.add((place, name))
                yield node, name

    def _end(self, node: str, name: str, most: int) -> bytes | Exception:
        try:
            return self.source.log(node, self.job, name, None, most)
        except Exception as error:  # noqa: BLE001 (as above)
            return error

    def _add(self, node: str, name: str, end: bytes | Exception) -> None:
        if isinstance(end, bytes):
            self.bundle.add(f"nodes/{node}/{name}", end.decode(errors="replace"))
        elif not isinstance(end, FileNotFoundError) or node in self.held:  # on others no agent need ever have been
            self.bundle.fail(f"nodes/{node}/{name}", end)


def in_turn(hands: ThreadPoolExecutor, act: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[tuple[Item, Made]]:
    """Yield each item with what *act* makes of it, in order; only so many as are soon taken are made ahead."""
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    for item in items:
        waiting.append((item, hands.submit(act, item)))
        if len(waiting) >= AHEAD:
            item, made = waiting.popleft()  # noqa: PLW2901 (the one that was asked for first)
            yield item, made.result()
    for item, made in waiting:
        yield item, made.result()
