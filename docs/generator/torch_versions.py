"""The page of torch versions, from the stored results of `make matrix`."""

from __future__ import annotations

from docs.generator.markdown import page, table
from holdfast.torch_versions import TESTED
from tests.matrix.results import FRAMEWORKS, GROUPS, LEVELS, STATE, UNCHANGED, Level, Result, missing, read

PROVES = {
    UNCHANGED: "a script that uses nothing of Holdfast: its faults, its restarts, its heartbeats",
    STATE: "`holdfast.session` and `Loader`: snapshots, checkpoints, and a resume that is bit-equal",
    GROUPS: "process groups in which a lost rank is replaced while the others keep their processes",
    FRAMEWORKS: "callbacks for the Hugging Face Trainer and Lightning, and loops with Accelerate, in the versions of `constraints.txt`",
}


def torch_versions_page() -> str:
    """Say which versions of torch were run, and which levels passed with each."""
    results = read()
    absent = missing(results)
    troubles = [line for result in results for line in _troubles(result)]
    return page(
        "# Versions of torch\n",
        f"Holdfast supports torch {TESTED}. These are the versions that its tests were run with, on CPUs over gloo;",
        "`constraints.txt` locks the one that every change is tested with. A version that is not in the table has not been run.\n",
        table(
            ("torch", "Python", *LEVELS),
            *((_public(one.torch), one.python, *(_cell(one.levels[name]) for name in LEVELS)) for one in results),
        ),
        *((f"Supported, and not run yet: torch {', '.join(absent)}.\n",) if absent else ()),
        "A level passes when none of its tests failed. A test that failed was run again, alone: at once, and after it was mended.\n",
        table(("Level", "What its tests prove"), *PROVES.items()),
        "## What did not pass\n",
        table(("torch", "Test", "What happened"), *troubles) if troubles else "Nothing.\n",
        "## Run it\n",
        "```bash\nmake matrix                   # all versions, one after another\nmake matrix VERSIONS=2.15     # one of them\n"
        "make matrix KEEP=1            # and keep the environments\n"
        "make matrix FAILED=1          # only the tests that failed, after they were mended\n```\n",
        "Each version gets an environment of its own below `build/matrix/`, which is deleted afterwards: up to 6 GB.",
        "The tests take about 10 minutes on two cores. `make test` and the checks of a change do not run them.\n",
        "Another version works as far as it has what is needed: the log of rank 0 and `holdfast node preflight` say that it is untested.",
        "Where managed groups lack something in it, the groups are torch's own, and the log says what is missing.",
        "",
    )


def _public(version: str) -> str:
    """Return a version without its build."""
    return version.partition("+")[0]


def _cell(level: Level) -> str:
    counts = [f"{level.passed} passed"]
    counts += [f"{len(level.failed)} failed"] if level.failed else []
    counts += [f"{level.skipped} skipped"] if level.skipped else []
    return f"{'yes' if level.passes else 'no'} ({', '.join(counts)})"


def _troubles(result: Result) -> list[tuple[str, str, str]]:
    """Return a row for every test that failed, or passed at the second attempt only."""
    rows = []
    for level in result.levels.values():
        rows += [(_public(result.torch), f"`{test}`", why) for test, why in level.failed.items()]
        rows += [(_public(result.torch), f"`{test}`", "passed at the second attempt") for test in level.repeated]
    return rows
