"""`holdfast checkpoint prune`: what it deletes, what it never deletes, and when it refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.cli.commands.checkpoints import prune
from holdfast.exit_codes import OPERATOR_ERROR
from holdfast.history.models import Checkpoint, Generation
from holdfast.history.store import History
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import Manifest, WrittenFile
from tests.cli.conftest import PROGRAM, Command, environment
from tests.cli.terminal import Terminal
from tests.cli.written_history import Author
from tests.mentions import mentions
from tests.waiting import wait_until


class Folder:
    """The checkpoints of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *steps: int, generation: int = 1) -> None:
        """Write complete checkpoints of *steps*."""
        for step in steps:
            folder = manifest.folder_of(self.path, step)
            folder.mkdir(parents=True)
            data = f"state after {step}".encode() * 100
            (folder / "__0_0.distcp").write_bytes(data)
            files = {"__0_0.distcp": WrittenFile(size=len(data), sha256=hashlib.sha256(data).hexdigest())}
            found = Manifest(step=step, generation=generation, world_size=1, files=files, time=time.time(), torch="2.13.0")
            (folder / manifest.MANIFEST).write_text(found.text())

    @property
    def steps(self) -> list[int]:
        """Return the steps whose folders are there, newest first."""
        return [manifest.step_of(one) for one in manifest.candidates(self.path)]

    def file(self, step: int) -> Path:
        """Return the file with the state after *step*."""
        return manifest.folder_of(self.path, step) / "__0_0.distcp"


