"""A `Case` as JSON and back, so that what was decided can be decided again: by another policy, years later.

The fields are read off the dataclasses: a fact that a `Case` gains is kept from then on, and has its default in records from before. Faults
are kept once and referred to by number, as rules tell them apart by identity (`Diagnosis.excused`).
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Collection, Hashable, Iterable, Mapping
from enum import Enum
from functools import cache
from itertools import chain
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from detectors.catalogue import CATALOGUE, Fault
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
_PLAIN: Final = (str, int, float, bool)
_PLAIN_TYPES: Final = frozenset({*_PLAIN, type(None)})


class UnreadableCase(Exception):
    """A record that gives no case, and why."""


def to_record(case: Case) -> dict[str, Any]:
    """Return *case* as JSON values, whole."""
    faults: list[Fault] = []
    places: dict[int, int] = {}

    def place(fault: Fault) -> int:
        if id(fault) not in places:
            places[id(fault)] = len(faults)
            faults.append(fault)
        return places[id(fault)]

    packed = _pack_fields(case, place)
    return {"version": VERSION, "case": packed, "faults": [_told(_pack_fields(fault, place)) for fault in faults]}


def bounded(case: Case, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the record of *case*, shortened where it would be larger than *most* bytes.

    First goes what no rule reads: explanations that were weighed, and the evidence of faults beside the root. Where that is not enough, the
    case is left out, and the record says so: a case without some of its faults could be decided otherwise than the whole one was.
    """
    many = len(case.diagnosis.echoes)
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
        case {"version": int(), "case": dict(packed), "faults": list(faults)}:
            pass
        case _:
            raise UnreadableCase("what was kept is no case")
    try:
        pool = [_unpack_fields(Fault, fault, []) for fault in faults]
        unknown = sorted({fault.kind for fault in pool} - CATALOGUE.keys())
        if unknown:
            raise UnreadableCase(f"this version knows no fault kind {', '.join(unknown)}")
        case_: Case = _unpack_fields(Case, packed, pool)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UnreadableCase(f"what was kept cannot be read: {error}") from error
    return case_


def act_of(decision: Decision) -> dict[str, Any]:
    """Return who leaves, comes and goes on where by *decision*, as JSON: what the history keeps of it, and what two decisions differ by."""
    return {
        "drop": list(decision.drop),
        "add": list(decision.add),
        "need": decision.need,
        "rotate": decision.rotate,
        "vacate": list(decision.vacate),
        "before": decision.before,
        "skip": list(decision.skip),
        "seats": [{"rank": seat.rank, "node": seat.node, "standby": seat.standby} for seat in decision.seats],
    }


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
        echoes=tuple(map(cut, diagnosis.echoes)),
        excused=tuple(map(cut, diagnosis.excused)),
        candidates=(),
    )
    return dataclasses.replace(case, diagnosis=told)


@cache
def _types(kind: Hashable) -> dict[str, Any]:
    """Return the fields that *kind* is made with, and their types."""
    assert isinstance(kind, type)
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _told(fault: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a fault does not say. Of all else even the usual is kept: what is usual may change."""
    return {name: value for name, value in fault.items() if value not in {None, ""}}


def _pack_fields(value: Any, place: Any) -> dict[str, Any]:  # noqa: ANN401 (any dataclass; a function from fault to number)
    kind: Any = type(value)
    return {name: _pack(getattr(value, name), place) for name in _types(kind)}


def _pack(value: Any, place: Any) -> Any:  # noqa: ANN401 (one line a kind of value)
    """Return *value* as JSON."""
    if isinstance(value, Fault):
        return place(value)
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, _PLAIN):
        return value
    if dataclasses.is_dataclass(value):
        return _pack_fields(value, place)
    return _pack_many(value, place)


def _pack_many(value: Any, place: Any) -> list[Any]:  # noqa: ANN401 (any collection)
    if isinstance(value, Mapping):
        if _are_plain(value) and (_are_plain(value.values()) or _are_plain_tuples(value.values())):
            return [[key, list(item) if isinstance(item, tuple) else item] for key, item in value.items()]
        return [[_pack(key, place), _pack(item, place)] for key, item in value.items()]
    if not isinstance(value, frozenset | set | tuple | list):
        raise TypeError(f"a case cannot hold {type(value).__name__}: give it a form in policies/case_codec.py")
    packed = list(value) if _are_plain(value) else [_pack(item, place) for item in value]
    return sorted(packed) if isinstance(value, frozenset | set) else packed


def _are_plain(values: Iterable[Any]) -> bool:
    """Tell whether all *values* stand in JSON as they are: a job on thousands of nodes has thousands, in the middle of a recovery."""
    return _PLAIN_TYPES.issuperset(map(type, values))


def _are_plain_tuples(values: Collection[Any]) -> bool:
    """Tell the same of what tuples hold: each node has its ranks."""
    return all(isinstance(value, tuple) for value in values) and _are_plain(chain.from_iterable(values))


def _unpack_fields(kind: Any, packed: Any, pool: list[Fault]) -> Any:  # noqa: ANN401 (any dataclass)
    """Return a *kind* of what is there of its fields: one that it did not have then gets its default, one that it has no more is left."""
    return kind(**{name: _unpack(hint, packed[name], pool) for name, hint in _types(kind).items() if name in packed})


def _unpack(hint: Any, packed: Any, pool: list[Fault]) -> Any:  # noqa: ANN401 (any field's type)
    """Return the value of type *hint* that `_pack` made *packed* of."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return None if packed is None else _unpack(next(one for one in inner if one is not types.NoneType), packed, pool)
    if origin is not None:
        return _unpack_many(origin, inner, packed, pool)
    if hint is Fault:
        return pool[packed]
    if dataclasses.is_dataclass(hint):
        return _unpack_fields(hint, packed, pool)
    return _unpack_one(hint, packed)


def _unpack_many(origin: Any, inner: tuple[Any, ...], packed: Any, pool: list[Fault]) -> Any:  # noqa: ANN401 (any field's type)
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(_unpack(one, item, pool) for one, item in zip(inner, packed, strict=True))
    if origin in {tuple, frozenset}:
        return origin(_unpack(inner[0], item, pool) for item in packed)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_unpack(inner[0], key, pool): _unpack(inner[1], item, pool) for key, item in packed}
    raise TypeError(f"a case cannot hold {origin}: give it a form in policies/case_codec.py")


def _unpack_one(hint: Any, packed: Any) -> Any:  # noqa: ANN401 (any field's type)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(packed)
    if hint is float and isinstance(packed, int | str):  # whole numbers lose their point on the way, infinities become words
        return float(packed)
    if hint not in _PLAIN or not isinstance(packed, hint):
        raise TypeError(f"{packed!r} where {hint} is expected")
    return packed
