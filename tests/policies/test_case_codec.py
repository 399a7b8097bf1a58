"""A case is kept as JSON and comes back as it was, whatever it holds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detectors.catalogue import CATALOGUE, Fault
from holdfast.detectors.diagnosis import diagnose
from holdfast.policies.recovery.case_codec import (
    MANY_FAULTS,
    MOST_BYTES,
    MOST_FAULTS,
    VERSION,
    UnreadableCase,
    bounded,
    from_record,
    to_record,
)
from holdfast.policies.recovery.escalation import POLICIES, Case, RecoveryAction, decide
from tests.policies.cases import NOW, a_case
from tests.policies.test_escalation_properties import cases


def through_json(record: Any) -> Any:
    """Return what is left of *record* after a stay in a database."""
    return json.loads(json.dumps(record, allow_nan=False))


@st.composite
def diagnosed(draw: st.DrawFn) -> Case:
    """Draw a case with a diagnosis that was really come to: with explanations, and faults that are excused."""
    text = st.text(max_size=20)
    fault = st.builds(
        Fault,
        kind=st.sampled_from(sorted(CATALOGUE)),
        at=st.floats(0, NOW),
        node=st.sampled_from(["a", "b", "c", None]),
        rank=st.sampled_from([0, 1, None]),
        step=st.sampled_from([3, None]),
        quote=text,
        signature=text,
        detail=text,
        source=text,
        device=text,
    )
    return replace(draw(cases()), diagnosis=diagnose(draw(st.lists(fault, min_size=1, max_size=6)), members=3))


@given(diagnosed())
def test_every_field_of_a_case_survives_a_round_trip(case: Case) -> None:
    """Equal in all fields, and each fault that was one object is one object again, as rules distinguish faults by identity."""
    back = from_record(through_json(to_record(case)))
    for field in dataclasses.fields(Case):
        assert getattr(back, field.name) == getattr(case, field.name), field.name
        assert type(getattr(back, field.name)) is type(getattr(case, field.name)), field.name
    assert back.diagnosis == case.diagnosis
    whole, again = ((one.root, *one.secondary_failures) for one in (case.diagnosis, back.diagnosis))
    same = [[fault is other for other in case.diagnosis.excused] for fault in whole]
    assert [[fault is other for other in back.diagnosis.excused] for fault in again] == same
    assert back.leaving == case.leaving


@given(diagnosed(), st.sampled_from(sorted(POLICIES)))
def test_a_case_that_was_kept_is_decided_as_it_was(case: Case, policy: str) -> None:
    """By the same rule, with the same words."""
    assert decide(POLICIES[policy], from_record(through_json(bounded(case)))) == decide(POLICIES[policy], case)


@pytest.mark.parametrize("many", [MANY_FAULTS - 1, MANY_FAULTS, MOST_FAULTS])
def test_a_large_case_keeps_what_rules_read(many: int) -> None:
    """Long evidence goes before anything that could change an answer."""
    case = a_case("node-lost", "a", *[("worker-sigkill", "b")] * many, lost=("a",), spares=("d",))
    long = tuple(replace(fault, detail="x" * 5000, rank=rank, step=7) for rank, fault in enumerate(case.diagnosis.secondary_failures))
    case = replace(case, diagnosis=replace(case.diagnosis, secondary_failures=long))
    record = bounded(case)
    assert len(json.dumps(record)) <= MOST_BYTES < len(json.dumps(to_record(case)))
    back = from_record(through_json(record))
    assert [(fault.kind, fault.node, fault.rank) for fault in back.diagnosis.secondary_failures] == [
        (one.kind, one.node, one.rank) for one in long
    ]
    assert (back.diagnosis.root.quote, back.diagnosis.reason) == (case.diagnosis.root.quote, case.diagnosis.reason)
    for policy in POLICIES.values():
        one, other = decide(policy, back), decide(policy, case)
        assert (one.decision, one.rule, one.passed_over, one.noted) == (other.decision, other.rule, other.passed_over, other.noted)


@pytest.mark.parametrize(
    ("secondary_failures", "most", "why"), [(MOST_FAULTS + 1, MOST_BYTES, "2,001 faults"), (10, 300, "300 are stored")]
)
def test_a_case_that_is_too_large_is_left_out(secondary_failures: int, most: int, why: str) -> None:
    """Half a case could be decided otherwise than the whole one was; the record says why there is none."""
    record = bounded(a_case("node-lost", "a", *[("worker-sigkill", "b")] * secondary_failures), most)
    assert len(json.dumps(record)) < 200
    with pytest.raises(UnreadableCase, match=why):
        from_record(through_json(record))


def test_a_record_from_before_a_fact_was_known_has_its_default() -> None:
    """And a fact that is known no more is left out."""
    record = through_json(to_record(a_case(replacement_attempts=3)))
    del record["case"]["replacement_attempts"]
    record["case"]["forgotten"] = 7
    assert from_record(record) == a_case()


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        ({"version": VERSION + 1, "case": {}, "faults": []}, "newer"),
        ({}, "not a case"),
        ([1], "not a case"),
        ("", "not a case"),
        ({"version": VERSION, "case": {}, "faults": []}, "cannot be read"),
        ({"version": VERSION, "case": {"diagnosis": {"root": 3}}, "faults": []}, "cannot be read"),
        ({"version": VERSION, "case": {}, "faults": [{"kind": "no-such-kind", "at": 1.0}]}, "no-such-kind"),
    ],
)
def test_a_record_without_a_case_is_refused_with_the_reason(spoilt: Any, why: str) -> None:
    """A person reads it: a reason, no traceback."""
    with pytest.raises(UnreadableCase, match=why):
        from_record(spoilt)


def test_a_wrong_value_is_refused() -> None:
    """A number where a name belongs would only be found by a rule, or by nobody."""
    record = through_json(to_record(a_case(tried=(RecoveryAction.SHRINK_RESTART,))))
    for name, value in (("members", [1]), ("tried", ["fly"]), ("least", "two")):
        with pytest.raises(UnreadableCase):
            from_record({**record, "case": {**record["case"], name: value}})
