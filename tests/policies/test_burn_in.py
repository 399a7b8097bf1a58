"""When a node that was tried out is well: tables of figures against limits, and results of several checks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.detectors.codec import MalformedData, packed, unpacked
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.burn_in import BurnInThresholds, apply_thresholds, outcome, seen
from tests.mentions import mentions

LIMITS = BurnInThresholds(disk=100.0, network=50.0, latency=2.0, clock=1.0)


def a_check(mark: CheckMark = CheckMark.PASSED, **fields: Any) -> Check:
    """Return a check that ended so."""
    return Check(**{"name": "network", "mark": mark, "words": "fine", **fields})


BEYOND = {
    "disk": ({"written MB/s": 99.0}, "its disk wrote 99 MB/s, at least 100 MB/s is needed"),
    "sending": ({"sent MB/s": 10.0, "received MB/s": 60.0}, "it sent 10 MB/s, at least 50 MB/s is needed"),
    "receiving": ({"sent MB/s": 60.0, "received MB/s": 10.0}, "it received 10 MB/s"),
    "latency": ({"round trip ms": 2.5}, "took 2.5 ms, at most 2 ms is allowed"),
    "clock behind": ({"offset s": -1.4, "uncertain s": 0.1}, "off by -1.4 s, at most 1 s is allowed"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_figure_beyond_its_limit_fails_the_check(case: str) -> None:
    """And says by how much."""
    figures, words = BEYOND[case]
    found = apply_thresholds(a_check(figures=figures), LIMITS)
    assert found.mark is CheckMark.FAILED
    assert words in found.words
    assert apply_thresholds(a_check(figures=figures), BurnInThresholds(disk=0, network=0, latency=0, clock=0)).mark is CheckMark.PASSED


@pytest.mark.parametrize(
    "figures", [{"written MB/s": 100.0}, {"round trip ms": 2.0}, {"offset s": 1.2, "uncertain s": 0.3}, {"rounds": 0.0}, {}]
)
def test_a_figure_within_its_limit_passes(figures: dict[str, float]) -> None:
    """An offset that the way of the question may explain is none."""
    assert apply_thresholds(a_check(figures=figures), LIMITS).mark is CheckMark.PASSED


def test_thresholds_apply_only_to_passed_checks() -> None:
    """What failed says why by itself, and what could not be made has no figures to speak of."""
    for mark in (CheckMark.FAILED, CheckMark.SKIPPED):
        found = a_check(mark, figures={"sent MB/s": 1.0})
        assert apply_thresholds(found, LIMITS) is found


def test_one_failure_is_one_too_many_and_being_blind_is_no_pass() -> None:
    """Unless what could not be seen is not needed."""
    blind, spare = a_check(CheckMark.SKIPPED, name="disk", words="no way in"), a_check(CheckMark.SKIPPED, name="gpu", needed=False)
    assert outcome("a", [a_check(), spare]).mark is CheckMark.PASSED
    assert outcome("a", [a_check(), blind]).mark is CheckMark.SKIPPED
    assert mentions(outcome("a", [a_check(), blind]).reason, "disk", "no way in")
    failed = outcome("a", [a_check(CheckMark.FAILED, words="bit lost"), blind])
    assert failed.mark is CheckMark.FAILED
    assert mentions(failed.reason, "network", "bit lost")
    assert outcome("a", [spare]).mark is CheckMark.SKIPPED, "where nothing was tried nothing was passed"
    assert outcome("a", []).mark is CheckMark.SKIPPED


def test_a_check_travels_as_json() -> None:
    """And comes back as it was."""
    one = a_check(CheckMark.FAILED, figures={"MB": 3.5}, seconds=0.25, needed=False)
    assert unpacked(Check, json.loads(json.dumps(packed(one)))) == one
    assert seen(one) == "fine (3.5 MB)"


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {},
        {"name": "a", "mark": "great", "words": ""},
        {"name": 3, "mark": "passed", "words": ""},
        {"name": "a", "mark": "passed", "words": "", "figures": {"MB": "many"}},
        {"name": "a", "mark": "passed", "words": "", "figures": [1]},
        {"name": "a", "mark": "passed", "words": "", "seconds": True},
    ],
)
def test_what_is_no_check_is_refused(given: object) -> None:
    """A node in doubt may say anything."""
    with pytest.raises(MalformedData):
        unpacked(Check, given)
