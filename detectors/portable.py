"""Evidence as JSON and back: what a node says travels as text, and is believed only in the shape that it should have."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Final, TypeVar

from detectors.evidence import Blind

BLIND: Final = "blind"
"""The only key of an object that stands for `Blind`."""

T = TypeVar("T")


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
    return typing.cast("T", _unpacked(kind, value, where or kind.__name__))


def _unpacked(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        return _one_of(inner, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_unpacked(inner[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(key): _unpacked(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _built(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise Misshapen(f"{where}: {str(value)[:60]!r} is no {getattr(kind, '__name__', kind)}")


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:  # noqa: ANN401
    if isinstance(value, dict) and set(value) == {BLIND} and Blind in kinds:
        return Blind(str(value[BLIND]))
    (kind,) = (one for one in kinds if one is not Blind)
    return _unpacked(kind, value, where)


def _built(kind: type, value: dict[str, Any], where: str) -> Any:  # noqa: ANN401
    types_of = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)} & set(value)
    try:
        return kind(**{name: _unpacked(types_of[name], value[name], f"{where}.{name}") for name in known})
    except TypeError as error:
        raise Misshapen(f"{where}: {error}") from None
