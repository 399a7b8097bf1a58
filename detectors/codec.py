"""Dataclasses to JSON and back, with validation of what nodes and the history contain.

The fields are read off the dataclass, so that one which it gains is kept from then on, and has its default in what was written before. A
`dict` becomes an object; any other `Mapping` a list of pairs, which keeps its order in every database. ``Annotated[T, check]`` gives each
value of a field to *check*, which returns what to take or raises ``ValueError``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Generic, TypeVar

from holdfast.detectors.evidence import Unknown

BLIND: Final = "blind"
"""The only key of an object that stands for `Unknown`."""
WORDS: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""Numbers that strict JSON cannot represent, as the history writes them."""
_PLAIN: Final = frozenset({str, int, float, bool, types.NoneType})

T = TypeVar("T")


class MalformedData(ValueError):
    """JSON data that does not match its dataclass."""


class Pool(Generic[T]):
    """Values of one dataclass that are written once and referred to by number, so that shared objects stay shared."""

    def __init__(self, kind: type[T], values: Iterable[T] = ()) -> None:
        self.kind, self.values = kind, list(values)
        self._numbers = {id(value): number for number, value in enumerate(self.values)}

    def number(self, value: T) -> int:
        """Return the number of *value*; add it if it is new."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.values)
            self.values.append(value)
        return self._numbers[id(value)]

    def value(self, number: Any) -> T:  # noqa: ANN401 (any JSON)
        """Return the value with that *number*; raise `MalformedData` if there is none."""
        if type(number) is not int or not 0 <= number < len(self.values):
            raise MalformedData(f": {str(number)[:60]!r} is the number of no {self.kind.__name__}")
        return self.values[number]


Make = Callable[[Any, Pool[Any] | None], Any]


def packed(value: Any, pool: Pool[Any] | None = None) -> Any:  # noqa: ANN401, C901, PLR0911 (anything; a line for each kind)
    """Return *value*, made of dataclasses, as JSON values; those of the *pool* by their numbers."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if pool is not None and kind is pool.kind:
        return pool.number(value)
    if kind is Unknown:
        return {BLIND: value.why}
    if dataclasses.is_dataclass(kind):
        return packed_fields(value, pool)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): packed(item, pool) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(packed(item, pool) for item in value)
    if isinstance(value, tuple | list):
        # A job on thousands of nodes has thousands of plain values, in the middle of a recovery.
        return list(value) if _PLAIN.issuperset(map(type, value)) else [packed(item, pool) for item in value]
    raise TypeError(f"JSON has no form for {kind.__name__}: give it one in detectors/codec.py")


def packed_fields(value: Any, pool: Pool[Any] | None = None) -> dict[str, Any]:  # noqa: ANN401 (any dataclass)
    """Return the fields of *value*, which may be one of the *pool* itself."""
    fields = {}
    kind: Any = type(value)
    for name, in_pairs in _shape(kind):
        item = getattr(value, name)
        fields[name] = [[packed(key, pool), packed(one, pool)] for key, one in item.items()] if in_pairs else packed(item, pool)
    return fields


@cache
def _shape(kind: Any) -> tuple[tuple[str, bool], ...]:  # noqa: ANN401 (any dataclass)
    """Return the init fields of *kind*, and whether each is written as pairs."""
    hints = typing.get_type_hints(kind)
    return tuple((field.name, typing.get_origin(hints[field.name]) is Mapping) for field in dataclasses.fields(kind) if field.init)


def unpacked(kind: type[T], value: Any, where: str = "", pool: Pool[Any] | None = None) -> T:  # noqa: ANN401 (any JSON)
    """Return *value* as a *kind*; raise `MalformedData` if it does not match.

    Fields that *kind* does not have are left out: whoever wrote them may know more.
    """
    try:
        return typing.cast("T", _maker(typing.cast("Any", kind))(value, pool))
    except MalformedData as error:
        path, _, what = str(error).partition(": ")
        raise MalformedData(f"{where or kind.__name__}{path}: {what}") from None


