"""Lines that an expression of a signature matches, made from the expression itself."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

parser: Any = import_module("re._parser")
"""What the standard library itself reads expressions with."""
sre: Any = import_module("re._constants")

GAPS: Final = (" ", " 0000:63:00.0 x: ", " 17 ", "")
"""What stands for a dot that is repeated."""
PRINTABLE: Final = string.ascii_lowercase + string.digits + string.ascii_uppercase + " " + string.punctuation
CLASSES: Final[dict[Any, Callable[[str], bool]]] = {
    sre.CATEGORY_DIGIT: str.isdigit,
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: lambda one: one.isalnum() or one == "_",
    sre.CATEGORY_NOT_DIGIT: lambda one: not one.isdigit(),
    sre.CATEGORY_NOT_SPACE: lambda one: not one.isspace(),
    sre.CATEGORY_NOT_WORD: lambda one: not (one.isalnum() or one == "_"),
}
MANY: Final = "999999"
"""For the group `count`: more than any kind's least."""


def lines_of(pattern: str, times: int, seed: int = 1) -> Iterator[str]:
    """Yield lines that *pattern* matches, from at most *times* attempts."""
    tree, regex, chance = parser.parse(pattern, re.ASCII), re.compile(pattern, re.ASCII), random.Random(seed)
    count = tree.state.groupdict.get("count")
    for _ in range(times):
        made = _Maker(chance, count).of(tree)
        yield from (line for line in (made, f" {made} ") if regex.search(line))


class _Maker:
    """One attempt at a line."""

    def __init__(self, chance: random.Random, count: int | None) -> None:
        self.chance, self.count = chance, count
        self.groups: dict[int, str] = {}

    def of(self, tree: Any) -> str:
        """Return text for the parts of an expression, one after another."""
        return "".join(self._part(op, value) for op, value in tree)

    def _part(self, op: Any, value: Any) -> str:
        if op is sre.LITERAL:
            return chr(value)
        if op in {sre.NOT_LITERAL, sre.IN, sre.ANY}:
            return self._character([(sre.NEGATE, None), (sre.LITERAL, value)] if op is sre.NOT_LITERAL else value if op is sre.IN else [])
        if op is sre.SUBPATTERN:
            text = MANY if value[0] is not None and value[0] == self.count else self.of(value[3])
            self.groups[value[0]] = text
            return text
        if op in {sre.MAX_REPEAT, sre.MIN_REPEAT}:
            return self._repeated(*value)
        if op is sre.GROUPREF:
            return self.groups.get(value, "")
        return self._one_of(op, value)

    def _one_of(self, op: Any, value: Any) -> str:
        if op is sre.BRANCH:
            return self.of(self.chance.choice(value[1]))
        return self.of(value[1]) if op is sre.ASSERT else ""  # a look back stands where nothing else wrote its text

    def _repeated(self, least: int, most: Any, tree: Any) -> str:
        if tree[0][0] is sre.ANY and most is sre.MAXREPEAT:
            return self.chance.choice(GAPS) or " " * least
        times = least or (0 if self.chance.random() < 0.6 else 1)
        return "".join(self.of(tree) for _ in range(times))

    def _character(self, allowed: list[tuple[Any, Any]]) -> str:
        negated = bool(allowed) and allowed[0][0] is sre.NEGATE
        fitting = [one for one in PRINTABLE if any(_fits(one, op, value) for op, value in allowed) != negated] if allowed else [" "]
        return self.chance.choice([one for one in fitting if one.isalnum()] or fitting or [""])


def _fits(one: str, op: Any, value: Any) -> bool:
    if op is sre.CATEGORY:
        return bool(CLASSES[value](one))
    return (op is sre.LITERAL and ord(one) == value) or (op is sre.RANGE and value[0] <= ord(one) <= value[1])
