"""A row of the history that cannot be read: every command that reads it names its table and id, and a bundle can still be made."""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import pytest

from holdfast.errors import RowCorrupt
from holdfast.history import queries
from holdfast.history.store import History
from tests.cli.conftest import Command
from tests.cli.written_history import Author
from tests.history.rows import a_step

READERS = ("status", "ps", "report", "checkpoint", "logs", "cost")
DAMAGE = {
    "spec": ("UPDATE job SET spec = '[[['", READERS, "row {id} of table 'job'", "'spec'"),
    "spec of another kind": ("UPDATE job SET spec = '[]'", ("report", "cost"), "row {id} of table 'job'", "no object"),
    "cluster": ('UPDATE job SET cluster = \'{"kind": "nope"}\'', ("status", "logs", "checkpoint"), "row {id} of table 'job'", "'nope'"),
    "loss": (
        "UPDATE step SET loss = 'abc' WHERE step = (SELECT min(step) FROM step)",
        ("report",),
        "row job_id {id}, generation 1, step 1 of table 'step'",
        "'loss' holds 'abc'",
    ),
    "time": (
        "UPDATE job_transition SET at = 'noon'",
        ("report", "cost"),
        "of table 'job_transition'",
        "'at' holds 'noon', which is no number",
    ),
    "ranks": ("UPDATE generation SET ranks = '{'", ("status",), "of table 'generation'", "'ranks' holds '{{'"),
}


def damage(home: Path, how: str) -> None:
    """Change the history as a flipped byte, an editor or another version does."""
    raw = sqlite3.connect(home / "history.db")
    with raw:
        assert raw.execute(how).rowcount
    raw.close()


def arguments(verb: str) -> tuple[str, ...]:
    """Return how the command is given for the job."""
    return {"ps": ("ps", "-a"), "checkpoint": ("checkpoint", "ls", "gpt-small")}.get(verb, (verb, "gpt-small"))


@pytest.mark.parametrize(("how", "commands", "row", "why"), DAMAGE.values(), ids=DAMAGE)
def test_every_command_names_a_row_that_it_cannot_read(  # noqa: PLR0917 (parameters)
    here: Command, holdfast_home: Path, running: Author, how: str, commands: tuple[str, ...], row: str, why: str
) -> None:
    """No traceback: the table, the row and what is in it, and what to do."""
    damage(holdfast_home, how)
    for verb in commands:
        done = here(*arguments(verb))
        assert done.returncode == 2, (verb, done)
        for words in (row.format(id=running.job.id), why.format(), "Fix or delete that row", "support-bundle"):
            assert words in done.stderr, (verb, words, done.stderr)


@pytest.mark.parametrize("how", [one[0] for one in DAMAGE.values()], ids=DAMAGE)
def test_a_bundle_contains_what_can_be_read(here: Command, holdfast_home: Path, running: Author, tmp_path: Path, how: str) -> None:
    """Only the table with that row is missing, with the reason."""
    damage(holdfast_home, how)
    (holdfast_home / "jobs" / "gpt-small").mkdir(parents=True, exist_ok=True)
    done = here("admin", "support-bundle", "gpt-small", "-o", "b.tar.gz")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        names = {one.name.partition("/")[2] for one in tar.getmembers()}
    assert {"history/job.json", "history/incident.jsonl"} <= names
    table = how.split()[1]
    if any(words in how for words in ("nope", "noon", "'[]'")):  # it can be read, and is not what it should be
        assert f"history/{table}" not in done.stderr
    else:
        assert f"of table '{table}' cannot be read" in done.stderr
        assert f"history/{table}.jsonl" not in names


def test_invalid_text_is_damage_too(holdfast_home: Path, running: Author) -> None:
    """SQLite names the column; it is not an unreachable server."""
    damage(holdfast_home, "UPDATE job SET name = CAST(x'ff41' AS TEXT)")
    assert running.job.name
    history = History.open(f"sqlite:///{holdfast_home / 'history.db'}", create=False)
    with pytest.raises(Exception, match="'name'") as caught:
        queries.jobs(history)
    assert type(caught.value).__name__ == "HistoryCorrupt"
    history.close()


def test_an_intact_history_has_no_damage(book: History, running: Author) -> None:
    """NaN as a loss is what a step may have; an error of ours is not blamed on a row."""
    assert running.job.name
    with book.session() as session:
        session.add(a_step(running.job.id, 10**6, loss=float("nan"), seconds=float("inf")))
    assert book.find_corrupt_row() is None
    with pytest.raises(ZeroDivisionError), book.session():
        _ = 1 / 0
    with pytest.raises(ValueError, match="ours"), book.session():
        raise ValueError("ours")


def test_other_readers_get_the_same_error(book: History, holdfast_home: Path, running: Author) -> None:
    """Flows and programs of users go by its class."""
    damage(holdfast_home, "UPDATE job SET spec = '[[['")
    with pytest.raises(RowCorrupt) as caught:
        queries.jobs(book)
    assert (caught.value.table, caught.value.row) == ("job", running.job.id)
