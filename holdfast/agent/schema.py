"""Take fields out of messages that anybody may have written: each has the right type and range, or is refused by its name."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from holdfast.protocol import Message

T = TypeVar("T")

LARGEST: Final = 2**63
LONGEST: Final = 64 * 1024
"""Characters of a text that are kept."""


class BadField(ValueError):
    """A field that is missing, or is not what it must be."""

    def __init__(self, name: str, wanted: str, got: object) -> None:
        super().__init__(name, wanted, got)
        self.name, self.wanted, self.got = name, wanted, got

    def __str__(self) -> str:
        got = "it is missing" if self.got is None else f"it is {str(self.got)[:80]!r}"
        return f"field '{self.name}' must be {self.wanted}, but {got}"


def whole(message: Message, name: str, *, least: int = 0, most: int = LARGEST) -> int:
    """Return a whole number."""
    value = message.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise BadField(name, f"a whole number of at least {least}", value)


def durations(message: Message, name: str) -> dict[str, float]:
    """Return durations by the names of their phases."""
    value = message.get(name)
    if isinstance(value, dict):
        return {phase: seconds(value, phase) for phase in value}
    raise BadField(name, "an object of names and seconds", value)


def signal_number(message: Message, name: str) -> int:
    """Return the number of a signal."""
    value = whole(message, name)
    if value in signal.valid_signals():
        return value
    raise BadField(name, "the number of a signal", value)


def number(message: Message, name: str) -> float:
    """Return any number; NaN and infinities are some."""
    value = message.get(name)
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST):
        return value
    raise BadField(name, "a number", value)


def seconds(message: Message, name: str) -> float:
    """Return a duration in seconds."""
    value = number(message, name)
    if math.isfinite(value) and value >= 0:
        return value
    raise BadField(name, "a number of seconds", value)


def text(message: Message, name: str) -> str:
    """Return a text, cut where it becomes too long."""
    value = message.get(name)
    if isinstance(value, str):
        return value[:LONGEST]
    raise BadField(name, "a text", value)


def flag(message: Message, name: str) -> bool:
    """Return yes or no."""
    value = message.get(name)
    if isinstance(value, bool):
        return value
    raise BadField(name, "true or false", value)


def maybe(take: Callable[[Message, str], T], message: Message, name: str) -> T | None:
    """Return what *take* gives, or None where the field is missing or null."""
    return None if message.get(name) is None else take(message, name)


def words(message: Message, name: str, *, least: int = 0) -> tuple[str, ...]:
    """Return a list of texts that can be arguments of a program."""
    value = message.get(name)
    if isinstance(value, list) and len(value) >= least and all(isinstance(word, str) and "\0" not in word for word in value):
        return tuple(value)
    raise BadField(name, f"a list of {f'at least {least} ' if least else ''}texts without NUL", value)


def path(message: Message, name: str) -> str:
    """Return a path."""
    value = message.get(name)
    if isinstance(value, str) and value and "\0" not in value:
        return value
    raise BadField(name, "a path", value)


def environment(message: Message, name: str) -> dict[str, str]:
    """Return variables that can be a program's environment."""
    value = message.get(name)
    if isinstance(value, dict) and all(_is_variable(key, setting) for key, setting in value.items()):
        return value
    raise BadField(name, "an object of names and texts", value)


def _is_variable(key: str, setting: Any) -> bool:  # noqa: ANN401 (checked here)
    return bool(key) and not set(key) & {"=", "\0"} and isinstance(setting, str) and "\0" not in setting


class WireMembership(NamedTuple):
    """Which ranks nodes hold, as far as an agent is told, and the lowest rank of all, which may be on another node."""

    ranks: dict[str, list[int]]
    first: int


def membership(message: Message, name: str) -> WireMembership:
    """Return which node holds which ranks, and the lowest rank: that of the ranks told of, unless the order names it."""
    value = message.get(name)
    if not isinstance(value, dict) or not all(_are_ranks(ranks) for ranks in value.values()):
        raise BadField(name, "an object of nodes and lists of ranks", value)
    first = maybe(whole, message, "first")
    return WireMembership(value, min((rank for ranks in value.values() for rank in ranks), default=0) if first is None else first)


def numbers(message: Message, name: str) -> list[int]:
    """Return a list of ranks, or of standbys' numbers."""
    value = message.get(name)
    if _are_ranks(value) and all(number >= 0 for number in value or ()):
        return list(value or ())
    raise BadField(name, "a list of whole numbers", value)


def groups(message: Message, name: str) -> list[list[int]]:
    """Return lists of ranks."""
    value = message.get(name)
    if isinstance(value, list) and all(_are_ranks(ranks) for ranks in value):
        return value
    raise BadField(name, "a list of lists of ranks", value)


def mapping(message: Message, name: str) -> Message:
    """Return an object."""
    value = message.get(name)
    if isinstance(value, dict):
        return value
    raise BadField(name, "an object", value)


def _are_ranks(value: Any) -> bool:  # noqa: ANN401 (checked here)
    return isinstance(value, list) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in value)


def objects(message: Message, name: str) -> list[Message]:
    """Return a list of objects."""
    value = message.get(name)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return value
    raise BadField(name, "a list of objects", value)


def addresses(message: Message, name: str) -> list[tuple[str, int]]:
    """Return a list of hosts and ports."""
    value = message.get(name)
    if isinstance(value, list) and all(isinstance(item, list) and len(item) == len(("host", "port")) for item in value):
        return [(text({name: host}, name), whole({name: port}, name, least=1, most=65535)) for host, port in value]
    raise BadField(name, "a list of hosts and ports", value)
