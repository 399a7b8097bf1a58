"""Small files of the kernel: what is in them, or why that is not known."""

from __future__ import annotations

from pathlib import Path

from detectors.evidence import Unknown

MOST = 1 << 20
"""Bytes read of one file at most: files of the kernel are small, and what is larger is none."""


def text(path: Path) -> str | Unknown:
    """Return what stands in the file at *path*, without blanks around it."""
    try:
        with path.open("rb") as file:
            return file.read(MOST).decode(errors="replace").strip()
    except OSError as error:
        return blind(path, error)


def number(path: Path) -> int | Unknown:
    """Return the number that stands in the file at *path*."""
    found = text(path)
    if isinstance(found, Unknown):
        return found
    try:
        return int(found, 0)
    except ValueError:
        return Unknown(f"{path}: {found[:40]!r} is no number")


def flag(path: Path) -> bool | Unknown:
    """Return whether the file at *path* says 1."""
    found = number(path)
    return found if isinstance(found, Unknown) else found == 1


def entries(path: Path) -> tuple[Path, ...] | Unknown:
    """Return what lies in the folder at *path*, in the order of names."""
    try:
        return tuple(sorted(path.iterdir()))
    except OSError as error:
        return blind(path, error)


def counters(path: Path) -> dict[str, int] | Unknown:
    """Return each file in the folder at *path* that holds a number; one that cannot be read is left out."""
    files = entries(path)
    if isinstance(files, Unknown):
        return files
    return {file.name: value for file in files if not isinstance(value := number(file), Unknown)}


def blind(path: Path, error: OSError) -> Unknown:
    """Say why *path* could not be read."""
    return Unknown(f"{path}: {error.strerror or error}")
