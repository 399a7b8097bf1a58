"""Turn pydantic's validation errors into `Problem`s with field, reason and cure."""

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
from holdfast.spec.files import synonyms
from holdfast.spec.files.units import format_duration
from holdfast.spec.files.yaml_text import Path

CURES: Final[dict[str, str]] = {
    "string_pattern_mismatch": "Start and end with a letter or digit; at most 63 characters, e.g. 'gpt-small'",
    "literal_error": "Write one of them",
    "missing": "Add it",
    "string_type": "Write text, in quotes if it looks like a number",
    "bool_type": "Write true or false, without quotes",
    "bool_parsing": "Write true or false, without quotes",
    "int_type": "Write an integer, without quotes",
    "int_parsing": "Write an integer",
    "float_type": "Write a number, without quotes",
    "float_parsing": "Write a number",
    "dict_type": "Write fields under it, one `name: value` a line",
    "model_type": "Write fields under it, one `name: value` a line",
    "model_attributes_type": "Write fields under it, one `name: value` a line",
    "too_short": "Write at least one item",
    "string_too_short": "Write some text, or leave the field out",
    "string_unicode": "Remove the characters that are not text",
    "greater_than_equal": "Raise it",
    "greater_than": "Raise it",
    "less_than_equal": "Lower it",
    "finite_number": "Write an ordinary number",
}
"""Cure by pydantic's error type."""

_TIMEDELTA: Final = re.compile(r"datetime\.timedelta\((?:0|(?:(?:days|seconds|microseconds)=\d+(?:, )?)+)\)")
_TIMEDELTA_PART: Final = re.compile(r"(days|seconds|microseconds)=(\d+)")
MAX_SHOWN: Final = 120
"""Characters of a user's value that a message repeats."""


