"""Evidence as JSON and back: what a node says travels as text, and is believed only in the shape that it should have."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

from detectors.evidence import Blind

BLIND: Final = "blind"
"""The only key of an object that stands for `Blind`."""

T = TypeVar("T")
Make = Callable[[Any], Any]


class Misshapen(ValueError):
    """What should be evidence has another shape."""


def packed(value: Any) -> Any:  # noqa: ANN401 (any evidence)
    """Return *value*, made of dataclasses, as what JSON can hold."""
    if isinstance(value, Blind):
        return {BLIND: value.why}
    if dataclasses.is_dataclass(value):
        return {field.name: packed(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: packed(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [packed(item) for item in value]
    return value


def unpacked(kind: type[T], value: Any, where: str = "") -> T:  # noqa: ANN401 (any JSON)
    """Return the evidence of *kind* that *value* holds; raise `Misshapen` when it is anything else.

    Fields that *kind* does not have are left out: a newer collector may know more.
    """
    try:
        return typing.cast("T", _maker(typing.cast("Any", kind))(value))
    except Misshapen as error:
        path, _, what = str(error).partition(": ")
        raise Misshapen(f"{where or kind.__name__}{path}: {what}") from None


@cache
def _maker(kind: Any) -> Make:  # noqa: ANN401
    """Return what makes evidence of *kind* out of JSON. Made once a kind: to work out its annotations takes longer than all the rest."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        return _one_of(inner, kind)
    if origin is tuple:
        return _tuple_of(inner[0], kind)
    if origin is dict:
        return _dict_of(inner[1], kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _built(kind)
    return _plain(kind)


def _one_of(kinds: tuple[Any, ...], union: Any) -> Make:  # noqa: ANN401
    (kind,) = (one for one in kinds if one is not Blind)
    assert Blind in kinds, f"{union} cannot be told apart in JSON"
    make = _maker(kind)

    def made(value: Any) -> Any:  # noqa: ANN401
        return Blind(str(value[BLIND])) if type(value) is dict and value.keys() == {BLIND} else make(value)

    return made


def _tuple_of(kind: Any, whole: Any) -> Make:  # noqa: ANN401
    make = _maker(kind)

    def made(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not list:
            raise _misshapen(whole, value)
        try:
            return tuple([make(item) for item in value])
        except Misshapen:
            for number, item in enumerate(value):  # once more, to tell which
                _within(f"[{number}]", make, item)
            raise

    return made


def _dict_of(kind: Any, whole: Any) -> Make:  # noqa: ANN401
    make = _maker(kind)

    def made(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not dict:
            raise _misshapen(whole, value)
        return {str(key): _within(f".{key}", make, item) for key, item in value.items()}

    return made


def _built(kind: type) -> Make:
    hints = typing.get_type_hints(kind)
    fields = {field.name: (f".{field.name}", _maker(hints[field.name])) for field in dataclasses.fields(kind)}

    def made(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not dict:
            raise _misshapen(kind, value)
        given = {name: _within(*fields[name], item) for name, item in value.items() if name in fields}
        try:
            return kind(**given)
        except TypeError as error:
            raise Misshapen(f": {error}") from None

    return made


def _plain(kind: Any) -> Make:  # noqa: ANN401
    def made(value: Any) -> Any:  # noqa: ANN401
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise _misshapen(kind, value)

    return made


def _within(path: str, make: Make, value: Any) -> Any:  # noqa: ANN401
    """Make what *value* holds; a complaint names the *path* to it."""
    try:
        return make(value)
    except Misshapen as error:
        raise Misshapen(f"{path}{error}") from None


def _misshapen(kind: Any, value: Any) -> Misshapen:  # noqa: ANN401
    return Misshapen(f": {str(value)[:60]!r} is no {getattr(kind, '__name__', kind)}")
