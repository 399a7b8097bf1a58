"""Percentages are written as they are read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from holdfast.spec import LocalCluster
from holdfast.spec.files.problems import problems_in
from holdfast.spec.files.units import format_percent, parse_percent


@pytest.mark.parametrize("text", ["0%", "0.00005%", "0.000001%", "1%", "12.5%", "33.333333%", "100%"])
def test_a_percentage_is_read_back(text: str) -> None:
    """Also a tiny one, which Python would write with an exponent."""
    assert format_percent(parse_percent(text)) == text


@pytest.mark.parametrize(("text", "most"), [("95%", "90%"), ("0%", "90%")])
def test_the_bounds_are_in_percent_too(text: str, most: str) -> None:
    """As the value in the file."""
    with pytest.raises(ValidationError) as refused:
        LocalCluster.model_validate({"burn_in": {"memory": text}})
    (problem,) = problems_in(refused.value, LocalCluster)
    assert problem.field == "burn_in.memory"
    assert text in problem.reason
    assert most in problem.cure
