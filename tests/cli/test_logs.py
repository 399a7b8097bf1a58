"""What ranks wrote, where they are."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.agent.workers.log_files import place_of, shared_source
from holdfast.cluster.remote import RemoteNodes
from holdfast.errors import UnknownRank
from holdfast.history import models
from holdfast.history.store import History
from holdfast.paths import job_directory
from tests.cli.conftest import Command, refused
from tests.cli.written_history import Author
from tests.cluster.proxies import Boxes, ChildTransport
from tests.mentions import mentions
from tests.waiting import wait_until


def write(folder: Path, **logs: str) -> Path:
    """Write logs into *folder*, as agents do; names have no dashes here."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in logs.items():
        (folder / f"{name.replace('_', '-')}.log").write_text(text)
    return folder


def test_the_last_lines_of_every_rank_are_shown_with_its_node(here: Command, running: Author) -> None:
    """Of a progress bar the last state; what would play with the terminal is made visible."""
    lines = "".join(f"line {number}\n" for number in range(100))
    bar = "  1%\r 50%\r100%\nred \x1b[31m and no end"
    write(job_directory("gpt-small") / "logs", rank_0=lines, rank_1=bar, rank_2="", hot_spare_0="warm\n")
    done = here("logs", "-n", "2")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "== rank 0 on n0", "line 98", "line 99", "== rank 1 on n0", "100%", "red ␛[31m and no end",
        "== rank 2 on n2: empty so far", "== rank 3 on n2: empty so far",
    ]  # fmt: skip
    assert here("logs", "gpt-small", "--rank", "0", "-n", "1").stdout == "line 99\n"
    output = json.loads(here("logs", "--rank", "1", "--json").stdout)
    assert output["logs"] == [{"node": "n0", "log": "rank-1.log", "lines": ["100%", "red ␛[31m and no end"]}]


@pytest.mark.parametrize(
    ("when", "shown"),
    [
        (-3600, ["first", "second", "kept", "third"]),  # before the job began
        (5, ["first", "second", "kept", "third"]),  # in generation 1
        (15, ["second", "kept", "third"]),  # in generation 2
        (20, ["second", "kept", "third"]),  # in generation 3, in which the process of generation 2 still ran
        (None, ["first", "second", "kept", "third"]),
    ],
)
def test_output_since_a_time_begins_with_the_process_that_ran_then(
    when: int | None, shown: list[str], here: Command, running: Author
) -> None:
    """A log holds no times, only where a process began; the history knows when. What another job of the name wrote is left out."""
    running.generation(4, {"n0": [0, 1], "n2": [2, 3]}, seconds=40)
    parts = {1: ["first"], 2: ["second", "kept"], 4: ["third"]}
    text = "".join(
        "\n".join([f"--- holdfast: rank 0, generation {number} of job {running.job.id}", *lines, ""]) for number, lines in parts.items()
    )
    write(job_directory("gpt-small") / "logs", rank_0=f"of an earlier job\n{text}")
    words = [] if when is None else ["--since", datetime.fromtimestamp(running.zero + when, tz=UTC).isoformat()]
    output = json.loads(here("logs", "--rank", "0", "--json", *words).stdout)
    lines = [line for line in output["logs"][0]["lines"] if not line.startswith("---")]
    assert lines == (shown if when is not None else ["of an earlier job", *shown])


def test_a_job_that_ended_before_has_written_nothing_since(here: Command, running: Author) -> None:
    """However its log looks; and what is no time is refused."""
    write(job_directory("gpt-small") / "logs", rank_0="one\n")
    running.move("COMPLETED", "all steps done", seconds=44, event="finished")
    assert json.loads(here("logs", "--rank", "0", "--json", "--since", "1h").stdout)["logs"][0]["lines"] == ["one"]
    assert json.loads(here("logs", "--rank", "0", "--json", "--since", "2099-01-01").stdout)["logs"][0]["lines"] == []
    assert here("logs", "--since", "yesterday").returncode == 2


def test_a_log_that_cannot_be_read_is_reported_although_others_of_its_node_can(here: Command, running: Author) -> None:
    """The exit status says so too."""
    folder = write(job_directory("gpt-small") / "logs", rank_1="one\n", rank_2="two\n", rank_3="three\n")
    (folder / "rank-0.log").symlink_to("/proc/self/mem")  # a regular file, of which nothing can be read at byte 0
    done = here("logs")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert mentions(done.stderr, "n0", os.strerror(errno.EIO))
    assert "== rank 1 on n0\none\n" in done.stdout
    completed = here("logs", "--json")
    assert (completed.returncode, json.loads(completed.stdout)["unreachable"]) == (1, {"n0": "Input/output error"})


