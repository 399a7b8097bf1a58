"""Check the fields of messages: each has the right type and range, or `BadField` names the one that has not.

A handler declares the fields that it needs as parameters, with the types of this module (`Count`, `Seconds`, ...). `fields_of` reads them,
so the tables of commands and of worker messages, the checks and docs/reference/protocol.md all come from the handlers' signatures.
"""

from __future__ import annotations

import functools
import inspect
import math
import signal
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from holdfast.protocol import Message

T = TypeVar("T")

MAX_INTEGER: Final = 2**63
MAX_STEP: Final = 2**53
MAX_TEXT: Final = 64 * 1024
"""Characters of a text that are kept."""


class BadField(ValueError):
    """A field that is missing or has the wrong type or range."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(name, expected, got)
        self.name, self.expected, self.got = name, expected, got

    def __str__(self) -> str:
        got = "it is missing" if self.got is None else f"it is {str(self.got)[:80]!r}"
        return f"field '{self.name}' must be {self.expected}, but {got}"


# -- readers: each returns one field of a message, or raises BadField ---------------------------------------------------------


def integer(message: Message, name: str, *, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
    """Return an integer."""
    value: Any = message.get(name)
    if _is_integer(value) and minimum <= value <= maximum:
        return int(value)
    raise BadField(name, f"a whole number of at least {minimum}", value)


def text(message: Message, name: str) -> str:
    """Return a text, cut to `MAX_TEXT` characters."""
    value = message.get(name)
    if isinstance(value, str):
        return value[:MAX_TEXT]
    raise BadField(name, "a text", value)


def optional(read: Callable[[Message, str], T], message: Message, name: str) -> T | None:
    """Return what *read* returns, or None where the field is missing or null."""
    return None if message.get(name) is None else read(message, name)


def _reader(_returns: type[T], expected: str, is_valid: Callable[[Any], bool]) -> Callable[[Message, str], T]:
    def read(message: Message, name: str) -> T:
        value: Any = message.get(name)
        if is_valid(value):
            return value  # type: ignore[no-any-return]  # checked here
        raise BadField(name, expected, value)

    return read


def _is_integer(value: Any) -> bool:  # noqa: ANN401 (a field may be anything)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:  # noqa: ANN401 (as above)
    return isinstance(value, float) or (_is_integer(value) and abs(value) <= MAX_INTEGER)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:  # noqa: ANN401 (as above)
    return isinstance(value, list) and all(map(is_item, value))


def _is_seconds(value: Any) -> bool:  # noqa: ANN401 (as above)
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_argument(value: Any) -> bool:  # noqa: ANN401 (as above)
    return isinstance(value, str) and "\0" not in value


def _is_variable(name: str, value: Any) -> bool:  # noqa: ANN401 (as above)
    return bool(name) and not set(name) & {"=", "\0"} and _is_argument(value)


number = _reader(float, "a number", _is_number)
"""Return any number, NaN and infinities included."""
seconds = _reader(float, "a number of seconds", _is_seconds)
flag = _reader(bool, "true or false", lambda value: isinstance(value, bool))
path = _reader(str, "a path", lambda value: _is_argument(value) and value != "")
signal_number = _reader(int, "the number of a signal", lambda value: _is_integer(value) and value in signal.valid_signals())
mapping = _reader(Message, "an object", lambda value: isinstance(value, dict))
objects = _reader(list[Message], "a list of objects", lambda value: _is_list(value, lambda one: isinstance(one, dict)))
numbers = _reader(list[int], "a list of whole numbers", lambda value: _is_list(value, lambda one: _is_integer(one) and one >= 0))
"""Return a list of ranks, or of hot spares' numbers."""
groups = _reader(list[list[int]], "a list of lists of ranks", lambda value: _is_list(value, lambda one: _is_list(one, _is_integer)))
arguments = _reader(list[str], "a list of texts without NUL", lambda value: _is_list(value, _is_argument))
"""Return a list of texts that can be arguments of a program."""
durations = _reader(
    dict[str, float], "an object of names and seconds", lambda value: isinstance(value, dict) and all(map(_is_seconds, value.values()))
)
environment = _reader(
    dict[str, str],
    "an object of names and texts",
    lambda value: isinstance(value, dict) and all(_is_variable(*item) for item in value.items()),
)
"""Return variables that can be a program's environment."""


