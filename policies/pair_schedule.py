"""Who tries the network with whom, and whose end of a bad pair is the bad one. Pure.

A pair passes only when both its ends are well, so a node of a pair that passed is cleared. A node that failed with one that is cleared by
another pair is the bad end. What is left when all rounds are over is not known, and said to be so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from detectors.burn_in_results import CheckMark


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """Two nodes that tried the network between them."""

    a: str
    b: str
    mark: CheckMark
    words: str = ""

    @property
    def ends(self) -> frozenset[str]:
        """Return both nodes."""
        return frozenset((self.a, self.b))

    def other(self, node: str) -> str:
        """Return with whom *node* met."""
        return self.b if node == self.a else self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFinding:
    """What all meetings together say of one node's end."""

    mark: CheckMark
    words: str


def next_round(tested: Sequence[str], partners: Sequence[str], met: Collection[PairTest]) -> list[tuple[str, str]]:
    """Return who meets next: nobody twice in a round, no two that have met, and nobody whose end is known to be well or bad.

    *tested* are paired among themselves first: *partners*, which may be at work, are asked only where one is needed. A partner that was in
    a bad pair is in doubt like any other node, and has to be cleared for its word to count.
    """
    well, before = cleared(met), {one.ends for one in met}
    failed = [one for one in met if one.mark is CheckMark.FAILED]
    doubted = list(dict.fromkeys(end for one in failed for end in (one.a, one.b) if end not in tested))
    known = well | bad_ends(met)
    times = Counter(end for one in met for end in one.ends)
    wanting = sorted((node for node in (*tested, *doubted) if node not in known), key=lambda node: times[node])  # who rested goes first
    fresh = [node for node in partners if node not in doubted and node not in well]
    proven = [node for node in dict.fromkeys((*tested, *partners)) if node in well]
    pairs: list[tuple[str, str]] = []
    taken: set[str] = set()
    for node in wanting:
        if node in taken:
            continue
        others = [one for one in wanting if one != node]
        choice = [*proven, *fresh, *others] if met else [*others, *fresh]
        other = next((one for one in choice if one not in taken and frozenset((node, one)) not in before), None)
        if other is not None:
            pairs.append((node, other))
            taken |= {node, other}
    return pairs


def cleared(met: Iterable[PairTest]) -> set[str]:
    """Return the nodes of pairs that passed."""
    return {end for one in met if one.mark is CheckMark.PASSED for end in one.ends}


def bad_ends(met: Collection[PairTest]) -> set[str]:
    """Return the nodes that failed with one that is cleared, and passed with nobody."""
    well = cleared(met)
    return {end for one in met if one.mark is CheckMark.FAILED for end in one.ends if end not in well and one.other(end) in well}


def findings(tested: Sequence[str], met: Collection[PairTest]) -> dict[str, PairFinding]:
    """Return what is known of each node's end after all meetings."""
    well, bad = cleared(met), bad_ends(met)
    return {node: _found(node, [one for one in met if node in one.ends], well, bad) for node in tested}


def _found(node: str, mine: Sequence[PairTest], well: set[str], bad: set[str]) -> PairFinding:
    failed = [one for one in mine if one.mark is CheckMark.FAILED]
    if node in bad:
        proof = next(one for one in failed if one.other(node) in well)
        return PairFinding(
            mark=CheckMark.FAILED, words=f"the bad end is its own: {_told(proof, node)}, and {proof.other(node)} is well with others"
        )
    if node in well:
        partner = next(one.other(node) for one in mine if one.mark is CheckMark.PASSED)
        strange = [_told(one, node) for one in failed if one.other(node) in well]
        way = f"; the way between, and neither end, is bad: {'; '.join(strange)}" if strange else ""
        return PairFinding(mark=CheckMark.PASSED, words=f"well with {partner}{way}")
    if failed:
        which = " and ".join(_told(one, node) for one in failed)
        return PairFinding(mark=CheckMark.FAILED, words=f"one of both ends is bad, not known which: {which}")
    blind = "; ".join(_told(one, node) for one in mine)
    return PairFinding(mark=CheckMark.SKIPPED, words=blind or "there was no other node to try it with")


def _told(one: PairTest, node: str) -> str:
    return f"with {one.other(node)}: {one.words or one.mark}"