@cache
def _maker(kind: Any) -> Make:  # noqa: ANN401, PLR0911 (a line for each kind)
    """Return the decoder of *kind*, cached, as resolving annotations takes longer than all the rest."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _checked(*inner)
    if origin in {types.UnionType, typing.Union}:
        return _one_of(inner, kind)
    if origin is tuple and inner[-1] is not Ellipsis:
        return _tuple_of(inner, kind)
    if origin in {tuple, frozenset, list}:
        return _collection_of(origin, inner[0], kind)
    if origin is dict:
        return _dict_of(inner, kind)
    if origin is Mapping:
        return _pairs_of(inner, kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_of(kind)
    return _plain(kind)


def _checked(kind: Any, check: Callable[[Any], Any]) -> Make:  # noqa: ANN401
    make = _maker(kind)

    def made(value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        taken = make(value, pool)
        try:
            return check(taken)
        except ValueError as error:
            raise MalformedData(f": {str(value)[:60]!r} {error}") from None

    return made


def _one_of(kinds: tuple[Any, ...], union: Any) -> Make:  # noqa: ANN401
    (kind,) = (one for one in kinds if one not in {Unknown, types.NoneType})
    assert len(kinds) > 1, f"{union} cannot be distinguished in JSON"
    make, may_be_blind, may_be_none = _maker(kind), Unknown in kinds, types.NoneType in kinds

    def made(value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        if value is None and may_be_none:
            return None
        return Unknown(str(value[BLIND])) if may_be_blind and type(value) is dict and value.keys() == {BLIND} else make(value, pool)

    return made


def _tuple_of(kinds: tuple[Any, ...], whole: Any) -> Make:  # noqa: ANN401
    makes = [(f"[{number}]", _maker(kind)) for number, kind in enumerate(kinds)]

    def made(value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        if type(value) not in {list, tuple} or len(value) != len(makes):
            raise _misshapen(whole, value)
        return tuple([_within(path, make, item, pool) for (path, make), item in zip(makes, value, strict=True)])

    return made


def _collection_of(origin: Any, kind: Any, whole: Any) -> Make:  # noqa: ANN401
    make = _maker(kind)

    def made(value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        if type(value) is not list:
            raise _misshapen(whole, value)
        try:
            return origin([make(item, pool) for item in value])
        except MalformedData:
            for number, item in enumerate(value):  # once more, to tell which
                _within(f"[{number}]", make, item, pool)
            raise

    return made


def _dict_of(inner: tuple[Any, ...], whole: Any) -> Make:  # noqa: ANN401
    make_key, make = _key(inner[0]), _maker(inner[1])

    def made(value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        if type(value) is not dict:
            raise _misshapen(whole, value)
        return {_within(f".{key}", make_key, key, pool): _within(f".{key}", make, item, pool) for key, item in value.items()}

    return made


def _key(kind: Any) -> Make:  # noqa: ANN401
    """Return the decoder of object keys, which JSON writes as text."""
    if kind is not int:
        return _maker(kind)

    def made(value: Any, _pool: Pool[Any] | None) -> int:  # noqa: ANN401
        try:
            return int(value)
        except (TypeError, ValueError):
            raise _misshapen(int, value) from None

    return made


def _pairs_of(inner: tuple[Any, ...], whole: Any) -> Make:  # noqa: ANN401
    make = _collection_of(list, types.GenericAlias(tuple, inner), whole)
    return lambda value, pool: dict(make(value, pool))


def _dataclass_of(kind: type) -> Make:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: (f".{field.name}", _maker(hints[field.name])) for field in dataclasses.fields(kind) if field.init}

    def made(value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        if pool is not None and kind is pool.kind:
            return pool.value(value)
        if type(value) is not dict:
            raise _misshapen(kind, value)
        given = {name: _within(*fields[name], item, pool) for name, item in value.items() if name in fields}
        try:
            return kind(**given)
        except TypeError as error:
            raise MalformedData(f": {error}") from None

    return made


def _plain(kind: Any) -> Make:  # noqa: ANN401
    is_enum = isinstance(kind, type) and issubclass(kind, Enum)

    def made(value: Any, _pool: Pool[Any] | None) -> Any:  # noqa: ANN401
        if kind is Any or type(value) is kind:
            return value
        if kind is float and type(value) is str and value in WORDS:
            return WORDS[value]
        if is_enum or (kind is float and type(value) is int):
            with suppress(ValueError, OverflowError):
                return kind(value)
        raise _misshapen(kind, value)

    return made


def _within(path: str, make: Make, value: Any, pool: Pool[Any] | None) -> Any:  # noqa: ANN401
    """Decode *value*; an error names the *path* to it."""
    try:
        return make(value, pool)
    except MalformedData as error:
        raise MalformedData(f"{path}{error}") from None


def _misshapen(kind: Any, value: Any) -> MalformedData:  # noqa: ANN401
    return MalformedData(f": {str(value)[:60]!r} is no {getattr(kind, '__name__', kind)}")
