"""What a database cannot hold is made holdable, and what it can is left as it is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.history.sanitize import clean, to_json

TEXT = st.text(st.characters(exclude_categories=()))
"""With lone surrogates and NUL."""
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(VALUES)
def test_cleaned_values_can_be_stored_and_do_not_change_again(value: Any) -> None:
    """It is strict JSON of texts that every database takes; cleaned again it is the same, as a copy."""
    cleaned = clean(value)
    text = json.dumps(cleaned, allow_nan=False, ensure_ascii=False)
    assert "\\u0000" not in text
    text.encode("utf-8")
    assert clean(cleaned) == cleaned
    assert json.loads(to_json(value)) == cleaned


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        ({"a": [1, 2.5, "x", None, True]}, {"a": [1, 2.5, "x", None, True]}),
        ([("a", (1, 2)), {"b": "ü 😀 \\ud800 \\u0000"}], [["a", [1, 2]], {"b": "ü 😀 \\ud800 \\u0000"}]),
        ({"loss": math.nan, "best": [-math.inf, math.inf]}, {"loss": "NaN", "best": ["-Infinity", "Infinity"]}),
        ({"said\0": ["\0", "half \ud83d"]}, {"said\\0": ["\\0", "half \\ud83d"]}),
        ({1: {2}, "what": ValueError("no")}, {"1": [2], "what": "no"}),
    ],
)
def test_each_kind_of_value_becomes_json(value: Any, cleaned: Any) -> None:
    """Sequences become lists; what is no JSON becomes its text; numbers that JSON does not know become words."""
    assert clean(value) == cleaned


def test_a_cleaned_value_is_a_copy() -> None:
    """What its owner does to it later does not change what waits to be written."""
    value = {"ranks": [1, 2]}
    cleaned = clean(value)
    value["ranks"].append(3)
    assert cleaned == {"ranks": [1, 2]}
