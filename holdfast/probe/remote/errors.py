"""Why a program on a node gave no answer, and whether that speaks against the node."""

from __future__ import annotations


class NoAnswer(Exception):
    """A program on a node gave no answer."""


class NodeUnreachable(NoAnswer):
    """The node gave no answer: it speaks against the node when it happens again and again."""


class ProbeFailed(NoAnswer):
    """The probe could not be carried out: it speaks against nobody."""


def printable(words: bytes) -> str:
    """Return what a node said as it may be shown: it may have said anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in words.decode("utf-8", "replace"))
