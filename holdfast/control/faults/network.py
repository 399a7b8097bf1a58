"""Connections and bandwidth between a job's nodes: tried when ranks wait for each other, measured once during a launch."""

from __future__ import annotations

import itertools
import logging
import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.detectors.evidence import NodePartitioned
from holdfast.errors import WorldError
from holdfast.log import note
from holdfast.plurals import plural
from holdfast.report.text.wording import size

if TYPE_CHECKING:
    from holdfast.cluster import NodeBackend
    from holdfast.detectors.catalogue import Fault

log = logging.getLogger("holdfast.control")

CONNECT_SECONDS: Final = 1.0
"""How long a connection between two nodes may take: TCP sends a lost packet again after a second at first (RFC 6298)."""
THREADS: Final = 32
ALL_PAIRS: Final = 16
"""Nodes up to which all pairs are tried; of more, those under suspicion are tried with some others."""
OTHERS: Final = 3
MAX_SHARE: Final = 8
"""At most one in so many members is dropped because others do not reach it: more failures are the network's."""
MIN_FAILURES: Final = 2
"""Others that must not reach a node before it counts as partitioned: of two that do not reach each other it could be either."""
SEND_SECONDS: Final = 0.25
"""How long each pair sends for a measurement: long enough for TCP to open its window, short enough that a launch does not wait for it."""
SLOW: Final = 0.5
"""A pair with less than this share of the median bandwidth is reported."""
MAX_MEASURED: Final = 256
"""Pairs that are measured: of thousands as many at even distances, which takes some seconds alongside the launch."""
SHOWN: Final = 4

Pair = tuple[str, str]


def pairs_of(suspects: Collection[str], nodes: Sequence[str]) -> list[Pair]:
    """Return which pairs of *nodes* to try: all of few nodes, else *suspects* with some others, and these others with each other."""
    if len(nodes) <= ALL_PAIRS:
        return list(itertools.combinations(nodes, 2))
    suspected = [node for node in nodes if node in suspects][:ALL_PAIRS] or list(nodes[:1])
    others = [node for node in nodes if node not in suspected][:OTHERS]
    return [*itertools.product(suspected, others), *itertools.combinations(others, 2)]


def partitioned(tried: Mapping[Pair, str], at: float) -> list[NodePartitioned]:
    """Return the nodes that explain the failures of *tried* (two nodes, and why they did not connect; empty where they did).

    The node with most failures is taken for their cause if at least `MIN_FAILURES` others do not reach it and none does; the rest is
    examined without it. Where no pair connects, no node is the cause.
    """
    remaining, found = dict(tried), list[NodePartitioned]()
    while True:
        failed = Counter(node for pair, why in remaining.items() if why for node in pair)
        connected = {node for pair, why in remaining.items() if not why for node in pair}
        causes = [(count, node) for node, count in failed.items() if count >= MIN_FAILURES and node not in connected]
        if not causes or not connected:
            return found
        _, node = max(causes)
        found.append(_evidence(node, remaining, at, alone=True))
        remaining = {pair: why for pair, why in remaining.items() if node not in pair}


def nodes_to_drop(pairs: Mapping[Pair, str], members: Sequence[str], at: float) -> list[NodePartitioned]:
    """Return which *members* have to leave so that the others all reach each other, when these *pairs* do not connect, and why not.

    The node in most pairs goes first, of several the last one of *members*. Empty where more than one in `MAX_SHARE` would have to go.
    """
    remaining, found = {pair: why for pair, why in pairs.items() if set(pair) <= set(members)}, list[NodePartitioned]()
    while remaining:
        times = Counter(node for pair in remaining for node in pair)
        node = max(times, key=lambda one: (times[one], members.index(one)))
        found.append(_evidence(node, remaining, at, alone=False))
        remaining = {pair: why for pair, why in remaining.items() if node not in pair}
    return found if len(found) <= max(1, len(members) // MAX_SHARE) else []


def _evidence(node: str, pairs: Mapping[Pair, str], at: float, *, alone: bool) -> NodePartitioned:
    """Return the failures of *pairs* that *node* is in, as evidence."""
    reasons = {next(iter({*pair} - {node})): why for pair, why in pairs.items() if node in pair}
    return NodePartitioned(node=node, at=at, peers=tuple(sorted(reasons)), why=next(iter(reasons.values())), alone=alone)


def check_connections(source: NodeBackend, faults: Iterable[Fault], nodes: Sequence[str]) -> tuple[list[NodePartitioned], dict[Pair, str]]:
    """Have *nodes* connect to each other; return which are partitioned, and which other pairs do not connect, and why.

    Of many nodes, those that *faults* name are tried. Nodes of one machine share no network. Takes about a second where something fails.
    """
    pairs = pairs_of({str(fault.node) for fault in faults}, nodes) if source.remote else []
    if not pairs:
        return [], {}

    def connect(pair: Pair) -> str | None:
        """Return why the pair does not connect; empty when it does, None when that could not be tried, which is another problem."""
        try:
            return source.check_connection(*pair, CONNECT_SECONDS)
        except WorldError:
            return None

    start = time.time()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="network") as threads:
        answers = dict(zip(pairs, threads.map(connect, pairs), strict=True))
    tried = {pair: why for pair, why in answers.items() if why is not None}
    found = partitioned(tried, start)
    named = {one.node for one in found}
    others = {pair: why for pair, why in tried.items() if why and named.isdisjoint(pair)}
    note(log, "network.checked", pairs=len(tried), failed=sum(map(bool, tried.values())), cut_off=sorted(named))
    return found, others


