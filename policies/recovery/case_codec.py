"""Convert a `Case` to JSON and back, so that a decision can be replayed later, also with another policy.

Each fault is stored once and referenced by number, as rules compare faults by identity (`Diagnosis.excused`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from holdfast.detectors.catalogue import CATALOGUE, Fault
from holdfast.detectors.codec import MalformedData, Pool, packed, packed_fields, unpacked
from holdfast.policies.recovery.case import Case, Decision

VERSION: Final = 1
"""Version of the record format. Newer records are refused."""
MOST_BYTES: Final = 256_000
"""Size of one record: enough for a thousand faults; three kilobytes are typical."""
MOST_FAULTS: Final = 2000
"""Maximum secondary faults of a stored case: storing more would delay the recovery by more than some milliseconds."""
MANY_FAULTS: Final = 100
"""From this many faults on, evidence and hypotheses are left out: they are stored with the faults and the diagnosis."""
TEXTS: Final = ("quote", "signature", "detail", "source")
"""Fields of a fault that only people read."""


class UnreadableCase(Exception):
    """A record without a readable case."""


def to_record(case: Case) -> dict[str, Any]:
    """Return the complete *case* as JSON values."""
    faults = Pool(Fault)
    packed_case = packed(case, faults)
    return {"version": VERSION, "case": packed_case, "faults": [_without_empty(packed_fields(fault)) for fault in faults.values]}


def bounded(case: Case, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the record of *case*, shortened if it would be larger than *most* bytes.

    First it drops what no rule reads: hypotheses, and the evidence of secondary faults. If that is not enough, the record contains no case
    and says so: a case without some of its faults could be decided differently.
    """
    many = len(case.diagnosis.secondary_failures)
    if many > MOST_FAULTS:
        return {"version": VERSION, "left_out": f"it had {many:,} faults, and at most {MOST_FAULTS:,} are stored"}
    if many < MANY_FAULTS and _size(record := to_record(case)) <= most:
        return record
    record = to_record(_shortened(case))
    size = _size(record)
    return record if size <= most else {"version": VERSION, "left_out": f"it needs {size:,} bytes, and at most {most:,} are stored"}


def from_record(record: Any) -> Case:  # noqa: ANN401 (whatever JSON the history holds)
    """Return the case in *record*; raise `UnreadableCase` with the reason if there is none."""
    match record:
        case {"version": int(version)} if version > VERSION:
            raise UnreadableCase(f"a newer Holdfast stored it, in format {version}; this one reads up to {VERSION}")
        case {"left_out": str(why)}:
            raise UnreadableCase(f"it was too large to store: {why}")
        case {"version": int(), "case": dict(packed_case), "faults": list(faults)}:
            pass
        case _:
            raise UnreadableCase("the stored record is not a case")
    try:
        pool = Pool(Fault, [unpacked(Fault, fault) for fault in faults])
        unknown = sorted({fault.kind for fault in pool.values} - CATALOGUE.keys())
        if unknown:
            raise UnreadableCase(f"this version knows no fault kind {', '.join(unknown)}")
        return unpacked(Case, packed_case, pool=pool)
    except MalformedData as error:
        raise UnreadableCase(f"the stored record cannot be read: {error}") from error


def act_of(decision: Decision) -> dict[str, Any]:
    """Return the changes that *decision* makes, as JSON: what the history stores, and what two decisions are compared by."""
    return {name: value for name, value in packed(decision).items() if name not in {"action", "reason"}}


def _size(record: Mapping[str, Any]) -> int:
    return len(json.dumps(record))


def _shortened(case: Case) -> Case:
    """Return *case* without hypotheses, and without the evidence of all faults but the root; identities of faults are kept."""
    diagnosis = case.diagnosis
    nothing: dict[str, Any] = dict.fromkeys(TEXTS, "")
    short = {id(diagnosis.root): dataclasses.replace(diagnosis.root, detail="")}

    def cut(fault: Fault) -> Fault:
        if id(fault) not in short:
            short[id(fault)] = dataclasses.replace(fault, **nothing)
        return short[id(fault)]

    shortened = dataclasses.replace(
        diagnosis,
        root=cut(diagnosis.root),
        secondary_failures=tuple(map(cut, diagnosis.secondary_failures)),
        excused=tuple(map(cut, diagnosis.excused)),
        candidates=(),
    )
    return dataclasses.replace(case, diagnosis=shortened)


def _without_empty(fault: dict[str, Any]) -> dict[str, Any]:
    """Drop empty fields of a fault. Other default values are stored, as defaults may change."""
    return {name: value for name, value in fault.items() if value not in {None, ""}}
