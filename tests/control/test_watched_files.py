"""The watched policy and cluster files: what they say while they are usable, and the last usable version otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.control.config import watched_files
from holdfast.control.config.watched_files import ClusterFile, FileWatcher, WatchedPolicy
from holdfast.policies.recovery.policy import NAMED
from holdfast.spec import LocalCluster, TrainingJob
from holdfast.spec.files.load import load_cluster, load_job
from tests.mentions import mentions
from tests.waiting import wait_until

Open = Callable[..., WatchedPolicy]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the watched policy of a job that names a file, whose folder is another one."""
    files: list[WatchedPolicy] = []

    def begin(text: str | None, **fields: object) -> WatchedPolicy:
        file = tmp_path / "mine.yaml"
        if text is not None:
            file.write_text(text)
        job = TrainingJob.model_validate({"name": "a", "script": "b.py", "policy": str(file), **fields})
        files.append(WatchedPolicy(job, tmp_path / "job"))
        return files[-1]

    yield begin
    for watched in files:
        watched.close()


def message_with(watched: WatchedPolicy, words: str) -> str:
    """Wait for a message with these *words*; return it."""
    messages: list[str] = []

    def received() -> bool:
        messages.extend(watched.news())
        return any(words in one for one in messages)

    wait_until(received, seconds=60, explain=lambda: str(messages))
    (found,) = (one for one in messages if words in one)
    return found


def test_a_changed_policy_file_is_in_force_at_the_next_check(opened: Open, tmp_path: Path) -> None:
    """With the job's own settings before it, and a message about the changes."""
    watched = opened("max_restarts_in_place: 1\n", max_recoveries_without_progress=9)
    assert (watched.present.budget.max_restarts_in_place, watched.present.budget.max_recoveries_without_progress) == (1, 9)
    (tmp_path / "mine.yaml").write_text(
        "max_restarts_in_place: 2\nmax_recoveries_without_progress: 4\nactions: [shrink-restart]\nfail_on_start_errors: false\n"
    )
    message = message_with(watched, "has changed")
    assert mentions(message, "actions: shrink-restart", "retry-step", "replace-ranks")
    assert mentions(message, "max_restarts_in_place: 2", 1, "fail_on_start_errors: false (was: true)")
    assert "max_recoveries_without_progress" not in message, "what the job sets itself does not change"
    assert (watched.present.budget.max_restarts_in_place, watched.present.budget.max_recoveries_without_progress) == (2, 9)


def test_a_decision_has_the_file_checked(opened: Open, tmp_path: Path) -> None:
    """It need not wait for the next second."""
    watched = opened("max_restarts_in_place: 1\n")
    hopes = 0
    for number in range(2, 22):
        (tmp_path / "mine.yaml").write_text(f"max_restarts_in_place: {number}\n# {'x' * number}\n")
        watched.check_now()
        hopes += watched.present.budget.max_restarts_in_place == number
    assert hopes > 0
    wait_until(lambda: watched.present.budget.max_restarts_in_place == 21, seconds=60)


def test_a_check_that_began_before_a_change_is_not_the_one_that_a_decision_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have read the file just before."""
    monkeypatch.setattr(watched_files, "DECISION_WAIT", 60.0)
    file, accepted = tmp_path / "f", list[str]()
    has_read, go_on = threading.Event(), threading.Event()
    file.write_text("old")

    def read(place: Path) -> str:
        text = place.read_text()
        if text == "old":
            has_read.set()
            assert go_on.wait(60)
        return text

    watcher = FileWatcher(file, read, lambda text, _: accepted.append(text), pytest.fail, name="f")
    watcher.begin()
    try:
        assert has_read.wait(60)
        file.write_text("newer")
        with ThreadPoolExecutor(1) as decision:
            checked = decision.submit(watcher.check_now)
            wait_until(watcher._wake.is_set, seconds=60)
            go_on.set()
            checked.result(60)
            assert accepted[-1] == "newer"
        assert accepted == ["old", "newer"]
    finally:
        go_on.set()
        watcher.close()


@pytest.mark.long
def test_a_bad_policy_file_is_reported_once_and_changes_nothing(opened: Open, tmp_path: Path) -> None:
    """Until it is usable again."""
    watched, file = opened("max_restarts_in_place: 1\n"), tmp_path / "mine.yaml"
    before = watched.present
    file.write_text("recommended_actions: {gpu-of-bus: evict}\n")
    message = message_with(watched, "stays in force")
    assert mentions(message, file, "recommended_actions.gpu-of-bus", "line 1", "gpu-off-bus")
    for _ in range(5):
        watched.check_now()
    assert (watched.present, watched.news()) == (before, [])
    file.write_text("max_restarts_in_place: 1\n")
    assert mentions(message_with(watched, "is usable again"), file)
    assert watched.present == before
    file.unlink()
    assert mentions(message_with(watched, "stays in force"), file, "does not exist")
    assert watched.present == before


def test_a_controller_that_finds_a_bad_file_continues_with_the_last_policy_in_force(opened: Open, tmp_path: Path) -> None:
    """The job's folder has a copy of the last usable one."""
    opened("max_restarts_in_place: 7\n").close()
    watched = opened("max_restarts_in_plac: 8\n")
    assert (watched.present.budget.max_restarts_in_place, watched.present.name) == (7, str(tmp_path / "mine.yaml"))
    assert mentions(message_with(watched, "in_plac"), "max_restarts_in_plac")


