"""Dataclasses as JSON and back: each form that a field may have, and the refusal of every other one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import pytest

from holdfast.detectors.codec import MalformedData, Pool, packed, unpacked
from holdfast.detectors.evidence import Unknown


class Colour(StrEnum):
    """Some words."""

    RED = "red"


def _small(number: int) -> int:
    if number > 9:
        raise ValueError("is too large")
    return number


@dataclass(frozen=True)
class Part:
    """What may stand in several places."""

    name: str
    size: Annotated[int, _small] = 0


@dataclass(frozen=True)
class Whole:
    """One field of each form."""

    part: Part
    colour: Colour = Colour.RED
    maybe: int | None = None
    seen: float | Unknown = 0.0
    pair: tuple[str, int] = ("", 0)
    many: tuple[Part, ...] = ()
    names: frozenset[str] = frozenset()
    by_rank: dict[int, str] = field(default_factory=dict)
    in_order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


PART = Part("a", 3)
WHOLE = Whole(
    part=PART,
    maybe=4,
    seen=Unknown("no driver"),
    pair=("x", 1),
    many=(PART, Part("a", 3)),
    names=frozenset({"b", "a"}),
    by_rank={2: "two"},
    in_order={"z": (1,), "a": ()},
)


def test_every_form_comes_back() -> None:
    """A mapping that is no dict keeps its order in a database that sorts the keys of objects."""
    encoded = json.loads(json.dumps(packed(WHOLE), sort_keys=True))
    assert (encoded["by_rank"], encoded["in_order"], encoded["names"]) == ({"2": "two"}, [["z", [1]], ["a", []]], ["a", "b"])
    back = unpacked(Whole, encoded)
    assert back == WHOLE
    assert list(back.in_order) == ["z", "a"]


def test_what_is_in_the_pool_is_one_object_again() -> None:
    """Equal values that are not the same object stay apart."""
    pool = Pool(Part)
    encoded = json.loads(json.dumps(packed(WHOLE, pool)))
    assert (encoded["part"], encoded["many"], len(pool.values)) == (0, [0, 1], 2)
    back = unpacked(Whole, encoded, pool=pool)
    assert back.part is back.many[0] is PART
    assert back.many[1] is not PART
    for number in (2, -1, True, "0", {"name": "a"}):
        with pytest.raises(MalformedData, match=r"Whole\.part: .* Part"):
            unpacked(Whole, {"part": number}, pool=pool)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("part", {}, r"Whole\.part: .*name"),
        ("part", {"name": "a", "size": 10}, r"Whole\.part\.size: '10' is too large"),
        ("colour", "blue", r"Whole\.colour: 'blue' is no Colour"),
        ("maybe", True, r"Whole\.maybe"),
        ("seen", "fast", r"Whole\.seen"),
        ("seen", 10**400, r"Whole\.seen"),
        ("pair", ["x"], r"Whole\.pair"),
        ("pair", ["x", "y"], r"Whole\.pair\[1\]"),
        ("many", [{"name": "a"}, 3], r"Whole\.many\[1\]: '3' is no Part"),
        ("names", "ab", r"Whole\.names"),
        ("by_rank", {"two": "two"}, r"Whole\.by_rank\.two: 'two' is no int"),
        ("in_order", [["z"]], r"Whole\.in_order\[0\]"),
    ],
)
def test_another_form_is_refused_by_its_place(name: str, value: Any, where: str) -> None:
    """Who reads the complaint finds the field."""
    with pytest.raises(MalformedData, match=where):
        unpacked(Whole, {**packed(WHOLE), name: value})


def test_nan_and_infinity_round_trip_as_strings() -> None:
    """The history writes them so; no other word is a number."""
    assert unpacked(Whole, {"part": {"name": ""}, "seen": "-Infinity"}).seen == float("-inf")
    with pytest.raises(MalformedData):
        unpacked(Whole, {"part": {"name": ""}, "seen": "1.5"})


def test_what_has_no_form_in_json_is_an_error_where_it_is_written() -> None:
    """Otherwise it would come to light years later, where it is read."""
    with pytest.raises(TypeError, match="object"):
        packed([object()])