def addresses(message: Message, name: str) -> list[tuple[str, int]]:
    """Return a list of hosts and ports."""
    value = message.get(name)
    if _is_list(value, lambda item: isinstance(item, list) and len(item) == len(("host", "port"))):
        return [(text({name: host}, name), integer({name: port}, name, minimum=1, maximum=65535)) for host, port in value or ()]
    raise BadField(name, "a list of hosts and ports", value)


class WireMembership(NamedTuple):
    """Which ranks each node holds, as far as this agent knows, and the lowest rank of the job, which may be on another node."""

    ranks: dict[str, list[int]]
    first: int


def membership(message: Message, name: str) -> WireMembership:
    """Return which node holds which ranks, and the lowest rank: that of these ranks, unless the command has it in ``first``."""
    value = message.get(name)
    if not isinstance(value, dict) or not all(_is_list(ranks, _is_integer) for ranks in value.values()):
        raise BadField(name, "an object of nodes and lists of ranks", value)
    first = optional(integer, message, "first")
    return WireMembership(value, min((rank for ranks in value.values() for rank in ranks), default=0) if first is None else first)


def environments_by(key: str) -> Callable[[Message, str], dict[int, dict[str, str]]]:
    """Return what reads a list of processes to start: the environment of each, by its rank or number, which is in *key*."""

    def read(message: Message, name: str) -> dict[int, dict[str, str]]:
        return {integer(item, key): environment(item, "environment") for item in objects(message, name)}

    return read


# -- types of fields: each with its reader ----------------------------------------------------------------------------------

Count = Annotated[int, integer]
Positive = Annotated[int, partial(integer, minimum=1)]
Step = Annotated[int, partial(integer, maximum=MAX_STEP)]
Signal = Annotated[int, signal_number]
Number = Annotated[float, number]
Seconds = Annotated[float, seconds]
Durations = Annotated[dict[str, float], durations]
Text = Annotated[str, text]
Flag = Annotated[bool, flag]
FilePath = Annotated[str, path]
Texts = Annotated[list[str], arguments]
Numbers = Annotated[list[int], numbers]
Groups = Annotated[list[list[int]], groups]
Object = Annotated[Message, mapping]
Objects = Annotated[list[Message], objects]
Addresses = Annotated[list[tuple[str, int]], addresses]
Membership = Annotated[WireMembership, membership]
Anything = Annotated[Any, dict.get]


@dataclass(frozen=True, slots=True)
class FieldType:
    """One field of a message."""

    hint: Any
    """Its type, for docs/reference/protocol.md."""
    read: Callable[[Message, str], Any]
    required: bool
    has_default: bool


@functools.cache
def fields_of(declared: Callable[..., Any]) -> Mapping[str, FieldType]:
    """Return the fields that the parameters of a handler or a record declare; one that may be None or has a default may be missing.

    A trailing underscore is not part of a field's name on the wire (``type_``). A parameter whose type has no reader is no field.
    """
    found: dict[str, FieldType] = {}
    parameters = inspect.signature(declared).parameters
    for name, hint in typing.get_type_hints(declared, include_extras=True).items():
        nullable = typing.get_origin(hint) in {typing.Union, types.UnionType}
        inner = typing.get_args(hint)[0] if nullable else hint
        if name in parameters and hasattr(inner, "__metadata__"):
            read, has_default = inner.__metadata__[0], parameters[name].default is not inspect.Parameter.empty
            required = not nullable and not has_default and read is not dict.get
            found[name] = FieldType(inner, read if required else partial(optional, read), required, has_default)
    return found


def read_fields(declared: Callable[..., Any], message: Message) -> dict[str, Any]:
    """Return the fields of *message* by the names of the parameters; raise `BadField` for the first that is missing or wrong."""
    values = {name: (field, field.read(message, name.removesuffix("_"))) for name, field in fields_of(declared).items()}
    return {name: value for name, (field, value) in values.items() if value is not None or not field.has_default}


def read_record(record: Callable[..., T], message: Message, _name: str = "") -> T:
    """Return the *record* whose fields stand in the message itself; raise `BadField` for the first that is missing or wrong."""
    return record(**read_fields(record, message))


def record_in(record: Callable[..., T]) -> Callable[[Message, str], T]:
    """Return what reads the *record* that is an object in one field."""

    def read(message: Message, name: str) -> T:
        return read_record(record, mapping(message, name))

    return read
