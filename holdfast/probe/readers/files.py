"""Read small files of the kernel; what cannot be read is `Unknown`, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.detectors.evidence import Unknown

MAX_BYTES = 1 << 20
"""Bytes read of one file: files of the kernel are small, and a larger one is something else."""

T = TypeVar("T")


def text(path: Path) -> str | Unknown:
    """Return the text of the file at *path*, stripped."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip()
    except OSError as error:
        return unknown(path, error)


def parsed(path: Path, parse: Callable[[str], T], what: str) -> T | Unknown:
    """Return what *parse* makes of the file at *path*; where it raises ``ValueError`` or ``LookupError``, that the text is no *what*."""
    found = text(path)
    if isinstance(found, Unknown):
        return found
    try:
        return parse(found)
    except (ValueError, LookupError):
        return Unknown(f"{path}: {found[:40]!r} is no {what}")


def number(path: Path) -> int | Unknown:
    """Return the number in the file at *path*, decimal or with a prefix such as `0x`."""
    return parsed(path, lambda found: int(found, 0), "number")


def flag(path: Path) -> bool | Unknown:
    """Return whether the file at *path* contains 1."""
    found = number(path)
    return found if isinstance(found, Unknown) else found == 1


def entries(path: Path) -> tuple[Path, ...] | Unknown:
    """Return the entries of the folder at *path*, sorted by name."""
    try:
        return tuple(sorted(path.iterdir()))
    except OSError as error:
        return unknown(path, error)


def counters(path: Path) -> dict[str, int] | Unknown:
    """Return each file in the folder at *path* that contains a number; one that cannot be read is left out."""
    files = entries(path)
    if isinstance(files, Unknown):
        return files
    return {file.name: value for file in files if not isinstance(value := number(file), Unknown)}


def unknown(path: Path, error: OSError) -> Unknown:
    """Return why *path* could not be read."""
    return Unknown(f"{path}: {error.strerror or error}")
