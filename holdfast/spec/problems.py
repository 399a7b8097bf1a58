"""From what pydantic refuses to a `Problem` with field, reason and cure."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from holdfast.errors import Problem
from holdfast.spec.durations import text_of
from holdfast.spec.yaml_text import Path

CURES: Final[dict[str, str]] = {
    "missing": "Add it",
    "string_type": "Write text, in quotes if it looks like a number",
    "int_type": "Write a whole number, without quotes",
    "int_parsing": "Write a whole number",
    "float_type": "Write a number, without quotes",
    "float_parsing": "Write a number",
    "dict_type": "Write fields under it, one `name: value` a line",
    "model_type": "Write fields under it, one `name: value` a line",
    "model_attributes_type": "Write fields under it, one `name: value` a line",
    "too_short": "Write at least one item",
    "string_too_short": "Write something, or leave the field out",
    "string_unicode": "Remove the characters that are no text",
    "greater_than_equal": "Raise it",
    "greater_than": "Raise it",
    "less_than_equal": "Lower it",
    "finite_number": "Write an ordinary number",
}
"""Cure by pydantic's kind of error."""

_LENGTH: Final = re.compile(r"datetime\.timedelta\((?:0|(?:(?:days|seconds|microseconds)=\d+(?:, )?)+)\)")
_UNIT: Final = re.compile(r"(days|seconds|microseconds)=(\d+)")
LONGEST: Final = 120
"""Characters of a user's value that are repeated in a message."""


def problems_in(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return every problem that *error* holds about a *model*."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def shown(text: str) -> str:
    """Return *text* short and printable on any terminal."""
    clean = "".join(letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode() for letter in text)
    clean = clean.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= LONGEST else f"{clean[:LONGEST]}..."


def path_of(details: ErrorDetails) -> Path:
    """Return where the error is, without pydantic's own marks (``[key]``)."""
    return tuple(part for part in details["loc"] if part != "[key]")


def dotted(path: Path) -> str:
    """Return *path* as people write it: ``nodes.wanted``, ``args[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
    return text.removeprefix(".") or "file"


def nearest(word: str, known: Iterator[str] | list[str]) -> str:
    """Return ``Did you mean 'x'?``, or nothing when no known word is near."""
    near = difflib.get_close_matches(word[:LONGEST], list(known), n=1)
    return f"Did you mean '{near[0]}'?" if near else ""


def _problem(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    path, kind, context = path_of(details), details["type"], details.get("ctx", {})
    if kind == "contradiction":
        field = f"{dotted(path)}.{context['field']}" if path else context["field"]
        return Problem(field=field, reason=context["reason"], cure=context["cure"])
    if kind == "extra_forbidden":
        return _unknown_field(path, model)
    return Problem(field=dotted(path), reason=_reason(details), cure=_cure(path, kind, context, details["input"]))


def _unknown_field(path: Path, model: type[BaseModel]) -> Problem:
    fields = _fields_at(path[:-1], model)
    cure = nearest(str(path[-1]), fields) or f"Remove it; the fields here are {', '.join(fields)}"
    return Problem(field=dotted(path), reason="unknown field", cure=cure)


def _fields_at(path: Path, model: type[BaseModel]) -> list[str]:
    """Return the names of the fields of the part of *model* at *path*."""
    for part in path:
        if isinstance(part, int):
            continue  # one of a list: the list's type told of what
        inner = model_in(model.model_fields[str(part)].annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def model_in(annotation: object) -> type[BaseModel] | None:
    """Return the model that a field of that *annotation* holds, by itself or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := model_in(inner)) is not None), None)


def _reason(details: ErrorDetails) -> str:
    """Say what is wrong with the value; foreign words are put into ours."""
    value, said = shown(repr(details["input"])), shown(details["msg"])
    reasons = {
        "missing": "is missing",
        "model_type": f"{value} holds no fields",
        "model_attributes_type": f"{value} holds no fields",
        "dict_type": f"{value} holds no fields",
        "string_pattern_mismatch": f"{value} is not a name of small letters, digits and dashes",
        "literal_error": f"{value} is not one of {details.get('ctx', {}).get('expected')}",
    }
    said = _LENGTH.sub(lambda found: text_of(timedelta(**{unit: int(number) for unit, number in _UNIT.findall(found[0])})), said)
    wanted = said.removeprefix("Input should be ").replace("a valid integer", "a whole number").replace("a valid list", "a list")
    wanted = wanted.replace("a valid ", "")
    return reasons.get(details["type"]) or (said if wanted == said else f"{value} is not {wanted}")


def _cure(path: Path, kind: str, context: Mapping[str, Any], value: object) -> str:
    if cure := context.get("cure"):
        return str(cure)
    if kind == "list_type":
        return _cure_of_list(path, value)
    if kind == "string_pattern_mismatch":
        return "Start and end with a letter or digit; at most 63 characters, e.g. 'gpt-small'"
    if kind == "literal_error":
        return "Write one of them"
    if kind == "missing" and path == ("name",):
        return "Add it, e.g. `name: gpt-small`"
    return CURES.get(kind, "Mend it")


def _as_words(field: str, value: object) -> str:
    """Return the words that a shell would make of *value*, or that options and their values are, as the list to write."""
    example = ["python", "train.py"] if field == "command" else ["--epochs", "3"]
    words: list[str] = []
    if isinstance(value, str):
        with suppress(ValueError):  # a quotation mark without its twin
            words = shlex.split(value)
    elif isinstance(value, dict) and field == "args":
        words = [word for name, one in value.items() for word in (f"--{str(name).lstrip('-')}", str(one))]
    return f"Write a list, one item a word: {json.dumps(words)}" if words else f"Write a list, one item a word, e.g. {json.dumps(example)}"


def _cure_of_list(path: Path, value: object) -> str:
    if path[-1:] in {("command",), ("args",)}:
        return _as_words(str(path[-1]), value)
    return shown(f"Write a list: {json.dumps([value])}") if isinstance(value, str) else "Write a list: one item a line, each after a dash"
