"""Check the answers of node proxies before anything uses them: a compromised node must not end the controller.

This is the only place that says which fields an answer needs, and of what type. Unknown fields are ignored, so a newer proxy may send more.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Annotated, Any, Final

from holdfast.agent.workers.log_files import NAME as LOG
from holdfast.detectors.codec import MalformedData, unpacked
from holdfast.protocol import MAX_LINE_BYTES, Message

MAX_COUNT: Final = 2**53
MAX_LOGS: Final = 2**16
"""Logs in one folder: one for each rank of the largest jobs, where nodes share it."""
MAX_INTERFACES: Final = 4096


def _between(low: int, high: int) -> Callable[[int], int]:
    def checked(number: int) -> int:
        if low <= number <= high:
            return number
        raise ValueError(f"is not from {low} to {high}")

    return checked


def _at_most(limit: int) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:  # noqa: ANN401 (a text or a collection)
        if len(value) <= limit:
            return value
        raise ValueError(f"is longer than {limit}")

    return checked


def _matching(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def checked(text: str) -> str:
        if compiled.fullmatch(text):
            return text
        raise ValueError("has another form")

    return checked


def _is_duration(seconds: float) -> float:
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    raise ValueError("is no number of seconds")


def _is_base64(text: str) -> str:
    base64.b64decode(_at_most(MAX_LINE_BYTES)(text), validate=True)
    return text


Count = Annotated[int, _between(0, MAX_COUNT)]
Port = Annotated[int, _between(1, 2**16 - 1)]
Seconds = Annotated[float, _is_duration]
Name = Annotated[str, _matching(r"[^\x00\r\n]{0,4096}")]
"""One line: it goes into messages, environments and paths."""
Log = Annotated[str, _matching(LOG.pattern)]
"""The name of a log: it becomes a path in a support bundle, and so on the machine where that is unpacked."""


def _answer(**fields: Any) -> type:  # noqa: ANN401 (types, and pairs of a type and a default)
    """Return a dataclass with these fields; a field of the form ``(type, default)`` may be missing from the answer."""
    parts = [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in fields.items()]
    return make_dataclass("Answer", parts, frozen=True, slots=True, kw_only=True)


_AGENT: Final[Any] = _answer(pid=Count, job=Name | None)
_INTERFACE: Final[Any] = _answer(name=Name, address=Name, network=Name)
ANSWERS: Final[dict[str, type]] = {
    "select-node": _answer(
        directory=Name,
        interpreter=Name,
        interfaces=Annotated[list[_INTERFACE], _at_most(MAX_INTERFACES)],
        reached=Name | None,
        agent=_AGENT | None,
        clock=(Seconds | None, None),
    ),
    "processors": _answer(gpus=Count, cpus=Count),
    "agent": _answer(agent=_AGENT | None),
    "fence": _answer(killed=list[Count]),
    "replay": _answer(events=list[dict[str, Any]]),
    "logs": _answer(logs=Annotated[dict[Log, Count], _at_most(MAX_LOGS)], place=(Name, "")),
    "log": _answer(data=Annotated[str, _is_base64]),
    "listen": _answer(port=Port, token=Name),
    "measure": _answer(bytes=Count, seconds=Seconds),
    "connect": _answer(why=Annotated[str, _at_most(1000)]),
}
"""Commands whose answers need fields; the other commands only succeed or fail."""


def problem_of(command: str, answer: Message) -> str:
    """Return what is wrong with the answer to *command*; empty when it can be used."""
    try:
        if command in ANSWERS:
            unpacked(ANSWERS[command], answer, where=command)
    except MalformedData as error:
        return _printable(str(error)[:300])
    return ""


def newer_epoch(answer: Message) -> int:
    """Return the epoch of the newer controller for whose sake a proxy refuses a command; 0 where it has another reason."""
    epoch = answer.get("epoch")
    return epoch if type(epoch) is int and 0 < epoch < MAX_COUNT else 0


def refusal(answer: Message) -> OSError:
    """Return why a proxy refused a command."""
    number, why = answer.get("errno"), answer.get("why")
    return OSError(number if type(number) is int and 0 <= number < MAX_COUNT else 0, _printable(str(why)[:1000]) or "it gives no reason")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
