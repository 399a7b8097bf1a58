"""Text on a terminal: lines that fit, broken between words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from holdfast.cli.output import hanging, wrapped

WORDS = st.lists(st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=30), min_size=1, max_size=20)


@given(words=WORDS, width=st.integers(4, 120), indent=st.integers(0, 20))
def test_no_line_is_too_long_and_nothing_is_lost(words: list[str], width: int, indent: int) -> None:
    """A word is cut only where it is longer than a line."""
    text = " ".join(words)
    lines = wrapped(text, width, indent=indent)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    room = width - min(indent, width // 3)
    whole = {word for line in lines for word in line.split()}
    assert {word for word in words if cell_len(word) <= room} <= whole


def test_a_path_is_broken_after_a_slash_and_a_time_gives_a_hanging_indent() -> None:
    """Where neither fits on the line."""
    text = "12:00:01  Log: /tmp/holdfast/jobs/gpt/flow.log"
    assert wrapped(text, 32, indent=hanging(text)) == ["12:00:01  Log:", "          /tmp/holdfast/jobs/", "          gpt/flow.log"]
    assert hanging("! 12:00:01  incident 1") == 12
    assert hanging("no time") == 0
