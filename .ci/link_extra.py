"""Show the packages of one extra, and no other, to a fresh environment: links to what is installed here, so it takes a second."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str, extras: frozenset[str], seen: dict[str, Distribution]) -> None:
    """Enter into *seen* what *name* with its *extras* needs, itself included."""
    found = distribution(name)
    seen[name.lower()] = found
    for line in found.requires or ():
        need = Requirement(line)
        if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        if need.name.lower() not in seen or need.extras:
            closure(need.name, frozenset(need.extras), seen)


def link(found: Distribution, into: Path) -> None:
    """Link every top-level file and folder of *found* into the folder *into*."""
    for top in {path.parts[0] for path in found.files or () if not path.parts[0].startswith("..")}:
        source, target = Path(str(found.locate_file(top))), into / top
        if source.exists() and not target.exists() and top != "__pycache__":
            target.symlink_to(source)


def main(extra: str, environment: str) -> None:
    """Link the closure of Holdfast's *extra* into *environment*."""
    (into,) = Path(environment).glob("lib/python*/site-packages")
    seen: dict[str, Distribution] = {}
    closure("holdfast", frozenset({extra}), seen)
    for found in seen.values():
        link(found, into)


if __name__ == "__main__":
    main(*sys.argv[1:])
