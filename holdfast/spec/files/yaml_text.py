"""Parse the small, safe subset of YAML that job files use, with the line of every field.

Types are as in YAML 1.2 (``yes``, ``010`` and ``1:30`` are text), duplicate fields are refused, and under the fields in
``AS_TEXT`` numbers stay text: ``args: [--rate, 1e-3]`` passes ``1e-3`` on.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from holdfast.errors import Problem

AS_TEXT: Final = frozenset({"args", "command", "env"})
"""Top-level fields whose items are text, whatever they look like."""

MAX_FILE_BYTES: Final = 256 * 1024
MAX_VALUES: Final = 20_000
"""Values in a file, with aliases followed: a few lines must not expand to gigabytes."""
MAX_DEPTH: Final = 40

Path = tuple[str | int, ...]

_TAG: Final = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Recognizes null, booleans and numbers as YAML 1.2 does."""


_Loader.yaml_implicit_resolvers = {}
for _name, _shape, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_shape})\Z"), _first)


class Unreadable(Exception):
    """Text or a file that cannot be read; holds the `Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def _refuse(node: yaml.Node, reason: str, cure: str) -> Unreadable:
    return Unreadable(Problem(field=f"line {node.start_mark.line + 1}", reason=reason, cure=cure))


class Document:
    """The plain *data* of one YAML text, and the line of each of its fields."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._remaining = MAX_VALUES
        root = _composed(text)
        self.data = None if root is None else self._plain(root, ())

    def _plain(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401 (whatever the file holds)
        self._remaining -= 1
        if self._remaining < 0 or len(path) > MAX_DEPTH:
            raise _refuse(
                node, "the file has too many values or too many levels", "Write the values out, without aliases that repeat each other"
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*path, position)) for position, item in enumerate(node.value)]
        return _scalar(node, as_text=bool(path) and path[0] in AS_TEXT)

    def _item(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401 (whatever the file holds)
        self.lines[path] = node.start_mark.line + 1
        return self._plain(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refuse(key, "a field's name must be text", "Write `name: value`")
            if key.value in found:
                raise _refuse(key, f"field {key.value!r} is there twice", "Keep one of them")
            if key.value == "<<" and key.style is None:
                raise _refuse(key, "merge keys are not supported", "Write the fields out")
            self.lines[*path, key.value] = key.start_mark.line + 1
            found[key.value] = self._plain(value, (*path, key.value))
        return found


def _composed(text: str) -> yaml.Node | None:
    """Return the tree of *text*; raise `Unreadable` where it is not YAML."""
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        cure = "Only one document is read: remove the other" if "single document" in reason else "Fix the YAML there"
        if r"'\t'" in reason:
            reason, cure = "a tab stands where a field begins", "Indent with spaces"
        raise Unreadable(Problem(field=where, reason=f"not valid YAML: {reason}", cure=cure)) from error
    except yaml.reader.ReaderError as error:
        reason = f"character U+{int(error.character):04X} at position {error.position} is not text"
        raise Unreadable(Problem(field="file", reason=reason, cure="Save the file as plain text (UTF-8)")) from error
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise Unreadable(Problem(field="file", reason=f"not valid YAML: {reason}", cure="Fix the YAML")) from error


def _scalar(node: yaml.Node, *, as_text: bool) -> Any:  # noqa: ANN401 (whatever the file holds)
    kind, written = node.tag.removeprefix(_TAG), str(node.value)
    if kind == "str" or (as_text and kind in {"int", "float", "bool"}):
        return written
    try:
        match kind:
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[written.lower()]
            case "int":
                return int(written)
            case "float":
                return float(written.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except (ValueError, KeyError):
        raise _refuse(node, f"{written[:40]!r} is not of type {kind}", f"Remove the tag !!{kind}, or fix the value") from None
    raise _refuse(node, f"the tag {node.tag!r} is not supported", "Remove the tag")
