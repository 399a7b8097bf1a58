"""What a message for people must name: nodes, ranks, numbers, files and commands, whatever sentence stands around them."""

from __future__ import annotations

import re


def mentions(text: str, *parts: object) -> bool:
    """Return whether *text* has each of *parts* as whole words, in any order."""
    return all(re.search(rf"(?<![\w-]){re.escape(str(part))}(?![\w-])", text) for part in parts)


def one_line_mentions(text: str, *parts: object) -> bool:
    """Return whether one line of *text* has all *parts*."""
    return any(mentions(line, *parts) for line in text.splitlines())
