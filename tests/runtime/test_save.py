"""A save that fails costs one checkpoint: training goes on, all ranks agree, and it is reported once."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.agent_double import AgentDouble
from tests.runtime.damage import biggest, flip_a_bit, names
from tests.runtime.ranks import Ranks
from tests.waiting import wait_until

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which only root may")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a real file system that is nearly full: 2 MiB, of which a file leaves 20 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True)
    (place / "ballast").write_bytes(bytes(2028 * 1024))
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@ROOT_ONLY
def test_a_full_disk_does_not_stop_training_and_the_next_interval_tries_again(
    ranks: Ranks, agent: AgentDouble, small_disk: Path, tmp_path: Path
) -> None:
    """Two ranks get a full disk twice, report it once, and leave no files; with room again the next save succeeds."""
    run = ranks.start("train", 2, agent.environment, directory=small_disk / "c", until=24, every=4, hold=(14, str(tmp_path / "go")))
    agent.wait_for("storage-error")
    agent.wait_for("beat", 2, step=14)
    assert names(small_disk / "c") == []
    (small_disk / "ballast").unlink()
    (tmp_path / "go").touch()
    agent.wait_for("saved")
    results = run.results()
    assert [rank["step"] for rank in results] == [24, 24]
    troubles = agent.of("storage-error")
    assert [(one["kind"], one["why"]) for one in troubles] == [("checkpoint-disk-full", "No space left on device")]
    assert {one["step"] for one in agent.of("beat")} == set(range(1, 25))
    assert names(small_disk / "c")[-1] == "step-00000024"


@ROOT_ONLY
def test_a_read_only_disk_is_reported(ranks: Ranks, agent: AgentDouble, small_disk: Path, tmp_path: Path) -> None:
    """A file system remounted read-only between two saves keeps the first and refuses the second."""
    (small_disk / "ballast").unlink()
    run = ranks.start("train", 2, agent.environment, directory=small_disk / "c", until=24, every=10, hold=(12, str(tmp_path / "go")))
    agent.wait_for("saved")
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    wait_until(lambda: subprocess.run(remount, check=False, capture_output=True).returncode == 0, seconds=60)  # busy while a file is open
    (tmp_path / "go").touch()
    assert [rank["step"] for rank in run.results()] == [24, 24]
    assert [(one["kind"], one["why"]) for one in agent.of("storage-error")] == [("checkpoint-read-only", "Read-only file system")]


def test_one_rank_that_cannot_write_fails_the_save_of_all(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """The last of three ranks may write 4 KiB only: no rank believes that the checkpoint is complete, and none waits for it."""
    results = ranks.run("train_without_room", 3, agent.environment, directory=tmp_path)
    assert [rank["step"] for rank in results] == [12] * 3
    assert [(one["kind"], one["why"]) for one in agent.of("storage-error")] == [("checkpoint-write-failed", "File too large")]
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root may")
def test_a_directory_of_another_user_is_reported_as_read_only(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """A user without the right to write trains on without checkpoints."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:  # as many as pytest has made: a parallel worker's folder lies one deeper
            folder.chmod(0o755)
    agent.path.chmod(0o777)
    agent.path.parent.chmod(0o755)
    agent.path.parent.parent.chmod(0o755)
    assert ranks.run("train_as_nobody", 1, agent.environment, directory=tmp_path / "c")[0]["step"] == 12
    assert [one["kind"] for one in agent.of("storage-error")] == ["checkpoint-read-only"]


