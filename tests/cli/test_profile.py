"""`holdfast report --profile`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.history.store import History
from tests.cli.conftest import Command
from tests.cli.written_history import Author
from tests.mentions import mentions, one_line_mentions
from tests.report import profile_files
from tests.report.test_layout import recorded

HEADS = ("RANK  NODE    STEP", "RANK  KIND       WAITS", "RANK  TAKEN  ABANDONED")


@pytest.fixture
def job(book: History, tmp_path: Path) -> Author:
    """Give a job whose checkpoints lie in ``checkpoints``."""
    author = Author(book, "gpt", profile_files.BEGAN - 100)
    author.job.spec = {"name": "gpt", "script": "x.py", "workdir": str(tmp_path), "checkpoint": {"directory": "checkpoints"}}
    with book.session() as session:
        session.merge(author.job)
    return author


@pytest.fixture
def files(job: Author, tmp_path: Path) -> list[dict[str, Any]]:
    """Write the profiles of the ranks of its pipeline."""
    found = profile_files.pipeline_files(recorded("interleaved", 4, 8))
    profile_files.write(tmp_path / "checkpoints", *found)
    return found


def test_layout_windows_and_costs_are_shown(here: Command, files: list[dict[str, Any]]) -> None:
    """In lines that fit an ordinary terminal."""
    done = here("report", "gpt", "--profile")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("gpt  step 120 at ")
    assert one_line_mentions(done.stdout, "schedule", "interleaved 1F1B", "8 micro-batches", "2 chunks")
    for head in HEADS:
        assert any(line.startswith(head) for line in lines)
    rows = [line.split() for line in lines]
    for row in (
        "2 node-1 200 ms 50 ms 25.0% 40 ms pipeline, at 11.0% of the step",
        "0 pipeline 1 40 ms 20.0% 40 ms 20 ms 30 ms",
        "1 100 2 5.0 ms 90.0% 0.0% 0.3%",
    ):
        assert row.split() in rows
    assert one_line_mentions(done.stdout, "All ranks", "1 of 2 windows")
    assert sum(line[1:7] == " stage" for line in lines) == 4


def test_a_program_reads_the_same(here: Command, files: list[dict[str, Any]]) -> None:
    """All figures, and the picture that was drawn."""
    found = json.loads(here("report", "--profile", "--json", "-o", "p.svg").stdout)
    assert (found["job"], found["layout"]["schedule"], found["layout"]["microbatches"]) == ("gpt", "interleaved", 8)
    assert [one["stage"] for one in found["ranks"]] == [0, 1, 2, 3]
    assert found["ranks"][1]["copies"][1] == {"begin": 0.17, "end": 0.18, "overlapped": False}
    assert Path(found["picture"]).read_text().startswith("<?xml")


@pytest.mark.parametrize("ending", ["html", "png"])
def test_a_picture_is_drawn(ending: str, here: Command, files: list[dict[str, Any]], tmp_path: Path) -> None:
    """Its path is the last line."""
    done = here("report", "gpt", "--profile", "-o", f"p.{ending}")
    assert done.stdout.splitlines()[-1] == str(tmp_path / f"p.{ending}")
    assert (tmp_path / f"p.{ending}").stat().st_size > 5000


def test_many_ranks_are_not_all_printed(here: Command, job: Author, tmp_path: Path) -> None:
    """The first ones are, and how many are not."""
    profile_files.write(tmp_path / "checkpoints", *(profile_files.rank_file(rank, 100) for rank in range(100)))
    text = here("report", "--profile").stdout
    assert len(text.splitlines()) < 180
    assert text.count("and 76 ranks more") == 3


def test_skipped_files_are_reported_with_the_result(here: Command, files: list[dict[str, Any]], tmp_path: Path) -> None:
    """A later world of two: the notes go to stderr."""
    profile_files.write(tmp_path / "checkpoints", profile_files.rank_file(0, 2, generation=2, time=profile_files.BEGAN + 50))
    done = here("report", "gpt", "--profile")
    assert "1 rank of 2" in done.stdout
    missing, ignored = done.stderr.splitlines()
    assert mentions(missing, "generation 2", "rank 1")
    assert mentions(ignored, "3 files")


def test_without_a_profile_the_cure_is_named(here: Command, job: Author) -> None:
    """Status 2: what the script and the job file need."""
    done = here("report", "gpt", "--profile")
    assert (done.returncode, done.stdout) == (2, "")
    for words in ("no profile of job 'gpt' yet", "holdfast.session", "checkpoint.memory.interval", "Wait a few seconds"):
        assert words in done.stderr


def test_a_spec_of_another_version_uses_the_default_folder(here: Command, book: History, holdfast_home: Path) -> None:
    """Its checkpoints lie where those lie that name no place."""
    Author(book, "odd", time.time())
    profile_files.write(holdfast_home / "jobs" / "odd" / "checkpoints", profile_files.rank_file(0, 1))
    done = here("report", "odd", "--profile")
    assert done.returncode == 0
    assert "of an earlier run" in done.stderr or time.time() < profile_files.BEGAN


@pytest.mark.parametrize("name", ["p.pdf", "p", "p.html.gz"])
def test_a_picture_of_another_kind_is_refused(name: str, here: Command, files: list[dict[str, Any]], tmp_path: Path) -> None:
    """Status 2, the option by its name, before anything is read."""
    done = here("report", "gpt", "--profile", "-o", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"'--output' / '-o': '{name}'" in done.stderr
    assert ".html, .png or .svg" in done.stderr
    assert not (tmp_path / name).exists()
