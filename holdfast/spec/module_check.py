"""Whether a module that a job names can be run on this machine as `python -m` does, found out without importing it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from holdfast.errors import Problem
from holdfast.spec.job import TrainingJob

SECONDS: Final = 20.0
"""After this long nothing is said of the module: an interpreter on a slow file system is no mistake."""

SEARCH: Final = """
import importlib.machinery, importlib.util, sys

def search(name):
    top, *below = name.split(".")
    spec, at = importlib.util.find_spec(top), top
    if spec is None:
        return "absent"
    for part in [*below, None]:
        if spec.submodule_search_locations is None:
            return "found" if part is None else "no-package " + at
        if may_look_elsewhere(spec):
            return "found"
        place = list(spec.submodule_search_locations)
        spec = importlib.machinery.PathFinder.find_spec(at + "." + (part or "__main__"), place)
        if spec is None:
            return "no-main " + at if part is None else "lacks " + at
        if part is None:
            return "found"
        at += "." + part

def may_look_elsewhere(spec):
    "Whether the package may look for its modules elsewhere once it is imported."
    return spec.origin is None or "__path__" in open(spec.origin, encoding="utf-8", errors="replace").read()

print(search(sys.argv[1]))
"""
"""What the job's own interpreter runs: it prints ``found``, or what is wrong and with which package."""


def module_problems(job: TrainingJob) -> Iterator[Problem]:
    """Yield a problem where the job's interpreter, in its working directory, finds no such module, or one that cannot be run.

    No module is imported: that could take long, and do anything. Where that leaves doubt, nothing is said.
    """
    name = job.module or ""
    if name.endswith(".py") and job.inside(name).is_file():
        yield Problem(field="module", reason=f"'{name}' is a file", cure=f"Set `script: {name}`, or name the module: `{name[:-3]}`")
        return
    program = job.python or sys.executable
    try:
        found = subprocess.run(
            [str(job.inside(program)) if "/" in program else program, "-c", SEARCH, name],
            cwd=job.inside("."),
            env={**os.environ, **job.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return
    what, _, where = found.partition(" ")
    if what == "absent":
        top = name.partition(".")[0]
        cure = f"Fix the name, install it, or set PYTHONPATH in `env`; it is searched in {job.inside('.')} too"
        yield Problem(field="module", reason=f"{program} finds no module '{top}'", cure=cure)
    elif what == "no-main":
        cure = f"Name one of its modules, such as `{where}.train`"
        yield Problem(field="module", reason=f"'{where}' is a package without `__main__`, which cannot be run", cure=cure)
    elif what == "no-package":
        yield Problem(field="module", reason=f"'{where}' is a module, not a package: '{name}' cannot be in it", cure="Fix the name")
    elif what == "lacks":
        yield Problem(field="module", reason=f"package '{where}' has no module '{name}'", cure="Fix the name")
