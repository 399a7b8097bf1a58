"""Schedule pairwise network tests, and find the bad node of a failed pair.

A pair passes only if both nodes are healthy, so a node of a pair that passed is cleared. A node that failed with a cleared one is bad. What
remains after all rounds is unknown and reported as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.detectors.nodes.burn_in_results import CheckMark


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """A network test between two nodes."""

    a: str
    b: str
    mark: CheckMark
    words: str = ""

    @property
    def ends(self) -> frozenset[str]:
        """Return both nodes."""
        return frozenset((self.a, self.b))

    def other(self, node: str) -> str:
        """Return the partner of *node*."""
        return self.b if node == self.a else self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFinding:
    """Result of one node from all tests."""

    mark: CheckMark
    words: str


def next_round(tested: Sequence[str], partners: Sequence[str], tests: Collection[PairTest]) -> list[tuple[str, str]]:
    """Return the pairs of the next round: no node twice, no pair twice, and no node whose result is known.

    *tested* are paired with each other first; *partners*, which may run jobs, are used only if needed. A partner in a failed pair is
    suspect like any other node, and its results count only once it is cleared.
    """
    healthy, before = cleared(tests), {one.ends for one in tests}
    failed = [one for one in tests if one.mark is CheckMark.FAILED]
    suspects = list(dict.fromkeys(end for one in failed for end in (one.a, one.b) if end not in tested))
    known = healthy | bad_ends(tests)
    times = Counter(end for one in tests for end in one.ends)
    # Nodes with fewer tests come first.
    unresolved = sorted((node for node in (*tested, *suspects) if node not in known), key=lambda node: times[node])
    fresh = [node for node in partners if node not in suspects and node not in healthy]
    proven = [node for node in dict.fromkeys((*tested, *partners)) if node in healthy]
    pairs: list[tuple[str, str]] = []
    taken: set[str] = set()
    for node in unresolved:
        if node in taken:
            continue
        others = [one for one in unresolved if one != node]
        choice = [*proven, *fresh, *others] if tests else [*others, *fresh]
        other = next((one for one in choice if one not in taken and frozenset((node, one)) not in before), None)
        if other is not None:
            pairs.append((node, other))
            taken |= {node, other}
    return pairs


def cleared(tests: Iterable[PairTest]) -> set[str]:
    """Return the nodes of pairs that passed."""
    return {end for one in tests if one.mark is CheckMark.PASSED for end in one.ends}


def bad_ends(tests: Collection[PairTest]) -> set[str]:
    """Return the nodes that failed with a cleared one and never passed."""
    healthy = cleared(tests)
    return {end for one in tests if one.mark is CheckMark.FAILED for end in one.ends if end not in healthy and one.other(end) in healthy}


def findings(tested: Sequence[str], tests: Collection[PairTest]) -> dict[str, PairFinding]:
    """Return the result of each tested node."""
    healthy, bad = cleared(tests), bad_ends(tests)
    return {node: _found(node, [one for one in tests if node in one.ends], healthy, bad) for node in tested}


def _found(node: str, mine: Sequence[PairTest], healthy: set[str], bad: set[str]) -> PairFinding:
    failed = [one for one in mine if one.mark is CheckMark.FAILED]
    if node in bad:
        proof = next(one for one in failed if one.other(node) in healthy)
        return PairFinding(
            mark=CheckMark.FAILED, words=f"the node is at fault: {_result(proof, node)}, and {proof.other(node)} passed with others"
        )
    if node in healthy:
        partner = next(one.other(node) for one in mine if one.mark is CheckMark.PASSED)
        paths = [_result(one, node) for one in failed if one.other(node) in healthy]
        path = f"; the path between is at fault, not a node: {'; '.join(paths)}" if paths else ""
        return PairFinding(mark=CheckMark.PASSED, words=f"passed with {partner}{path}")
    if failed:
        which = " and ".join(_result(one, node) for one in failed)
        return PairFinding(mark=CheckMark.FAILED, words=f"one of the two nodes is at fault, unknown which: {which}")
    skipped = "; ".join(_result(one, node) for one in mine)
    return PairFinding(mark=CheckMark.SKIPPED, words=skipped or "there was no other node to test it with")


def _result(one: PairTest, node: str) -> str:
    return f"with {one.other(node)}: {one.words or one.mark}"
