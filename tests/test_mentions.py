"""A part counts only where it is a whole word or number."""

from __future__ import annotations

import pytest

from tests.each import each
from tests.mentions import mentions, one_line_mentions


@each(
    "text",
    [
        "15 ranks", "0.5 s", "5.0 s", "5,000 steps", "1,005 steps", "at 12:05", "5:30 h", "node-5", "5-7", "-5", "rank5", "5th", "5.yaml",
        "v1.5", "step_5", "",
    ],
)  # fmt: skip
def test_a_number_inside_of_another_one_or_of_a_name_does_not_count(text: str) -> None:
    """Five is none of these."""
    assert not mentions(text, 5)


@each("text", ["5", "5 ranks", "rank 5.", "rank 5, rank 6", "step 5: lost", "(5)", "'5'", "5/8", "5%", "ranks=5", "[5]"])
def test_a_number_counts_beside_punctuation(text: str) -> None:
    """A sentence may end with it."""
    assert mentions(text, 5)


@each(
    ("text, part, is_there"),
    [
        ("node-1 is left", "node-1", True), ("node-10 is left", "node-1", False), ("my-node-1", "node-1", False),
        ("/data/mine.yaml: line 3", "mine.yaml", True), ("mine.yaml", "mine", False), ("holdfast.node", "node", False),
        ("timeouts.hang_min", "timeouts.hang", False), ("`holdfast run x`", "holdfast run x", True), ("unhealthy", "healthy", False),
        ("maintenance[0].nodes", "nodes", True), ("2.00 s", "2.00 s", True), ("12.00 s", "2.00 s", False), ("2.00 steps", "2.00 s", False),
    ],
)  # fmt: skip
def test_a_word_counts_only_whole(text: str, part: str, is_there: bool) -> None:  # noqa: FBT001
    """Neither inside a longer word nor inside a dotted or hyphenated name."""
    assert mentions(text, part) is is_there


def test_all_parts_are_wanted_and_in_one_line_if_asked_for() -> None:
    """In any order."""
    text = "node-1: lost\nnode-2: 3 ranks"
    assert mentions(text, 3, "node-1")
    assert not mentions(text, 3, "node-3")
    assert one_line_mentions(text, 3, "node-2")
    assert not one_line_mentions(text, 3, "node-1")


@pytest.mark.parametrize("parts", [(), ("",), ("node-1", "")], ids=str)
def test_a_claim_without_a_part_is_a_mistake(parts: tuple[str, ...]) -> None:
    """It would hold of every text."""
    with pytest.raises(AssertionError):
        mentions("node-1", *parts)
