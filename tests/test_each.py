"""A test of many cases reports each one that fails, and only those."""

from __future__ import annotations

import pytest

from tests.each import each


def test_every_case_is_tried_and_every_failure_reported() -> None:
    """The first failure hides no later one, and each says of which case it is."""
    tried: list[int] = []

    @each("number", range(5))
    def is_even(number: int) -> None:
        tried.append(number)
        assert number % 2 == 0

    with pytest.raises(ExceptionGroup, match="2 of 5 cases failed") as caught:
        is_even()
    assert tried == [0, 1, 2, 3, 4]
    assert [error.__notes__ for error in caught.value.exceptions] == [["in the case 1"], ["in the case 3"]]


def test_a_case_may_fail_in_words_and_may_not_be_skipped() -> None:
    """Neither ends the test at that case."""
    tried: list[str] = []

    @each("word", ["fail", "skip", "raise", "pass"])
    def outcome(word: str) -> None:
        tried.append(word)
        if word == "fail":
            pytest.fail("it is broken")
        if word == "skip":
            pytest.skip("no GPU")
        assert word != "raise"

    with pytest.raises(ExceptionGroup, match="3 of 4 cases failed") as caught:
        outcome()
    assert tried == ["fail", "skip", "raise", "pass"]
    failed, skipped, _ = caught.value.exceptions
    assert str(failed) == "it is broken"
    assert "no GPU" in str(skipped)
    assert [error.__notes__ for error in caught.value.exceptions] == [[f"in the case {word!r}"] for word in tried[:3]]


@each("word, length", [("a", 1), ("bc", 2)])
def test_cases_of_several_values_go_with_fixtures(request: pytest.FixtureRequest, word: str, length: int) -> None:
    """As the arguments of a parametrised test."""
    assert request.node.name == "test_cases_of_several_values_go_with_fixtures"
    assert len(word) == length


def test_tables_can_be_combined() -> None:
    """Each case of one with each of the other."""
    seen = []

    @each("one", "ab")
    @each("other", "xy")
    def pairs(one: str, other: str) -> None:
        seen.append(one + other)

    pairs()
    assert seen == ["ax", "ay", "bx", "by"]


def test_an_empty_table_is_a_mistake() -> None:
    """It would pass for ever."""
    with pytest.raises(AssertionError, match="claims nothing"):
        each("name", [])
