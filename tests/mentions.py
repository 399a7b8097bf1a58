"""What a message for people must name: nodes, ranks, numbers, files and commands, whatever sentence stands around them.

A part is one name or number, with its unit or the noun that it counts. What has a field is asserted by its field, and whole sentences are
in `tests/test_golden_texts.py`.
"""

from __future__ import annotations

import re

BEFORE = r"(?<![\w-])(?<!\w\.)(?<!\d[,:])"
AFTER = r"(?![\w-])(?!\.\w)(?![,:]\d)"
"""Neither inside a word, a dotted name or file name, nor inside a number: 5 is not in 15, 0.5, 5.0, 5,000, 12:05, node-5 or 5.yaml."""


def mentions(text: str, *parts: object) -> bool:
    """Return whether *text* has each of *parts* as whole words and numbers, in any order."""
    assert parts
    assert all(map(str, parts)), "what is empty is everywhere"
    return all(re.search(BEFORE + re.escape(str(part)) + AFTER, text) for part in parts)


def one_line_mentions(text: str, *parts: object) -> bool:
    """Return whether one line of *text* has all *parts*."""
    return any(mentions(line, *parts) for line in text.splitlines())
