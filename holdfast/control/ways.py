"""Whether a job's nodes reach each other: connections tried between them when ranks wait for each other and nobody is known to be gone."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from detectors.evidence import Severed
from holdfast.errors import WorldError
from holdfast.log import note

if TYPE_CHECKING:
    from holdfast.cluster import NodeSource

log = logging.getLogger("holdfast.control")

SECONDS: Final = 1.0
"""Within which a connection between two nodes has to come about: a lost packet is sent again after a second at first (RFC 6298)."""
HANDS: Final = 32
MOST: Final = 16
"""Nodes between which all pairs are tried; of more, those that something speaks against are, each with some others."""
OTHERS: Final = 3
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


def severed(tried: Mapping[Pair, str], at: float) -> list[Severed]:
    """Return the nodes that explain what failed of *tried* (two nodes, and why they did not meet; empty where they did).

    The one with most failures is taken for the reason of its own, as long as `LEAST` others do not reach it and it reaches nobody; what is
    left over is looked at without it. Where nobody meets anybody, it is no node's doing.
    """
    left, found = dict(tried), list[Severed]()
    while True:
        failed = Counter(node for pair, why in left.items() if why for node in pair)
        met = {node for pair, why in left.items() if not why for node in pair}
        alone = [(count, node) for node, count in failed.items() if count >= LEAST and node not in met]
        if not alone or not met:
            return found
        _, node = max(alone)
        whys = {next(iter({*pair} - {node})): why for pair, why in left.items() if node in pair}
        found.append(Severed(node=node, at=at, peers=tuple(sorted(whys)), why=next(iter(whys.values()))))
        left = {pair: why for pair, why in left.items() if node not in pair}


def look(source: NodeSource, suspects: Collection[str], nodes: Sequence[str]) -> tuple[list[Severed], str]:
    """Have *nodes* try to reach each other; return who is cut off from the others, and what else is to be told.

    Nodes of one machine have nothing between them. Takes about a second where something fails, next to nothing else.
    """
    pairs = pairs_of(suspects, nodes) if source.remote else []
    if not pairs:
        return [], ""
    begun = time.time()
    with ThreadPoolExecutor(HANDS, thread_name_prefix="ways") as hands:
        answers = dict(zip(pairs, hands.map(lambda pair: _meet(source, *pair), pairs), strict=True))
    tried = {pair: why for pair, why in answers.items() if why is not None}
    found = severed(tried, begun)
    named = {one.node for one in found}
    others = [(*pair, why) for pair, why in tried.items() if why and named.isdisjoint(pair)]
    note(log, "ways.looked-at", pairs=len(tried), failed=sum(map(bool, tried.values())), cut_off=sorted(named))
    if not others:
        return found, ""
    first, second, why = others[0]
    rest = f", and so do {len(others) - 1} more pair(s)" if len(others) > 1 else ""
    return found, f"{first} and {second} do not reach each other ({why}){rest}; which of them is cut off cannot be told from that"


def _meet(source: NodeSource, one: str, other: str) -> str | None:
    """Say why *one* does not reach *other*; empty when it does, None when it could not be tried: that is another matter."""
    try:
        return source.meets(one, other, SECONDS)
    except WorldError:
        return None
