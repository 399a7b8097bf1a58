"""A `Case` as JSON and back, so that what was decided can be decided again: by another policy, years later.

Faults are kept once and referred to by number, as rules tell them apart by identity (`Diagnosis.excused`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from detectors.catalogue import CATALOGUE, Fault
from detectors.codec import MalformedData, Pool, packed, packed_fields, unpacked
from policies.case import Case, Decision

VERSION: Final = 1
"""Of the form of a record. One of a newer form is refused."""
MOST_BYTES: Final = 256_000
"""Of one record: a case of a thousand faults; three kilobytes are usual."""
MOST_FAULTS: Final = 2000
"""Faults beside the root with which a case is still kept: writing down more would hold its recovery up by more than some milliseconds."""
MANY_FAULTS: Final = 100
"""From so many on evidence and explanations are left out at once: they stand with the faults and the verdict."""
TEXTS: Final = ("quote", "signature", "detail", "source")
"""What faults hold for people."""


class UnreadableCase(Exception):
    """A record that gives no case, and why."""


def to_record(case: Case) -> dict[str, Any]:
    """Return *case* as JSON values, whole."""
    faults = Pool(Fault)
    told = packed(case, faults)
    return {"version": VERSION, "case": told, "faults": [_told(packed_fields(fault)) for fault in faults.values]}


def bounded(case: Case, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the record of *case*, shortened where it would be larger than *most* bytes.

    First goes what no rule reads: explanations that were weighed, and the evidence of faults beside the root. Where that is not enough, the
    case is left out, and the record says so: a case without some of its faults could be decided otherwise than the whole one was.
    """
    many = len(case.diagnosis.secondary_failures)
    if many > MOST_FAULTS:
        return {"version": VERSION, "left_out": f"it had {many:,} faults, and {MOST_FAULTS:,} are kept"}
    if many < MANY_FAULTS and _size(record := to_record(case)) <= most:
        return record
    record = to_record(_shortened(case))
    size = _size(record)
    return record if size <= most else {"version": VERSION, "left_out": f"it would have taken {size:,} bytes, and {most:,} are kept"}


def from_record(record: Any) -> Case:  # noqa: ANN401 (whatever JSON the history holds)
    """Return the case that *record* holds; raise `UnreadableCase` with the reason where it holds none."""
    match record:
        case {"version": int(version)} if version > VERSION:
            raise UnreadableCase(f"a newer Holdfast kept it, in form {version}; this one reads up to {VERSION}")
        case {"left_out": str(why)}:
            raise UnreadableCase(f"it was too large to be kept: {why}")
        case {"version": int(), "case": dict(told), "faults": list(faults)}:
            pass
        case _:
            raise UnreadableCase("what was kept is no case")
    try:
        pool = Pool(Fault, [unpacked(Fault, fault) for fault in faults])
        unknown = sorted({fault.kind for fault in pool.values} - CATALOGUE.keys())
        if unknown:
            raise UnreadableCase(f"this version knows no fault kind {', '.join(unknown)}")
        return unpacked(Case, told, pool=pool)
    except MalformedData as error:
        raise UnreadableCase(f"what was kept cannot be read: {error}") from error


def act_of(decision: Decision) -> dict[str, Any]:
    """Return who leaves, comes and goes on where by *decision*, as JSON: what the history keeps of it, and what two decisions differ by."""
    return {name: value for name, value in packed(decision).items() if name not in {"action", "reason"}}


def _size(record: Mapping[str, Any]) -> int:
    return len(json.dumps(record))


def _shortened(case: Case) -> Case:
    """Return *case* without the explanations, and without the evidence of all faults but the root; which fault is which is kept."""
    diagnosis = case.diagnosis
    nothing: dict[str, Any] = dict.fromkeys(TEXTS, "")
    short = {id(diagnosis.root): dataclasses.replace(diagnosis.root, detail="")}

    def cut(fault: Fault) -> Fault:
        if id(fault) not in short:
            short[id(fault)] = dataclasses.replace(fault, **nothing)
        return short[id(fault)]

    told = dataclasses.replace(
        diagnosis,
        root=cut(diagnosis.root),
        secondary_failures=tuple(map(cut, diagnosis.secondary_failures)),
        excused=tuple(map(cut, diagnosis.excused)),
        candidates=(),
    )
    return dataclasses.replace(case, diagnosis=told)


def _told(fault: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a fault does not say. Of all else even the usual is kept: what is usual may change."""
    return {name: value for name, value in fault.items() if value not in {None, ""}}