def describe(pairs: Mapping[Pair, str]) -> str:
    """Return a line about *pairs* (at least one) that do not connect."""
    (first, second), why = next(iter(pairs.items()))
    more = len(pairs) - 1
    rest = f", and neither {'does' if more == 1 else 'do'} {plural(more, 'more pair')}" if more else ""
    return f"{first} and {second} do not reach each other ({why}){rest}"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What one node sent to the next."""

    source: str
    to: str
    rate: float | None
    """Bytes per second; None where the measurement failed."""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.source} to {self.to} {f'{size(round(self.rate))}/s' if self.rate is not None else f'failed: {self.why}'}"


class NetworkCheck:
    """Measures the bandwidth from each of a job's nodes to the next, while their fork servers start."""

    def __init__(self, source: NodeBackend) -> None:
        self._source = source
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()

    def begin(self, nodes: Sequence[str]) -> None:
        """Begin to measure between *nodes* in another thread."""
        if self._source.remote and nodes:
            threading.Thread(target=self._measure, args=(tuple(nodes),), name="network", daemon=True).start()

    def news(self) -> Iterator[str]:
        """Yield the results since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    def _measure(self, nodes: tuple[str, ...]) -> None:
        try:
            interfaces = {node: self._source.interface(node) or "an unknown interface" for node in nodes}
            pairs = list(zip(nodes, nodes[1:] + nodes[:1], strict=True)) if len(nodes) > 1 else []
            pairs = pairs[:: -(-len(pairs) // MAX_MEASURED) or 1]
            with ThreadPoolExecutor(THREADS, thread_name_prefix="network") as threads:
                found = list(threads.map(self._send, *zip(*pairs, strict=True))) if pairs else []
            self._news.put(describe_bandwidth(interfaces, found))
        except WorldError as error:  # whoever monitors the node finds its fault
            note(log, "network.not-measured", why=error)

    def _send(self, source: str, to: str) -> Bandwidth:
        try:
            return Bandwidth(source, to, self._source.bandwidth(source, to, SEND_SECONDS))
        except WorldError as error:
            return Bandwidth(source, to, None, str(error))


def describe_bandwidth(interfaces: dict[str, str], found: Sequence[Bandwidth]) -> str:
    """Return a line about the interfaces of training traffic (node to interface), and the bandwidth between neighbours."""
    names = sorted(set(interfaces.values()))
    taken = names[0] if len(names) == 1 else ", ".join(f"{node}: {name}" for node, name in list(interfaces.items())[:SHOWN])
    rates = [one.rate for one in found if one.rate is not None]
    if not rates:
        problem = "; ".join(str(one) for one in found[:SHOWN])
        return f"training traffic goes over {taken}{f'; {problem}' if problem else ''}"
    median = statistics.median(rates)
    bad = [one for one in found if one.rate is None or one.rate < SLOW * median]
    slow = f"; slower than the others: {'; '.join(map(str, bad[:SHOWN]))}" if bad else ""
    count = f"{len(found)} pair{'s' if len(found) > 1 else ''} of neighbours at once"
    return f"training traffic goes over {taken}: {size(round(median))}/s between nodes ({count}, least {size(round(min(rates)))}/s){slow}"
