"""Every file, module and name of our code that a page has in backticks exists; `tests/cli/test_named_commands.py` is for commands."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.generate import DOCS
from tests.test_arrows import TOPS
from tests.test_docs import REPOSITORY, ROOT, SITE, name_of, without_code

PAGES = [page for page in [*SITE, *REPOSITORY] if page.name not in {"CHANGELOG.md", "changelog.md"}]
ABOUT_CODE = [page for page in PAGES if DOCS / "explanation" in page.parents or page.name == "CONTRIBUTING.md"]
"""Pages about our own code: a name in Python's spelling is ours, or of a library that our code uses too."""
FOLDERS = "|".join((*TOPS, "tests", "docs", "benchmarks", "scripts", "examples", "deployments"))
ENDINGS = "py|toml|sh|md|yaml|yml|json|sql|service|sbatch"
PATH = re.compile(rf"(?<![\w./~-])(?:(?:[\w@*-]+/)*[\w@*-]+\.(?:{ENDINGS})|(?:{FOLDERS})/[\w./@*-]*)(?![\w./*])")
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOPS)})\.(?!(?:job|node|incident|fault|approval|notification|notify|cluster)\.)\w[\w.]*")
"""A dotted name; those behind the negation are events and resources of Prefect."""
NAME = re.compile(r"\b[A-Z][a-z]+[A-Z]\w*|\b[a-z]+_\w+|\b[A-Z]+_[A-Z_]+\b")
ABSENT = {
    "CONTRIBUTING.md": {
        "utils.py",
        "test_a_torn_checkpoint_is_skipped_for_the_one_before",
    },
    "docs/explanation/architecture/control.md": {"epochs.json"},
    "docs/explanation/security.md": {"spec.json"},
    "docs/how-to/checkpoints.md": {"manifest.json"},
    "docs/how-to/megatron.md": {"megatron/training/ft_integration.py"},
    "docs/how-to/high-availability.md": {"deployments/compose/ssh"},
    "docs/how-to/prefect-deployments.md": {"clusters.d/gpu-lab.yaml"},
    "docs/how-to/workflows.md": {"evaluate.py"},
}
"""Files that a page names which Holdfast or a user writes, and examples of names."""

ELSEWHERE = frozenset({"torchtitan"})
"""Libraries that `make frameworks` installs: a module of ours that needs one exists, and cannot be imported here."""


def in_backticks(page: Path) -> Iterator[str]:
    """Yield the spans of code in the text of *page*, without the files and names that are `ABSENT`."""
    for span in re.findall(r"`([^`\n]+)`", without_code(page)):
        for known in ABSENT.get(name_of(page), set()):
            span = span.replace(known, "")  # noqa: PLW2901
        yield span


@cache
def listed() -> tuple[str, ...]:
    """Return the files of the repository and their folders."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return tuple({*files, *(str(folder) for file in files for folder in Path(file).parents)})


@cache
def is_file(named: str) -> bool:
    """Return whether a file or folder of the repository ends in the path *named*, in which a star stands for any name."""
    ending = re.compile("(?:.*/)?" + re.escape(named.rstrip("/")).replace(r"\*", "[^/]*"))
    return any(map(ending.fullmatch, listed()))


@cache
def words_of_code() -> frozenset[str]:
    """Return every word of the code."""
    files = [*(file for top in (*TOPS, "tests", "benchmarks") for file in (ROOT / top).rglob("*.py")), ROOT / "Makefile"]
    own = Path(__file__).resolve()
    return frozenset(word for file in files if file.resolve() != own for word in [*re.findall(r"\w+", file.read_text()), file.stem])


def is_object(dotted: str) -> bool:
    """Return whether *dotted* names a module, or an object in one."""
    parts = dotted.rstrip(".").split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] in ELSEWHERE and end == len(parts):
                return True
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[end:])
    return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    """A file that has moved takes its mentions along."""
    spans = list(in_backticks(page))
    assert [path for span in spans for path in PATH.findall(span) if not is_file(path)] == []
    assert [name for span in spans for name in MODULE.findall(span) if not is_file(name) and not is_object(name)] == []


@pytest.mark.parametrize("page", ABOUT_CODE, ids=name_of)
def test_every_name_of_code_on_a_page_about_code_is_in_the_code(page: Path) -> None:
    """A class or function that is renamed takes its mentions along."""
    assert [name for span in in_backticks(page) for name in NAME.findall(PATH.sub("", span)) if name not in words_of_code()] == []


@pytest.mark.parametrize("page", [ROOT / name for name in ABSENT], ids=name_of)
def test_an_exception_is_on_its_page_and_nowhere_else(page: Path) -> None:
    """An exception that nothing needs would hide the next mistake."""
    spans = set(re.findall(r"`([^`\n]+)`", without_code(page)))
    assert [named for named in ABSENT[name_of(page)] if not any(named in span for span in spans)] == []
    assert [named for named in ABSENT[name_of(page)] if is_file(named)] == []


def test_what_is_gone_is_seen() -> None:
    """The checks themselves can fail."""
    text = "see `cli/commands/status.py`, `detectors/gone/`, and `detectors/*.toml`, but not `/etc/x.yaml` or `~/y.md`"
    named = [path for span in re.findall(r"`([^`\n]+)`", text) for path in PATH.findall(span)]
    assert [path for path in named if not is_file(path)] == ["cli/commands/status.py", "detectors/gone/"]
    assert is_object("holdfast.session")
    assert is_object("holdfast.report.text.wording.duration")
    assert not is_object("holdfast.gone")
    assert not is_object("holdfast.report.text.wording.gone")
    assert "RollBack" in words_of_code()
    assert MODULE.findall("holdfast.job.running holdfast.spec.form") == ["holdfast.spec.form"]
