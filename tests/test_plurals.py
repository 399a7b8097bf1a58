"""Counted words in texts for people: right for one and for many, and never "(s)"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.plurals import all_of, named_ranks, plural

ROOT = Path(__file__).parent.parent
EITHER = re.compile(r"[A-Za-z]\((?:e?s|ies)\)")
"""A word that may be one or many: `rank(s)`. The patterns for other software's lines write `\\(s\\)`."""


@pytest.mark.parametrize(
    ("number", "counted", "of_all"),
    [(0, "0 ranks run", "0 ranks run"), (1, "1 rank runs", "1 rank runs"), (2, "2 ranks run", "all 2 ranks run")],
)
def test_noun_and_verb_agree_with_the_number(number: int, counted: str, of_all: str) -> None:
    """Of one, "all" would be wrong."""
    assert plural(number, "rank runs", "ranks run") == counted
    assert all_of(number, "rank runs", "ranks run") == of_all


def test_a_noun_alone_gets_an_s_and_thousands_are_separated() -> None:
    """As everywhere in what people read."""
    assert (plural(1, "node"), plural(4096, "node"), plural(2, "process", "processes")) == ("1 node", "4,096 nodes", "2 processes")


def test_ranks_are_named_with_their_noun() -> None:
    """As ranges; nobody is named by nothing."""
    assert (named_ranks(()), named_ranks([3]), named_ranks([2, 0, 1, 7])) == ("", "rank 3", "ranks 0–2, 7")  # noqa: RUF001 (a range)


def undecided(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of *source* that leaves open whether it counts one or many."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and EITHER.search(node.value):
            yield node.lineno, node.value


def test_no_text_of_ours_leaves_open_how_many() -> None:
    """`plural` says it; the search finds such a text in a plain string and in a formatted one."""
    assert [line for line, _ in undecided('a = "2 rank(s)"\nb = f"{a} process(es) run"\nc = r"rank\\(s\\)"')] == [1, 2]
    files = [file for top in ("holdfast", "detectors", "policies", "tasks", "flows") for file in (ROOT / top).rglob("*.py")]
    assert len(files) > 400
    found = [f"{file.relative_to(ROOT)}:{line} {text}" for file in files for line, text in undecided(file.read_text(encoding="utf-8"))]
    assert found == []
