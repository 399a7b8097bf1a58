"""Run job and cluster files in Python: modules that set ``job`` (and ``cluster``)."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from holdfast.errors import Problem
from holdfast.spec.files.problems import shown
from holdfast.spec.files.yaml_text import Unreadable


def values_of(path: Path, text: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Run the Python *text* of the file at *path* and return its variables *names*; the first one must be set."""
    code = _compiled(path, text, names[0])
    module = types.ModuleType("__holdfast_job__")
    module.__file__ = str(path)
    try:
        with _importing_from(path.parent), _exit_raises(), contextlib.redirect_stdout(sys.stderr):
            exec(code, module.__dict__)  # noqa: S102 (the user's own file, as `python FILE` would run it)
    except ValidationError:
        raise
    except (Exception, SystemExit, _ExitedError) as error:
        raise Unreadable(_problem(path, error)) from error
    return {name: getattr(module, name, None) for name in names}


def _compiled(path: Path, text: str, name: str) -> types.CodeType:
    """Compile *text*; refuse one that never sets *name* without running it: it may be a training script."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, filename=str(path))
            code = compile(tree, str(path), "exec")
    except SyntaxError as error:
        reason = f"not valid Python: {error.msg}"
        raise Unreadable(
            Problem(field=f"line {error.lineno}" if error.lineno else "file", reason=reason, cure="Fix the Python there")
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(Problem(field="file", reason=f"not valid Python: {error}", cure="Fix the Python")) from error
    if name not in set(_names_set(tree)):
        runs = f"`holdfast run {path.name}` runs it as it is, and `holdfast init {path.name}` writes a job file for it"
        cure = f"Add `{name} = ...`; if this is the training script: {runs}"
        raise Unreadable(Problem(field=name, reason=f"the file sets no `{name}`", cure=cure))
    return code


def _names_set(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _problem(path: Path, error: BaseException) -> Problem:
    """Return where and what the file raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    message = _first_line(error)
    reason = message if isinstance(error, _ExitedError) else f"raised {type(error).__name__}: {message}".rstrip(": ")
    return Problem(field=f"line {lines[-1]}" if lines else "file", reason=reason, cure="Fix the file; `python FILE` shows the traceback")


def _first_line(error: BaseException) -> str:
    try:
        return shown(str(error).partition("\n")[0])
    except Exception:  # noqa: BLE001 (a foreign exception may not even print)
        return ""


class _ExitedError(BaseException):
    """The file called ``os._exit``."""


@contextlib.contextmanager
def _exit_raises() -> Iterator[None]:
    """Make ``os._exit`` raise in this process while the block runs; children that the file forks exit as usual."""
    real, ours = os._exit, os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() != ours:
            real(status)
        raise _ExitedError(f"it ends the process with os._exit({status})")

    os._exit = refused
    try:
        yield
    finally:
        os._exit = real


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let the file import modules of its *folder*, as `python FILE` would."""
    before = sys.path.copy()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