def problems_in(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return every problem in *error*, raised by *model*."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def shown(text: str) -> str:
    """Return *text* short and printable on any terminal."""
    clean = "".join(letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode() for letter in text)
    clean = clean.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= MAX_SHOWN else f"{clean[:MAX_SHOWN]}..."


def path_of(details: ErrorDetails) -> Path:
    """Return the path of the field with the error, without pydantic's own marks (``[key]``)."""
    return tuple(part for part in details["loc"] if part != "[key]")


def dotted(path: Path) -> str:
    """Return *path* as people write it: ``nnodes``, ``args[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
    return text.removeprefix(".") or "file"


def nearest(word: str, known: list[str]) -> str:
    """Return ``Did you mean 'x'?``, or an empty string when nothing in *known* is similar to *word*."""
    near = difflib.get_close_matches(word[:MAX_SHOWN], known, n=1)
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
    word, part = str(path[-1]), ".".join(one for one in path[:-1] if isinstance(one, str))
    fields = _fields_at(path[:-1], model)
    cure = _as_written(word, fields) or _synonym(word, part, fields, model) or _elsewhere(word, model) or nearest(word, fields)
    cure = cure or f"Remove it; the fields here are {', '.join(fields)}"
    return Problem(field=dotted(path), reason="unknown field", cure=cure)


def _as_written(word: str, fields: list[str]) -> str:
    """Return the cure for a field that is known, but spelled as an option or in capitals."""
    return f"Use `{synonyms.plain(word)}`" if synonyms.plain(word) in fields else ""


def _synonym(word: str, part: str, fields: list[str], model: type[BaseModel]) -> str:
    """Return the cure for a word that others use for a field which this kind of file has."""
    meant = synonyms.meaning(word, part, _tables(model))
    if meant.startswith("Leave"):
        return meant
    if " " in meant:
        return f"Use {meant}"
    return f"Use `{meant}`" if meant and (meant in fields or meant in _places(model)) else ""


def _tables(model: type[BaseModel]) -> tuple[synonyms.Table, ...]:
    """Return the words that may stand for fields of *model*."""
    if model.__name__ == "TrainingJob":
        return synonyms.JOB
    if model.__name__ == "PolicyFile":
        return synonyms.POLICY
    return synonyms.CLUSTER if "kind" in model.model_fields else ()


def _elsewhere(word: str, model: type[BaseModel]) -> str:
    """Return the cure for a field that belongs into another part of the file, or into another file."""
    name = synonyms.plain(word)
    places = [place for place in _places(model) if place.rpartition(".")[2] == name]
    if len(places) == 1:
        return f"Use `{places[0]}`"
    if model.__name__ == "TrainingJob":
        from holdfast.spec.cluster import KINDS  # noqa: PLC0415 (clusters need this module)

        kinds = [kind for kind, other in KINDS.items() if name in other.model_fields]
        if kinds:
            return f"Write it under `cluster:` (of kind {' or '.join(kinds)}), or in a cluster file"
        if name in synonyms.POLICY_ONLY:
            return "Write it in a policy file, and name that file in `policy`"
    return ""


def _places(model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of *model* and of its parts."""
    for name, info in model.model_fields.items():
        yield at + name
        inner = model_in(info.annotation)
        if inner is not None:
            yield from _places(inner, f"{at}{name}.")


def _fields_at(path: Path, model: type[BaseModel]) -> list[str]:
    """Return the names of the fields of the part of *model* at *path*."""
    for part in path:
        if isinstance(part, int):
            continue  # an item of a list has the type of the list's annotation
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


def models_in(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield *model* and the models of its parts."""
    yield model
    for info in model.model_fields.values():
        if (inner := model_in(info.annotation)) is not None:
            yield from models_in(inner)


def _reason(details: ErrorDetails) -> str:
    """Return what is wrong with the value, in our terms."""
    value, message = shown(repr(details["input"])), shown(details["msg"])
    reasons = {
        "missing": "is missing",
        "string_type": f"{value} is not text",
        "bool_type": f"{value} is neither true nor false",
        "bool_parsing": f"{value} is neither true nor false",
        "model_type": f"{value} holds no fields",
        "model_attributes_type": f"{value} holds no fields",
        "dict_type": f"{value} holds no fields",
        "string_pattern_mismatch": f"{value} is not a name of lowercase letters, digits and dashes",
        "literal_error": f"{value} is not one of {details.get('ctx', {}).get('expected')}",
    }
    message = _TIMEDELTA.sub(
        lambda found: format_duration(timedelta(**{unit: int(number) for unit, number in _TIMEDELTA_PART.findall(found[0])})), message
    )
    wanted = message.removeprefix("Input should be ").replace("a valid integer", "an integer").replace("a valid list", "a list")
    wanted = wanted.replace("a valid ", "a ")
    return reasons.get(details["type"]) or (message if wanted == message else f"{value} is not {wanted}")


def _cure(path: Path, kind: str, context: Mapping[str, Any], value: object) -> str:
    if cure := context.get("cure"):
        return str(cure)
    if kind == "list_type":
        return _cure_of_list(path, value)
    if kind in {"dict_type", "model_type"} and (cure := _cure_of_fields(path, value)):
        return cure
    if kind == "missing" and path == ("name",):
        return "Add it, e.g. `name: gpt-small`"
    return CURES.get(kind, "Fix it")


def _cure_of_fields(path: Path, value: object) -> str:
    """Return the cure for a *value* where fields should be, if it shows what was meant; else an empty text."""
    if isinstance(value, list) and value and all(isinstance(one, str) and "=" in one for one in value):
        name, _, setting = value[0].partition("=")  # as Docker Compose has them
        return shown(f"Write one variable a line, without a dash, e.g. `{name}: {json.dumps(setting)}`")
    is_folder = path == ("checkpoint",) and isinstance(value, str)
    return shown(f"Write the folder under it: `directory: {value}`") if is_folder else ""


def _cure_of_arguments(field: str, value: object) -> str:
    """Return the cure for a *value* that should be a list: the items that a shell would make of it, or of options and their values."""
    example = ["python", "train.py"] if field == "command" else ["--epochs", "3"]
    words: list[str] = []
    if isinstance(value, str):
        with suppress(ValueError):  # an unclosed quotation mark
            words = shlex.split(value)
    elif isinstance(value, dict) and field == "args":
        words = [word for name, one in value.items() for word in (f"--{str(name).lstrip('-')}", str(one))]
    return f"Write a list, one item a word: {json.dumps(words)}" if words else f"Write a list, one item a word, e.g. {json.dumps(example)}"


def _cure_of_list(path: Path, value: object) -> str:
    if path[-1:] in {("command",), ("args",)}:
        return _cure_of_arguments(str(path[-1]), value)
    return shown(f"Write a list: {json.dumps([value])}") if isinstance(value, str) else "Write a list: one item a line, each after a dash"
