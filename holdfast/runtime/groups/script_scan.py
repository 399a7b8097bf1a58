"""Whether a script uses a session, found in its source: `init_process_group` is called before it could begin one.

All ranks must come to the same answer, as they create their groups together. So it depends on files alone, which all nodes have, and not on
what a rank has imported so far.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

MAX_FILES: Final = 500
"""Files that are read at most."""
_HOLDFAST: Final = Path(__file__).resolve().parents[3]
_PACKAGES: Final = frozenset({"site-packages", "dist-packages"})
STATELESS: Final = frozenset({"heartbeat", "section", "__version__"})
"""Public names of Holdfast that manage no state."""
STATELESS_MODULES: Final = frozenset({"holdfast.integrations.megatron"})
"""Integrations that manage no state."""


def uses_session(main: Path, package: str, arguments: Sequence[str]) -> bool:
    """Return whether *main*, or a module of the user's that it imports, uses `holdfast.session` or an integration.

    *package*: the package that *main* belongs to, if it runs as a module. *arguments*: those of the command line, which may name an
    integration. Installed packages are not read.
    """
    if any("holdfast." in one for one in arguments):
        return True
    folders, waiting, seen = _folders(main), [(main, package)], set[Path]()
    while waiting and len(seen) < MAX_FILES:
        file, inside = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if _names_session(tree):
            return True
        waiting += [found for name in _imports(tree, inside) for found in _files(name, folders)]
    return False


def _folders(main: Path) -> list[Path]:
    """Return where the user's own modules are: the folders in which Python searches, except those of installed packages."""
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {_HOLDFAST}
    found = [one for one in (Path(one or ".").resolve() for one in sys.path) if one.name not in _PACKAGES and one.is_dir()]
    return [main.parent, *(one for one in found if one not in installed)]


def _names_session(tree: ast.AST) -> bool:
    """Return whether a module uses a name of Holdfast that manages state, by any way to import it."""
    called = {"holdfast"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            root = node.module.partition(".")[0]
            stateless = {f"holdfast.{one}" for one in STATELESS} | STATELESS_MODULES
            if root == "holdfast" and node.module not in STATELESS_MODULES and _names_other(node, stateless):
                return True
        elif isinstance(node, ast.Import):
            if any(one.name.startswith("holdfast.") and one.name not in STATELESS_MODULES for one in node.names):
                return True
            called.update(one.asname for one in node.names if one.name == "holdfast" and one.asname)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("holdfast."):
            return True  # importlib.import_module("holdfast.integrations.lightning")
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called and node.attr not in STATELESS
        for node in ast.walk(tree)
    )


def _names_other(node: ast.ImportFrom, names: Collection[str]) -> bool:
    """Return whether *node* imports anything but *names*."""
    return any(f"{node.module}.{one.name}" not in names for one in node.names)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the full names of modules that a module in *package* may import; those of functions and classes are among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level and package else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{one.name}" for one in node.names)


def _files(name: str, folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files of the user's that importing *name* runs, each with the package that it belongs to."""
    parts = name.split(".")
    for folder in folders:
        place = folder / parts[0]
        if not place.is_dir() and not place.with_name(f"{parts[0]}.py").is_file():
            continue
        for number in range(1, len(parts) + 1):
            here = folder.joinpath(*parts[:number])
            if (here / "__init__.py").is_file():
                yield here / "__init__.py", ".".join(parts[:number])
            elif here.with_name(f"{here.name}.py").is_file():
                yield here.with_name(f"{here.name}.py"), ".".join(parts[: number - 1])
        return
