"""The tree of errors: drawn in its docstring, and every class of it survives a pickle."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterator

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, Problem


def classes() -> list[type[HoldfastError]]:
    """Return all classes of the tree."""
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HoldfastError)]
    return sorted(found, key=lambda one: one.__name__)


def drawn() -> Iterator[tuple[str, str | None]]:
    """Yield each class of the drawing with the one above it."""
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([│ ├└─]*)([A-Z]\w+)(\s{2,}|$)", line)
        if not found:
            continue
        depth = len(found[1])
        while above and above[-1][0] >= depth:
            above.pop()
        yield found[2], above[-1][1] if above else None
        above.append((depth, found[2]))


def test_the_drawing_is_the_tree() -> None:
    """Each class stands in the docstring under its own base."""
    assert dict(drawn()) == {one.__name__: None if one is HoldfastError else one.__bases__[0].__name__ for one in classes()}


def made(one: type[HoldfastError]) -> HoldfastError:
    """Return an error of the class *one* with a value for each field."""
    values: dict[str, object] = {
        "tuple[str, ...]": ("a", "b"),
        "tuple[Problem, ...]": (Problem(field="f", reason="r", cure="c"),),
        "int": 3,
    }
    return one(*(values.get(str(field.type), "words") for field in dataclasses.fields(one) if field.init))


@pytest.mark.parametrize("one", classes(), ids=lambda one: one.__name__)
def test_an_error_survives_pickling_and_has_a_message(one: type[HoldfastError]) -> None:
    """Prefect and torch send errors between processes."""
    error = made(one)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert type(again) is one
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    if dataclasses.fields(one):
        assert "words" in str(error) or "problem" in str(error)
