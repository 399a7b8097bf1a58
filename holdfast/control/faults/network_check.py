"""The network that training traffic takes: which interface of each node, and how much goes through it, measured before the first step."""

from __future__ import annotations

import logging
import queue
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.errors import WorldError
from holdfast.log import note
from holdfast.report.wording import size

if TYPE_CHECKING:
    from holdfast.cluster import NodeBackend

log = logging.getLogger("holdfast.control")

SECONDS: Final = 0.25
"""How long each pair of nodes sends: long enough for TCP to open its window, short enough that a launch does not wait for it."""
HANDS: Final = 32
SLOW: Final = 0.5
"""Of the median of all pairs: a way that brings less is named."""
MOST: Final = 256
"""Pairs that are measured: of thousands, as many at even distances, which takes some seconds beside the launch."""
SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """What went from one node to the next."""

    source: str
    to: str
    rate: float | None
    """Bytes per second; None where nothing came through."""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.source} to {self.to} {f'{size(round(self.rate))}/s' if self.rate is not None else f'failed: {self.why}'}"


class NetworkCheck:
    """Measures the ways between a job's nodes, each to the next, while their starters warm up."""

    def __init__(self, source: NodeBackend) -> None:
        self._source = source
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()

    def begin(self, nodes: Sequence[str]) -> None:
        """Begin to measure between *nodes*; nobody waits for it."""
        if self._source.remote and nodes:
            threading.Thread(target=self._measure, args=(tuple(nodes),), name="traffic", daemon=True).start()

    def news(self) -> Iterator[str]:
        """Yield what was found since this was last asked."""
        with suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    def _measure(self, nodes: tuple[str, ...]) -> None:
        try:
            ways = {node: self._source.interface(node) or "an interface that it does not name" for node in nodes}
            pairs = list(zip(nodes, nodes[1:] + nodes[:1], strict=True)) if len(nodes) > 1 else []
            pairs = pairs[:: -(-len(pairs) // MOST) or 1]
            with ThreadPoolExecutor(HANDS, thread_name_prefix="traffic") as hands:
                found = list(hands.map(self._rate, *zip(*pairs, strict=True))) if pairs else []
            self._news.put(describe(ways, found))
        except WorldError as error:  # what is the matter with the node is found by whoever watches it
            note(log, "traffic.not-measured", why=error)

    def _rate(self, source: str, to: str) -> Pair:
        try:
            return Pair(source, to, self._source.bandwidth(source, to, SECONDS))
        except WorldError as error:
            return Pair(source, to, None, str(error))


def describe(ways: dict[str, str], found: Sequence[Pair]) -> str:
    """Say which interfaces training traffic takes (node to interface), and what came through between neighbours."""
    names = sorted(set(ways.values()))
    taken = names[0] if len(names) == 1 else ", ".join(f"{node}: {name}" for node, name in list(ways.items())[:SHOWN])
    rates = [pair.rate for pair in found if pair.rate is not None]
    if not rates:
        trouble = "; ".join(str(pair) for pair in found[:SHOWN])
        return f"training traffic goes over {taken}{f'; {trouble}' if trouble else ''}"
    median = statistics.median(rates)
    bad = [pair for pair in found if pair.rate is None or pair.rate < SLOW * median]
    slow = f"; slower than the others: {'; '.join(map(str, bad[:SHOWN]))}" if bad else ""
    count = f"{len(found)} pair{'s' if len(found) > 1 else ''} of neighbours at once"
    return f"training traffic goes over {taken}: {size(round(median))}/s between nodes ({count}, least {size(round(min(rates)))}/s){slow}"