def test_without_any_usable_file_the_default_policy_is_in_force(opened: Open) -> None:
    """A controller does not refuse to reattach to a job that trains; it reports which policy decides."""
    watched = opened("nonsense: 1\n")
    assert watched.present.order == NAMED["balanced"].order
    assert mentions(message_with(watched, "nonsense"), "balanced")


def test_a_named_policy_needs_no_file(tmp_path: Path) -> None:
    """Nothing is watched, and a check costs nothing."""
    watched = WatchedPolicy(TrainingJob.model_validate({"name": "a", "script": "b.py", "policy": "patient"}), tmp_path)
    watched.check_now()
    assert (watched.present, watched.news()) == (NAMED["patient"], [])
    watched.close()


PLAIN = "name: c\nnodes: 3\n"
WINDOW = "maintenance:\n- {nodes: [node-1], start: 2030-01-01 22:00+00:00, duration: 2h, reason: new switch}\n"


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[ClusterFile, Path]]:
    """Return the watched file of a cluster of three nodes, and its path."""
    file = tmp_path / "cluster.yaml"
    file.write_text(PLAIN)
    watched = ClusterFile(load_cluster(file))
    yield watched, file
    watched.close()


def messages_until(watched: ClusterFile, words: str) -> list[str]:
    """Wait for a message with these *words*; return all messages."""
    messages: list[str] = []

    def received() -> bool:
        messages.extend(watched.news())
        return any(words in one for one in messages)

    wait_until(received, seconds=60, explain=lambda: str(messages))
    return messages


def test_windows_and_notices_apply_to_running_jobs_and_other_fields_to_later_ones(followed: tuple[ClusterFile, Path]) -> None:
    """Each change is reported with the previous value."""
    watched, file = followed
    file.write_text("name: c\nnodes: 5\npreemption_notice: {file: /run/leaving}\n" + WINDOW)
    message = "\n".join(messages_until(watched, "jobs submitted later"))
    assert mentions(message, "maintenance", "new switch of node-1", "2030-01-01 22:00:00", "2 h 00 min")
    assert mentions(message, "preemption_notice")
    (later,) = (line for line in message.splitlines() if "jobs submitted later" in line)
    assert mentions(later, file, "nodes")
    assert not mentions(later, "maintenance")
    assert not mentions(later, "preemption_notice")
    (window,) = watched.present.windows
    assert window.nodes == {"node-1"}
    assert isinstance(watched.present, LocalCluster)
    assert (watched.present.preemption_notice.file, len(watched.present.names)) == ("/run/leaving", 3)


def test_a_bad_cluster_file_is_reported_with_field_and_cure_and_changes_nothing(followed: tuple[ClusterFile, Path]) -> None:
    """Until it is usable again; a missing file counts as bad."""
    watched, file = followed
    file.write_text(PLAIN + WINDOW)
    messages_until(watched, "has changed")
    present = watched.present
    file.write_text(PLAIN + WINDOW.replace("node-1", "node-7"))
    (message,) = messages_until(watched, "stay in force")
    assert f"cluster file {file}: 1 problem: maintenance[0].nodes:" in message
    assert mentions(message, "node-7", "node-0")
    assert watched.present is present
    file.unlink()
    (message,) = messages_until(watched, "stay in force")
    assert mentions(message, file, "does not exist")
    file.write_text(PLAIN + WINDOW)
    messages_until(watched, "is usable again")
    assert watched.present.maintenance == present.maintenance


def test_the_cluster_in_a_job_file_is_read_from_there(tmp_path: Path) -> None:
    """Whatever else the job file says meanwhile."""
    file = tmp_path / "job.yaml"
    file.write_text("name: gpt\nscript: train.py\ncluster: {nodes: 3}\n")
    _, cluster = load_job(file)
    assert cluster is not None
    watched = ClusterFile(cluster)
    try:
        file.write_text("name: NONE\nscript: 3\ncluster:\n  nodes: 3\n  maintenance: [{start: 2030-01-01 22:00}]\n")
        messages_until(watched, "maintenance of all nodes from")
        assert len(watched.present.windows) == 1
    finally:
        watched.close()
