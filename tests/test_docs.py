"""The pages cannot lie: what is generated is current, what is linked exists, what is set is described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import DOCS, EVALUATION_VARIABLES, PAGES, VARIABLES, WORKER_VARIABLES
from tests.test_arrows import TOPS

ROOT = Path(__file__).parent.parent
WRITTEN = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "deployments").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    """`make docs` mends what this refuses."""
    assert (DOCS / page).read_text() == PAGES[page]()


def anchors(page: Path) -> set[str]:
    """Return what a link may name behind ``#`` on *page*, as GitHub makes it from the headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the links of *page* into this repository that lead nowhere."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_into_the_repository_leads_somewhere(page: Path) -> None:
    """A reader who follows a link arrives, at the heading too."""
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    """The check itself can fail."""
    (tmp_path / "here.md").write_text("# A heading\n[a](here.md) [b](#a-heading) [c](https://example.org) [d](gone.md) [e](here.md#gone)")
    assert broken_links(tmp_path / "here.md") == ["gone.md", "here.md#gone"]


def test_each_claim_about_security_names_a_test_that_there_is() -> None:
    """A claim that nobody tries is a hope."""
    told = re.findall(r"^\| (.+) \| `(tests/\S+\.py)::(test_\w+)` \|$", (DOCS / "security.md").read_text(), re.MULTILINE)
    assert len(told) > 20
    for claim, path, test in told:
        assert f"def {test}(" in (ROOT / path).read_text(), claim


def test_every_variable_of_ours_is_on_the_settings_page() -> None:
    """What the code reads from the environment is described, and what is described is read."""
    sources = "".join(file.read_text() for top in TOPS for file in (ROOT / top).rglob("*.py"))
    assert set(re.findall(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", sources)) == {*VARIABLES, *WORKER_VARIABLES, *EVALUATION_VARIABLES}
