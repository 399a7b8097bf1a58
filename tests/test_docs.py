"""The pages cannot lie: what is generated is current, what is linked exists, what is set is described, nothing is said twice."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import DOCS, PAGES
from docs.generator.environment import EVALUATION_VARIABLES, VARIABLES, WORKER_VARIABLES
from docs.generator.faults import BY_COMPONENT
from holdfast.detectors.catalogue import AREAS
from tests.test_arrows import TOPS

ROOT = Path(__file__).parent.parent
SITE = sorted(DOCS.rglob("*.md"))
"""The pages of the site."""
REPOSITORY = sorted([*ROOT.glob("*.md"), *(ROOT / "deployments").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
"""Pages that are read in the repository."""
WRITTEN = [page for page in SITE if str(page.relative_to(DOCS)) not in PAGES]
"""Pages of the site that people write."""
LONGEST = 400
LONG_PARAGRAPH = 200


def name_of(page: Path) -> str:
    """Return the path of *page* in the repository."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    """`make docs` mends what this refuses."""
    assert (DOCS / page).read_text() == PAGES[page]()


def test_no_page_of_the_fault_catalogue_is_left_over() -> None:
    """A component that is renamed leaves no page behind."""
    assert {str(page.relative_to(DOCS)) for page in (DOCS / "reference/faults").glob("*.md")} <= set(PAGES)


# -- links ------------------------------------------------------------------------------------------------------------


def without_code(page: Path) -> str:
    """Return the text of *page* without blocks of code."""
    return re.sub(r"^( *)(```|~~~).*?^\1\2", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return what a link may name behind ``#`` on *page*: its headings, numbered where they come again, and the API's objects."""
    found: dict[str, int] = defaultdict(int)
    names: set[str] = set()
    text = without_code(page)
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower())
        names.add(f"{slug}_{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def broken_links(page: Path) -> list[str]:
    """Return the links of *page* into this repository that lead nowhere."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", [*SITE, *REPOSITORY], ids=name_of)
def test_every_link_into_the_repository_leads_somewhere(page: Path) -> None:
    """A reader who follows a link arrives, at the heading too."""
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    """The check itself can fail."""
    (tmp_path / "here.md").write_text("# A heading\n[a](here.md) [b](#a-heading) [c](https://example.org) [d](gone.md) [e](here.md#gone)")
    assert broken_links(tmp_path / "here.md") == ["gone.md", "here.md#gone"]


# -- the site ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, name, _node: name)


def settings() -> dict[str, Any]:
    """Return what mkdocs.yml says."""
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # noqa: S506 (a SafeLoader)
    return found


def pages_in(nav: Any) -> Iterator[str]:
    """Yield the pages that a part of the navigation lists."""
    if isinstance(nav, str):
        yield nav
    for item in nav if isinstance(nav, list) else nav.values() if isinstance(nav, Mapping) else ():
        yield from pages_in(item)


def test_the_navigation_lists_each_page_once() -> None:
    """A page that no menu leads to is not read."""
    assert sorted(pages_in(settings()["nav"])) == sorted(str(page.relative_to(DOCS)) for page in SITE)


def test_the_navigation_has_the_four_parts() -> None:
    """Readers find tutorials, guides, reference and explanations each in one place, and each file in the folder of its part."""
    parts = {next(iter(part)): list(pages_in(part)) for part in settings()["nav"] if isinstance(part, dict)}
    folders = {"Tutorials": "tutorials/", "How-to guides": "how-to/", "Reference": "reference/", "Explanation": "explanation/"}
    assert list(parts)[1:5] == list(folders)
    assert [page for part, folder in folders.items() for page in parts[part] if not page.startswith(folder)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_a_page_is_short_enough_to_be_read(page: Path) -> None:
    """Longer ones are split by topic; generated reference is searched and not read."""
    assert len(page.read_text().splitlines()) <= LONGEST


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, items and rows of *text* that are long enough to be repeated, in one line each."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text):
        plain = " ".join(re.sub(r"\]\([^)]*\)", "]", block).split()).lstrip("-*| ")
        if len(plain) > LONG_PARAGRAPH:
            yield plain


def repeated(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the beginnings of the paragraphs that stand in several of *texts*, or twice in one, with the names of these."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        for paragraph in paragraphs(text):
            places[paragraph].append(name)
    return {paragraph[:80]: names for paragraph, names in places.items() if len(names) > 1}


def test_nothing_is_said_twice() -> None:
    """A paragraph stands on one page: the others link to it."""
    assert repeated({name_of(page): without_code(page) for page in [*WRITTEN, *REPOSITORY]}) == {}


def test_a_paragraph_that_stands_on_two_pages_is_seen() -> None:
    """The check itself can fail, and does not see through links and line breaks."""
    words = "One sentence that is long enough, because it has been repeated. " * 4
    broken = words.replace("sentence that", "sentence\n  that")
    assert repeated({"a": f"# A\n\n{words}", "b": f"- x\n- {broken}"}) == {words[:80]: ["a", "b"]}


# -- claims -----------------------------------------------------------------------------------------------------------


def test_every_component_has_a_symptom() -> None:
    """The index by symptom has a place for kinds of each component, and names no other component."""
    assert sorted(name for names in BY_COMPONENT.values() for name in names) == sorted(AREAS)


def test_each_claim_about_security_names_a_test_that_there_is() -> None:
    """A claim that nobody tries is a hope."""
    claims = re.findall(r"^\| (.+) \| `(tests/\S+\.py)::(test_\w+)` \|$", (DOCS / "explanation/security.md").read_text(), re.MULTILINE)
    assert len(claims) > 20
    for claim, path, test in claims:
        assert f"def {test}(" in (ROOT / path).read_text(), claim


def test_every_variable_of_ours_is_described() -> None:
    """What the code reads from the environment is described, and what is described is read."""
    sources = "".join(file.read_text() for top in TOPS for file in (ROOT / top).rglob("*.py"))
    assert set(re.findall(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", sources)) == {*VARIABLES, *WORKER_VARIABLES, *EVALUATION_VARIABLES}
