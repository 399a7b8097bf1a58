"""Whose end of a bad pair is bad: drawn nodes, good and bad, against what the pairs alone can know."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.policies.nodes.pair_schedule import PairTest, findings, next_round
from tests.mentions import mentions

ROUNDS = 3
"""One in which everybody under test meets somebody, and two of re-pairing for those of bad pairs."""


def after_all_rounds(tested: Sequence[str], partners: Sequence[str], bad: Collection[str]) -> list[PairTest]:
    """Let nodes meet, of whom those that are *bad* spoil each pair that they are in."""
    met: list[PairTest] = []
    for _ in range(ROUNDS):
        pairs = next_round(tested, partners, met)
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends)), "nobody is in two places"
        assert not {frozenset(pair) for pair in pairs} & {one.ends for one in met}, "nobody meets twice"
        met += [PairTest(a=a, b=b, mark=CheckMark.FAILED if {a, b} & set(bad) else CheckMark.PASSED) for a, b in pairs]
    return met


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[str], list[str], set[str]]:
    """Draw nodes under test, partners, and the bad ones among all."""
    names = [f"n{number}" for number in range(draw(st.integers(2, 12)))]
    count = draw(st.integers(1, len(names)))
    return names[:count], names[count:], set(draw(st.lists(st.sampled_from(names))))


@given(fleets())
def test_nobody_is_blamed_for_another_and_nobody_bad_is_cleared(fleet: tuple[list[str], list[str], set[str]]) -> None:
    """However many are bad: who passes is well, and whose own end is called bad is bad."""
    tested, partners, bad = fleet
    for node, found in findings(tested, after_all_rounds(tested, partners, bad)).items():
        if found.mark is CheckMark.PASSED:
            assert node not in bad
        elif "the node is at fault" in found.words:
            assert node in bad
        else:
            assert "unknown which" in found.words


@given(st.integers(3, 12), st.data())
def test_one_bad_node_among_three_or_more_is_named_and_all_others_pass(count: int, data: st.DataObject) -> None:
    """Whether it is under test or lends itself as a partner, also where their number is odd."""
    names = [f"n{number}" for number in range(count)]
    tested = names[: data.draw(st.integers(1, count))]
    partners, bad = names[len(tested) :], data.draw(st.sampled_from(names))
    for node, found in findings(tested, after_all_rounds(tested, partners, {bad})).items():
        assert found.mark is (CheckMark.FAILED if node == bad else CheckMark.PASSED), (node, bad, found)
        assert node != bad or mentions(found.words, "node is at fault")


@given(st.integers(2, 4), st.data())
def test_several_bad_nodes_are_all_named_where_enough_are_healthy(many: int, data: st.DataObject) -> None:
    """With twice as many good nodes there are two good ones that meet, and each bad one meets one of those that passed."""
    names = [f"n{number}" for number in range(4 * many)]
    bad = set(data.draw(st.lists(st.sampled_from(names), min_size=many, max_size=many, unique=True)))
    found = findings(names, after_all_rounds(names, [], bad))
    assert {node for node, one in found.items() if one.mark is CheckMark.FAILED and mentions(one.words, "node is at fault")} == bad


def test_of_two_nodes_alone_the_bad_one_is_not_known() -> None:
    """It is said so of both."""
    found = findings(["a", "b"], after_all_rounds(["a", "b"], [], {"b"}))
    assert [one.mark for one in found.values()] == [CheckMark.FAILED] * 2
    assert all("unknown which" in one.words for one in found.values())


def test_partners_are_asked_only_where_they_are_needed() -> None:
    """Nodes under test meet each other; who is left over, or in a bad pair, meets a partner."""
    assert next_round(["a", "b"], ["p", "q"], []) == [("a", "b")]
    assert next_round(["a", "b", "c"], ["p", "q"], []) == [("a", "b"), ("c", "p")]
    failed = [PairTest(a="a", b="b", mark=CheckMark.FAILED)]
    assert next_round(["a", "b"], ["p", "q"], failed) == [("a", "p"), ("b", "q")]
    passed = [PairTest(a="a", b="b", mark=CheckMark.PASSED)]
    assert next_round(["a", "b"], ["p", "q"], passed) == [], "both are known to be well"


def test_a_bad_path_between_two_healthy_nodes_blames_neither() -> None:
    """Both are well with others."""
    met = [
        PairTest(a="a", b="b", mark=CheckMark.FAILED, words="slow"),
        PairTest(a="a", b="c", mark=CheckMark.PASSED),
        PairTest(a="b", b="d", mark=CheckMark.PASSED),
    ]
    found = findings(["a", "b"], met)
    assert [one.mark for one in found.values()] == [CheckMark.PASSED] * 2
    assert mentions(found["a"].words, "b: slow")


def test_a_meeting_that_could_not_be_speaks_against_nobody() -> None:
    """Nor does having nobody to meet."""
    met = [PairTest(a="a", b="b", mark=CheckMark.SKIPPED, words="b is away")]
    assert findings(["a", "c"], met)["a"].mark is CheckMark.SKIPPED
    assert mentions(findings(["a", "c"], met)["c"].words, "no other node")
