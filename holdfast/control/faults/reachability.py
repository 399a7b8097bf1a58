"""Whether a job's nodes reach each other: connections tried between them when ranks wait for each other and nobody is known to be gone."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from detectors.evidence import NodePartitioned
from holdfast.errors import WorldError
from holdfast.log import note

if TYPE_CHECKING:
    from detectors.catalogue import Fault
    from holdfast.cluster import NodeBackend

log = logging.getLogger("holdfast.control")

SECONDS: Final = 1.0
"""Within which a connection between two nodes has to come about: a lost packet is sent again after a second at first (RFC 6298)."""
HANDS: Final = 32
MOST: Final = 16
"""Nodes between which all pairs are tried; of more, those that something speaks against are, each with some others."""
OTHERS: Final = 3
SHARE: Final = 8
"""Of so many members one at most is let go because others do not meet it: more are the matter of what lies between many."""
LEAST: Final = 2
"""Others that do not reach a node before it is called cut off: of two that do not reach each other nobody knows which one it is."""

Pair = tuple[str, str]


def pairs_of(suspects: Collection[str], nodes: Sequence[str]) -> list[Pair]:
    """Return which pairs of *nodes* are to be tried: all of few, else those of *suspects* with some others, and of these others."""
    if len(nodes) <= MOST:
        return list(itertools.combinations(nodes, 2))
    doubted = [node for node in nodes if node in suspects][:MOST] or list(nodes[:1])
    others = [node for node in nodes if node not in doubted][:OTHERS]
    return [*itertools.product(doubted, others), *itertools.combinations(others, 2)]


def severed(tried: Mapping[Pair, str], at: float) -> list[NodePartitioned]:
    """Return the nodes that explain what failed of *tried* (two nodes, and why they did not meet; empty where they did).

    The one with most failures is taken for the reason of its own, as long as `LEAST` others do not reach it and it reaches nobody; what is
    left over is looked at without it. Where nobody meets anybody, it is no node's doing.
    """
    left, found = dict(tried), list[NodePartitioned]()
    while True:
        failed = Counter(node for pair, why in left.items() if why for node in pair)
        met = {node for pair, why in left.items() if not why for node in pair}
        alone = [(count, node) for node, count in failed.items() if count >= LEAST and node not in met]
        if not alone or not met:
            return found
        _, node = max(alone)
        found.append(_of(node, left, at, alone=True))
        left = {pair: why for pair, why in left.items() if node not in pair}


def apart(pairs: Mapping[Pair, str], members: Sequence[str], at: float) -> list[NodePartitioned]:
    """Return which *members* are to go so that those which stay all reach each other, when these *pairs* do not meet, and why not.

    The one that is in most pairs goes first, of several the last one of *members*. None where more than one in `SHARE` would have to go.
    """
    left, found = {pair: why for pair, why in pairs.items() if set(pair) <= set(members)}, list[NodePartitioned]()
    while left:
        times = Counter(node for pair in left for node in pair)
        node = max(times, key=lambda one: (times[one], members.index(one)))
        found.append(_of(node, left, at, alone=False))
        left = {pair: why for pair, why in left.items() if node not in pair}
    return found if len(found) <= max(1, len(members) // SHARE) else []


def _of(node: str, pairs: Mapping[Pair, str], at: float, *, alone: bool) -> NodePartitioned:
    """Return what *pairs* say of *node*, which is in some of them."""
    whys = {next(iter({*pair} - {node})): why for pair, why in pairs.items() if node in pair}
    return NodePartitioned(node=node, at=at, peers=tuple(sorted(whys)), why=next(iter(whys.values())), alone=alone)


def check_connections(source: NodeBackend, faults: Iterable[Fault], nodes: Sequence[str]) -> tuple[list[NodePartitioned], dict[Pair, str]]:
    """Have *nodes* try to reach each other; return who is cut off from the others, and which pairs else do not meet, and why.

    Of many nodes those are looked at that *faults* name.
    Nodes of one machine have nothing between them. Takes about a second where something fails, next to nothing else.
    """
    pairs = pairs_of({str(fault.node) for fault in faults}, nodes) if source.remote else []
    if not pairs:
        return [], {}
    begun = time.time()
    with ThreadPoolExecutor(HANDS, thread_name_prefix="ways") as hands:
        answers = dict(zip(pairs, hands.map(lambda pair: _meet(source, *pair), pairs), strict=True))
    tried = {pair: why for pair, why in answers.items() if why is not None}
    found = severed(tried, begun)
    named = {one.node for one in found}
    others = {pair: why for pair, why in tried.items() if why and named.isdisjoint(pair)}
    note(log, "ways.looked-at", pairs=len(tried), failed=sum(map(bool, tried.values())), cut_off=sorted(named))
    return found, others


def describe(pairs: Mapping[Pair, str]) -> str:
    """Say which *pairs* (at least one) do not meet."""
    (first, second), why = next(iter(pairs.items()))
    rest = f", and so do {len(pairs) - 1} more pair(s)" if len(pairs) > 1 else ""
    return f"{first} and {second} do not reach each other ({why}){rest}"


def _meet(source: NodeBackend, one: str, other: str) -> str | None:
    """Say why *one* does not reach *other*; empty when it does, None when it could not be tried: that is another matter."""
    try:
        return source.check_connection(one, other, SECONDS)
    except WorldError:
        return None
