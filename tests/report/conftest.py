"""A fresh history for each test, and the pages of all kinds of jobs, drawn once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.pages.job_history import JobHistory, read_history
from holdfast.report.pages.report_page import page
from tests.report import filled, odd
from tests.report.parsed import Element, Page


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """Give an empty history in a file of its own."""
    opened = filled.open_history(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def story_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[History], Job]], JobHistory]:
    """Return the story of a job that a function writes; each is read once."""
    known: dict[str, JobHistory] = {}

    def read(write: Callable[[History], Job]) -> JobHistory:
        if write.__name__ not in known:
            history = filled.open_history(tmp_path_factory.mktemp("story"))
            job = write(history)
            known[write.__name__] = read_history(history, job, now=filled.BEGAN + 90_000)
            history.close()
        return known[write.__name__]

    return read


@pytest.fixture(scope="session")
def pages(story_of: Callable[[Callable[[History], Job]], JobHistory]) -> Callable[[str], str]:
    """Return the page of the job called so in `odd.ODD`, or of ``three_incidents``; each is drawn once."""
    known: dict[str, str] = {}

    def draw(name: str) -> str:
        if name not in known:
            known[name] = page(story_of(odd.ODD.get(name, filled.three_incidents)))
        return known[name]

    return draw


@pytest.fixture(scope="session")
def parsed(pages: Callable[[str], str]) -> Callable[[str], Element]:
    """Return the same pages, parsed."""
    return lambda name: Page(pages(name)).root