def a_job(book: History, folder: Folder, name: str = "gpt") -> Author:
    """Write a job that trains, with its checkpoints in *folder*."""
    author = Author(book, name, time.time() - 60)
    author.job.spec = {"name": name, "script": "train.py", "checkpoint": {"directory": str(folder.path)}}
    with book.session() as session:
        session.merge(author.job)
    author.move("RUNNING", "it trains", seconds=1)
    return author


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Give a folder of five checkpoints."""
    found = Folder(tmp_path / "checkpoints")
    found.write(10, 20, 30, 40, 50)
    return found


def pruned(here: Command, keep: int) -> dict[str, Any]:
    """Prune without a question; return the JSON output."""
    done = here("checkpoint", "prune", "gpt", "--keep", str(keep), "--yes", "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def steps_in(output: dict[str, Any], what: str) -> list[int]:
    """Return the steps of the checkpoints that were kept, deleted or left."""
    return [one["step"] for one in output[what]]


def test_the_newest_complete_checkpoints_are_kept(here: Command, book: History, folder: Folder) -> None:
    """Also while the job trains; a second call finds nothing to delete."""
    a_job(book, folder)
    output = pruned(here, 2)
    assert (steps_in(output, "kept"), steps_in(output, "deleted"), output["left"]) == ([50, 40], [10, 20, 30], [])
    assert folder.steps == [50, 40]
    assert sorted(one.name for one in folder.path.iterdir()) == ["step-00000040", "step-00000050"], "nothing half deleted is left"
    assert pruned(here, 2)["deleted"] == []


def test_a_damaged_checkpoint_neither_counts_nor_is_deleted(here: Command, book: History, folder: Folder) -> None:
    """The newest one that counts was read in full: a flipped bit keeps its size."""
    a_job(book, folder)
    damaged = folder.file(50)
    data = bytearray(damaged.read_bytes())
    data[7] ^= 1
    damaged.write_bytes(data)
    folder.file(30).unlink()
    output = pruned(here, 1)
    assert (steps_in(output, "kept"), steps_in(output, "deleted"), steps_in(output, "left")) == ([40], [10, 20], [50, 30])
    assert folder.steps == [50, 40, 30]


def test_one_that_was_found_damaged_before_does_not_count(here: Command, book: History, folder: Folder) -> None:
    """By `checkpoint verify`, or a rank that resumed. It is not read again; a job that keeps two keeps two that it can resume from."""
    author, path = a_job(book, folder), str(manifest.folder_of(folder.path, 40))
    found = Checkpoint(job_id=author.job.id, at=time.time(), step=40, generation=1, path=path, problem="checkpoint-corrupt", reason="r")
    with book.session() as session:
        session.add(found)
    output = pruned(here, 2)
    assert (steps_in(output, "kept"), steps_in(output, "deleted"), steps_in(output, "left")) == ([50, 30], [10, 20], [40])


def test_a_checkpoint_that_training_must_not_resume_from_does_not_count(here: Command, book: History, folder: Folder) -> None:
    """After a rollback the older ones are those that a recovery would use."""
    author = a_job(book, folder)
    rolled_back(author, 40, 2)
    output = pruned(here, 1)
    assert (steps_in(output, "kept"), steps_in(output, "deleted"), steps_in(output, "left")) == ([30], [10, 20], [50, 40])


def test_nothing_is_deleted_where_no_checkpoint_is_intact(here: Command, book: History, folder: Folder) -> None:
    """However many there are."""
    a_job(book, folder)
    for step in folder.steps:
        folder.file(step).write_bytes(b"")
    assert pruned(here, 1)["deleted"] == []
    assert len(folder.steps) == 5


@pytest.mark.parametrize("state", ["LAUNCHING", "RESCHEDULING", "RESUMING", "WAITING"])
def test_checkpoints_that_a_recovery_may_read_are_not_deleted(state: str, here: Command, book: History, folder: Folder) -> None:
    """Of this job, or of another one with the same folder."""
    ended = a_job(book, folder)
    ended.move("COMPLETED", "all steps done", seconds=2, event="finished")
    a_job(book, folder, "successor").move(state, "a fault", seconds=3)
    done = here("checkpoint", "prune", "gpt", "--keep", "1", "--yes")
    assert done.returncode == OPERATOR_ERROR
    assert "successor" in done.stderr
    assert len(folder.steps) == 5


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_without_a_terminal_nothing_is_deleted_unless_requested(more: list[str], here: Command, book: History, folder: Folder) -> None:
    """`--yes` is the cure."""
    a_job(book, folder)
    done = here("checkpoint", "prune", "gpt", "--keep", "2", *more)
    assert done.returncode == OPERATOR_ERROR
    assert "--yes" in done.stderr
    assert len(folder.steps) == 5


@pytest.mark.parametrize(("answer", "left"), [("n", 5), ("y", 2)])
def test_on_a_terminal_a_person_decides(answer: str, left: int, book: History, folder: Folder, holdfast_home: Path) -> None:
    """The default is no."""
    a_job(book, folder)
    with Terminal([*PROGRAM, "checkpoint", "prune", "gpt", "--keep", "2"], environment()) as terminal:
        wait_until(lambda: "[y/N]" in terminal.text, seconds=60, explain=lambda: terminal.text)
        terminal.type(f"{answer}\n")
        wait_until(lambda: terminal.status() is not None, seconds=60, explain=lambda: terminal.text)
        assert terminal.status() == 0
    assert len(folder.steps) == left


def rolled_back(author: Author, step: int, number: int) -> None:
    """Write the generation that a rollback to before *step* begins."""
    facts = {"invalidated": [[step, number]]}
    author.write(Generation(job_id=author.job.id, number=number, at=time.time(), world_size=1, ranks={"node-0": [0]}, facts=facts))


def fails(author: Author) -> None:
    """Let the job recover from a fault."""
    author.move("RESCHEDULING", "a fault", seconds=3)


def is_rolled_back(author: Author) -> None:
    """Let the job be rolled back, and train again."""
    rolled_back(author, 40, 2)


MEANWHILE = pytest.mark.parametrize(("happens", "said"), [(fails, "RESCHEDULING"), (is_rolled_back, "rolled back")])
"""What may happen after it was decided what to delete, and what of it the error names."""


@MEANWHILE
def test_what_happens_while_the_question_is_open_is_noticed(
    happens: Callable[[Author], None], said: str, book: History, folder: Folder, holdfast_home: Path
) -> None:
    """Nothing is deleted although the answer is yes."""
    author = a_job(book, folder)
    with Terminal([*PROGRAM, "checkpoint", "prune", "gpt", "--keep", "1"], environment()) as terminal:
        wait_until(lambda: "[y/N]" in terminal.text, seconds=60, explain=lambda: terminal.text)
        happens(author)
        terminal.type("y\n")
        wait_until(lambda: terminal.status() is not None, seconds=60, explain=lambda: terminal.text)
        assert terminal.status() == OPERATOR_ERROR
        assert said in terminal.text
    assert len(folder.steps) == 5


@pytest.mark.parametrize(("module", "name", "left"), [(prune, "plan_prune", 5), (manifest, "remove", 4)], ids=["before", "between"])
@MEANWHILE
def test_what_happens_before_a_deletion_is_noticed(
    *,
    happens: Callable[[Author], None],
    said: str,
    module: ModuleType,
    name: str,
    left: int,
    here: Command,
    book: History,
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a question too, and between two deletions: the error counts those before it."""
    author = a_job(book, folder)
    follow(monkeypatch, module, name, lambda: happens(author))
    done = here("checkpoint", "prune", "gpt", "--keep", "1", "--yes")
    assert done.returncode == OPERATOR_ERROR
    assert said in done.stderr
    assert ("1 checkpoint deleted" in done.stderr) == (left == 4)
    assert len(folder.steps) == left