def test_a_checkpoint_refused_by_the_agent_is_not_published(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """A worker of an older generation trains on, commits nothing, and leaves nothing."""
    agent.leave = False
    results = ranks.run("train", 2, agent.environment, directory=tmp_path)
    assert [rank["step"] for rank in results] == [12, 12]
    assert [one["step"] for one in agent.of("commit-request")] == [4, 8, 12]
    assert agent.of("saved") == []
    assert names(tmp_path) == []


@pytest.mark.parametrize(("every", "steps"), [(None, [4, 5, 10, 12]), (4, [4, 8, 12])], ids=["of the environment", "of the script"])
def test_ranks_without_managed_groups_change_the_interval_with_a_save(
    ranks: Ranks, agent: AgentDouble, tmp_path: Path, every: int | None, steps: list[int]
) -> None:
    """The interval that arrives with rank 0's permission reaches all ranks in the save; an interval set in the script stays."""
    agent.interval = 5
    results = ranks.run("train", 2, agent.environment | {"HOLDFAST_SAVE_EVERY": "4"}, directory=tmp_path, every=every)
    assert [rank["step"] for rank in results] == [12, 12]
    assert [one["step"] for one in agent.of("saved")] == steps


def test_a_worker_without_its_agent_trains_on_and_commits_nothing(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """Nobody can say that its generation is the current one, so it does not claim to be."""
    run = ranks.start("train", 2, agent.environment, directory=tmp_path / "c", until=24, every=10, hold=(5, str(tmp_path / "go")))
    agent.wait_for("beat", step=5)
    agent.vanish()
    (tmp_path / "go").touch()
    assert [rank["step"] for rank in run.results()] == [24, 24]
    assert names(tmp_path / "c") == []


def test_the_newest_complete_checkpoints_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    """Of six checkpoints the newest three stay, and nothing else."""
    ranks.run("train", directory=tmp_path, every=2, keep=3)
    assert names(tmp_path) == ["step-00000008", "step-00000010", "step-00000012"]


def test_a_corrupt_checkpoint_is_neither_counted_nor_removed(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """Found corrupt at the start, it is left for inspection, and two complete ones are kept in addition."""
    ranks.run("train", directory=tmp_path, until=8)
    flip_a_bit(biggest(tmp_path / "step-00000008"))
    run = ranks.run("train", 1, agent.environment, directory=tmp_path, until=20, every=6)
    assert run[0]["began"] == 4
    assert [(one["kind"], one["step"]) for one in agent.of("storage-error")] == [("checkpoint-corrupt", 8)]
    assert names(tmp_path) == ["step-00000008", "step-00000018", "step-00000020"]


def test_a_corrupt_step_is_saved_again_and_kept_under_another_name(ranks: Ranks, tmp_path: Path) -> None:
    """The same step again takes the name; the damaged one is moved aside under another."""
    ranks.run("train", directory=tmp_path, until=8)
    flip_a_bit(biggest(tmp_path / "step-00000008"))
    ranks.run("train", directory=tmp_path, until=8)
    first, second, third = names(tmp_path)
    assert (first, second) == ("step-00000004", "step-00000008")
    assert third.startswith("step-00000008.unusable-")
    assert ranks.run("train", directory=tmp_path, until=8)[0]["began"] == 8


def test_a_step_saved_again_retires_like_any_other(ranks: Ranks, tmp_path: Path) -> None:
    """That its name once stood for a damaged one does not keep it for ever."""
    ranks.run("train", directory=tmp_path, until=8)
    flip_a_bit(biggest(tmp_path / "step-00000008"))
    ranks.run("train", directory=tmp_path, until=20)
    first, second, third = names(tmp_path)
    assert first.startswith("step-00000008.unusable-")
    assert (second, third) == ("step-00000016", "step-00000020")


def test_incomplete_checkpoints_of_older_generations_are_removed(ranks: Ranks, tmp_path: Path) -> None:
    """Staging folders of this and older generations are removed at the start; one of a newer generation is in use."""
    for name in (".step-00000004.partial-0", ".step-00000004.removing-1", ".step-00000004.partial-7"):
        (tmp_path / name).mkdir()
    ranks.run("train", 1, {"HOLDFAST_GENERATION": "1"}, directory=tmp_path, every=0)
    assert names(tmp_path) == [".step-00000004.partial-7"]


def test_a_removed_directory_is_created_again(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """The folder is removed under a running job: the next save creates it again."""
    run = ranks.start("train", 2, agent.environment, directory=tmp_path / "c", until=24, every=10, hold=(12, str(tmp_path / "go")))
    agent.wait_for("beat", 2, step=12)
    assert [one["step"] for one in agent.of("saved")] == [10]
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "go").touch()
    assert [rank["step"] for rank in run.results()] == [24, 24]
    assert names(tmp_path / "c")[-1] == "step-00000024"


def test_a_peer_lost_in_a_save_is_not_a_storage_error(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """One of two ranks that do nothing but save is killed: the other ends with the loss of its peer, and does not wait."""
    run = ranks.start("save_for_ever", 2, agent.environment, directory=tmp_path)
    agent.wait_for("saved", 3)
    os.kill(run.pids[1], 9)
    assert [one.status for one in run.wait()] == [1, -9]
    assert [one["peer_lost"] for one in agent.of("exception")] == [True]
    assert agent.of("storage-error") == []


def test_after_a_kill_at_any_time_the_newest_checkpoint_is_complete(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks that do nothing but save are killed 16 times or more, each at another moment: every restart finds all it needs.

    How much of the time a save takes depends on the machine, so this goes on until enough of the kills have hit one.
    """
    newest = partials = turn = 0
    while turn < 16 or partials < 5:
        run = ranks.start("save_for_ever", 2, directory=tmp_path)
        begin = time.monotonic()
        wait_until(lambda: any(int(name[5:13]) > newest for name in names(tmp_path) if name.startswith("step-")), seconds=60)  # noqa: B023
        a_save = time.monotonic() - begin
        wait_until(lambda: time.monotonic() - begin > a_save + 0.007 * (turn % 16), seconds=60)  # noqa: B023 (moments spread over a whole save)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a rank that runs on after its peer has gone would end by itself
            for pid in run.pids:
                os.kill(pid, number)
        assert [one.status for one in run.wait()] == [-9, -9]
        partials += any("partial" in name for name in names(tmp_path))
        results = ranks.run("restore", 2, directory=tmp_path)
        assert all(one["fits"] for one in results), results
        assert results[0]["step"] == results[1]["step"] > newest
        assert not [name for name in results[0]["left"] if name.startswith(".")], results
        newest, turn = results[0]["step"], turn + 1
