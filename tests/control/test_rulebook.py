"""The policy in force: what its file says, as long as that can be used, and what was before when it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.control.config.policy_file import WatchedPolicy
from holdfast.spec import TrainingJob
from policies.policy import NAMED
from tests.waiting import wait_until

Open = Callable[..., WatchedPolicy]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Give what opens the rulebook of a job that names a file, whose folder is another one."""
    books: list[WatchedPolicy] = []

    def begin(text: str | None, **fields: object) -> WatchedPolicy:
        file = tmp_path / "mine.yaml"
        if text is not None:
            file.write_text(text)
        job = TrainingJob.model_validate({"name": "a", "script": "b.py", "policy": str(file), **fields})
        books.append(WatchedPolicy(job, tmp_path / "job"))
        return books[-1]

    yield begin
    for book in books:
        book.close()


def hears(book: WatchedPolicy, words: str) -> str:
    """Wait for news with these *words*; return them."""
    heard: list[str] = []

    def told() -> bool:
        heard.extend(book.news())
        return any(words in one for one in heard)

    wait_until(told, seconds=60, explain=lambda: str(heard))
    (found,) = (one for one in heard if words in one)
    return found


def test_a_changed_file_is_in_force_at_the_next_look(opened: Open, tmp_path: Path) -> None:
    """With what the job says itself before it, and with words of what changed."""
    book = opened("budget: {in_place: 1}\n", budget={"fruitless": 9})
    assert (book.present.budget.in_place, book.present.budget.fruitless) == (1, 9)
    (tmp_path / "mine.yaml").write_text("budget: {in_place: 2, fruitless: 4}\nactions: [shrink]\n")
    told = hears(book, "has changed")
    assert "actions: shrink (was: retry-step, take-over" in told
    assert "budget.in_place: 2 (was: 1)" in told
    assert "fruitless" not in told
    assert (book.present.budget.in_place, book.present.budget.fruitless) == (2, 9)


def test_a_decision_has_the_file_looked_at(opened: Open, tmp_path: Path) -> None:
    """It need not wait for the next second."""
    book = opened("budget: {in_place: 1}\n")
    hopes = 0
    for number in range(2, 22):
        (tmp_path / "mine.yaml").write_text(f"budget: {{in_place: {number}}}\n# {'x' * number}\n")
        book.check_now()
        hopes += book.present.budget.in_place == number
    assert hopes > 0
    wait_until(lambda: book.present.budget.in_place == 21, seconds=60)


def test_a_bad_file_is_told_of_once_and_changes_nothing(opened: Open, tmp_path: Path) -> None:
    """Until it can be used again."""
    book, file = opened("budget: {in_place: 1}\n"), tmp_path / "mine.yaml"
    before = book.present
    file.write_text("recommended_actions: {gpu-of-bus: evict}\n")
    told = hears(book, "stays in force")
    assert f"{file}: 1 problem(s): recommended_actions.gpu-of-bus: line 1: no fault kind is called so. Did you mean 'gpu-off-bus'?" in told
    for _ in range(5):
        book.check_now()
    assert (book.present, book.news()) == (before, [])
    file.write_text("budget: {in_place: 1}\n")
    assert "can be used again" in hears(book, "can be used again")
    assert book.present == before
    file.unlink()
    assert "does not exist" in hears(book, "stays in force")
    assert book.present == before


def test_a_flow_that_finds_the_file_bad_goes_on_with_what_was_in_force(opened: Open, tmp_path: Path) -> None:
    """The job's folder has a copy of what could be used last."""
    opened("budget: {in_place: 7}\n").close()
    book = opened("budget: {in_plac: 8}\n")
    assert (book.present.budget.in_place, book.present.name) == (7, str(tmp_path / "mine.yaml"))
    assert "What was in force before stays in force" in hears(book, "in_plac")


def test_without_any_file_that_can_be_used_the_usual_policy_is_in_force(opened: Open) -> None:
    """Nobody refuses to adopt a job that trains; it is said what decides meanwhile."""
    book = opened("nonsense: 1\n")
    assert book.present.order == NAMED["balanced"].order
    assert "Policy 'balanced' is in force until it is mended" in hears(book, "nonsense")


def test_a_named_policy_needs_no_file(tmp_path: Path) -> None:
    """Nothing is watched, and a look costs nothing."""
    book = WatchedPolicy(TrainingJob.model_validate({"name": "a", "script": "b.py", "policy": "patient"}), tmp_path)
    book.check_now()
    assert (book.present, book.news()) == (NAMED["patient"], [])
    book.close()
