"""Percentages and bandwidths are written as they are read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from holdfast.spec import LocalCluster
from holdfast.spec.files.problems import problems_in
from holdfast.spec.files.units import format_bandwidth, format_percent, parse_bandwidth, parse_percent


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


@pytest.mark.parametrize(("text", "bandwidth"), [("400Gbit/s", 50e9), ("2 TB/s", 2e12), ("1.5gb/s", 1.5e9), ("800kbit/s", 1e5)])
def test_a_bandwidth_is_in_bits_or_bytes_a_second_and_is_written_as_it_is_read(text: str, bandwidth: float) -> None:
    """In bytes a second."""
    assert parse_bandwidth(text) == pytest.approx(bandwidth)
    assert parse_bandwidth(format_bandwidth(bandwidth)) == pytest.approx(bandwidth)


@pytest.mark.parametrize("text", ["400", "0GB/s", "400Gbit", "-1GB/s", 400, True, None, "fast"])
def test_what_is_no_bandwidth_is_refused(text: object) -> None:
    """Above all a bare number, and nothing."""
    with pytest.raises(PydanticCustomError):
        parse_bandwidth(text)