def test_a_log_that_is_followed_shows_lines_as_they_come_until_the_job_ends(
    here: Command, running: Author, book: History, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each complete line is shown once, and the last ones before the command exits."""
    log = write(job_directory("gpt-small") / "logs", rank_0="one\ntw") / "rank-0.log"
    done = []
    reader = threading.Thread(target=lambda: done.append(here("logs", "--rank", "0", "--follow")))
    reader.start()
    with log.open("a") as file:
        file.write("o\nthree\n")
    with book.session() as session:
        job = running.job.id
        session.add(
            models.JobTransition(job_id=job, at=1e10, before="RUNNING", event="finished", after="COMPLETED", reason="done", generation=3)
        )
        session.commit()
    reader.join(60)
    assert done[0].returncode == 0
    assert [line for line in done[0].stdout.splitlines() if line in {"one", "two", "three"}][-1] == "three"
    assert done[0].stdout.count("three\n") == 1


@pytest.fixture
def reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildTransport]:
    """Let the job's nodes be other machines."""
    made = ChildTransport()
    boxes = Boxes(str(tmp_path / "hf"), names=["n0", "n1", "n2"])
    monkeypatch.setattr("holdfast.cli.commands.watch.logs.open_cluster", lambda _cluster: RemoteNodes(boxes, made))
    yield made
    made.reap()


def test_logs_of_other_machines_come_through_their_gates(here: Command, running: Author, reach: ChildTransport, tmp_path: Path) -> None:
    """All logs of one node, also of ranks that have left it, and none of nodes that share its folder."""
    folder = write(tmp_path / "hf/jobs/gpt-small/logs", rank_0="far away\n", rank_2="went elsewhere\n", rank_7="of an earlier job\n")
    (folder / "secret.txt").write_text("hunter2")
    assert here("logs", "--rank", "0").stdout == "far away\n"
    assert here("logs", "--node", "n1").stdout.splitlines() == ["== rank 2 on n1", "went elsewhere", "== rank 7 on n1", "of an earlier job"]
    assert here("logs", "--node", "n1", "--rank", "7").stdout == "of an earlier job\n", "not of this job, and on this node"
    done = here("logs", "--node", "n9")
    assert (done.returncode, "has no node 'n9'" in done.stderr) == (2, True)
    reach.down = True
    done = here("logs", "--rank", "0")
    assert done.returncode == 1
    assert mentions(done.stderr, "n0", "no route to host")


def test_a_shared_folder_is_recognized(tmp_path: Path) -> None:
    """By its mount; other folders are distinguished, and a missing one is not shared."""
    (tmp_path / "other").mkdir()
    assert place_of(tmp_path) == place_of(tmp_path / "other" / "..") != place_of(tmp_path / "other")
    assert not place_of(tmp_path / "missing")
    mounts = """\
25 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
40 25 0:52 / /home rw,relatime shared:9 - nfs4 filer.example.org:/home rw,vers=4.2
41 25 0:53 / /x rw - tmpfs tmpfs rw
broken
"""
    assert [shared_source(mounts, device) for device in ("259:2", "0:52", "0:53", "9:9")] == ["", "filer.example.org:/home", "", ""]


@pytest.mark.parametrize(
    ("job", "name"), [("gpt-small", "../../x"), ("gpt-small", "secret.txt"), ("../x", "rank-0.log"), ("a/b", "rank-0.log")]
)
def test_a_proxy_serves_only_logs_of_jobs(job: str, name: str, reach: ChildTransport, tmp_path: Path) -> None:
    """Whatever path is requested."""
    write(tmp_path / "hf/jobs/gpt-small/logs", rank_0="far away\n")
    (tmp_path / "hf/jobs/gpt-small/logs/secret.txt").write_text("hunter2")
    nodes = RemoteNodes(Boxes(str(tmp_path / "hf")), reach)
    with pytest.raises(OSError, match=r"no (job|log) is called"):
        nodes.log("box-0", job, name, 0, 100)
    assert nodes.log("box-0", "gpt-small", "rank-0.log", 4, 4) == b"away"
    nodes.close()
    wait_until(lambda: reach.pipes[0].child.poll() is not None, seconds=60)


def test_a_rank_that_the_job_never_had_is_refused(here: Command, running: Author) -> None:
    """Exit status 2, with the ranks that there are."""
    write(job_directory("gpt-small") / "logs", rank_0="one\n")
    for arguments in (("--rank", "9"), ("--rank", "0,9"), ("--rank", "9", "--json"), ("--rank", "9", "--follow")):
        done = here("logs", "gpt-small", *arguments)
        assert refused(done, UnknownRank("9", "gpt-small", "0–3"))  # noqa: RUF001 (a range)
    assert mentions(done.stderr, "job 'gpt-small' has no rank 9", "0–3")  # noqa: RUF001 (a range)
    assert here("logs", "gpt-small", "--rank", "0").stdout == "one\n"


def test_before_a_job_has_ranks_none_is_unknown(here: Command, book: History) -> None:
    """It may have that rank in a moment."""
    Author(book, "new", time.time())
    done = here("logs", "new", "--rank", "9")
    assert done.returncode == 0
    assert mentions(done.stderr, "no logs", "rank 9")