def follow(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, happens: Callable[[], None]) -> None:
    """Let something happen once, right after the function *name* of *module* has done its work."""
    real, events = getattr(module, name), [happens]

    def done(*given: Any) -> Any:
        found = real(*given)
        if events:
            events.pop()()
        return found

    monkeypatch.setattr(module, name, done)


def test_the_states_that_any_job_of_the_folder_has_invalidated_do_not_count(here: Command, book: History, folder: Folder) -> None:
    """Also one that has ended, and whose description another version wrote: its folder is the recorded one."""
    ended = a_job(book, folder, "before")
    rolled_back(ended, 40, 2)
    ended.move("COMPLETED", "all steps done", seconds=2, event="finished")
    ended.job.spec |= {"script": None, "of_another_version": 1}
    with book.session() as session:
        session.merge(ended.job)
    elsewhere = a_job(book, Folder(folder.path / "elsewhere"), "other")
    rolled_back(elsewhere, 10, 9)
    a_job(book, folder)
    output = pruned(here, 1)
    assert (steps_in(output, "kept"), steps_in(output, "deleted"), steps_in(output, "left")) == ([30], [10, 20], [50, 40])


def test_a_job_whose_folder_is_not_known_is_refused(here: Command, book: History, folder: Folder) -> None:
    """No other folder is taken for it."""
    author = a_job(book, folder)
    author.job.spec |= {"checkpoint": {"directory": 5}}
    with book.session() as session:
        session.merge(author.job)
    done = here("checkpoint", "prune", "gpt", "--keep", "1", "--yes")
    assert (done.returncode, "checkpoint.directory" in done.stderr) == (OPERATOR_ERROR, True)
    assert len(folder.steps) == 5


def test_what_an_interrupted_deletion_left_is_removed_first(here: Command, book: History, folder: Folder) -> None:
    """Also where nothing else is to be deleted; what is being written stays."""
    a_job(book, folder)
    remains = [manifest.staging_folder(folder.path, step, "removing", 1) for step in (5, 10)]
    partial = manifest.staging_folder(folder.path, 60, "partial", 1)
    for one in (*remains, partial):
        (one / "some").mkdir(parents=True)
    output = pruned(here, 4)  # the folder to which the checkpoint of step 10 is moved exists
    assert (output["remains"], steps_in(output, "deleted")) == ([str(one) for one in remains], [10])
    remains[0].mkdir()
    assert (pruned(here, 9)["remains"], partial.exists()) == ([str(remains[0])], True)


def test_nothing_is_read_in_full_where_nothing_can_be_deleted(here: Command, book: History, folder: Folder) -> None:
    """A flipped bit is found only when one would be deleted; invalidated checkpoints are never read."""
    author = a_job(book, folder)
    for step in (50, 30):
        data = bytearray(folder.file(step).read_bytes())
        data[7] ^= 1
        folder.file(step).write_bytes(data)
    output = pruned(here, 5)
    assert (steps_in(output, "kept"), output["left"]) == ([50, 40, 30, 20, 10], [])
    rolled_back(author, 40, 2)
    output = pruned(here, 2)
    assert (steps_in(output, "kept"), steps_in(output, "deleted")) == ([20, 10], [])
    assert [(one["step"], one["reason"].partition(":")[0]) for one in output["left"]] == [
        (50, "invalidated"), (40, "invalidated"), (30, "corrupt"),
    ]  # fmt: skip


def test_a_failed_deletion_names_its_step_and_those_before_it(
    here: Command, book: History, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the later ones stay."""
    a_job(book, folder)
    blocked = manifest.staging_folder(folder.path, 20, "removing", 1) / "some"
    follow(monkeypatch, manifest, "remove", lambda: blocked.mkdir(parents=True))
    done = here("checkpoint", "prune", "gpt", "--keep", "1", "--yes")
    assert done.returncode == OPERATOR_ERROR
    assert mentions(done.stderr, "step 20", os.strerror(errno.ENOTEMPTY), "1 was deleted")
    assert folder.steps == [50, 40, 30, 20]


@pytest.mark.parametrize("keep", ["0", "-1", "all"])
def test_at_least_one_checkpoint_is_kept(keep: str, here: Command, book: History, folder: Folder) -> None:
    """The newest one cannot be deleted."""
    a_job(book, folder)
    assert here("checkpoint", "prune", "gpt", "--keep", keep, "--yes").returncode == OPERATOR_ERROR
    assert len(folder.steps) == 5
