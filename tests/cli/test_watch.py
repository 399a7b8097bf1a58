"""Watching a job: on a terminal, through a pipe, by a program. The watcher may vanish; the job does not notice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from holdfast.cli import watch as watching
from holdfast.cli.changes import JobChange, JobFollower
from holdfast.cli.flow_process import waits_for
from holdfast.cli.frame import sparkline
from holdfast.cli.job_view import JobView, view_job
from holdfast.cli.screens import PlainLines
from holdfast.cli.watch import JobWatcher, Signals
from holdfast.history import queries
from holdfast.history.models import FaultRecord, Incident
from holdfast.history.store import History
from holdfast.prefect.server import UI_MESSAGE, UNUSABLE
from tests.cli.conftest import PROGRAM, environment
from tests.cli.terminal import HIDE, SHOW, Terminal
from tests.cli.written_history import TRACEBACK, Author
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until

FOLLOW = [*PROGRAM, "status", "gpt-small", "--follow"]
SECONDS = 60
"""For a busy machine."""


@pytest.fixture
def screen(running: Author) -> Iterator[Callable[..., Terminal]]:
    """Follow the job on a terminal, until the first picture is complete."""
    opened: list[Terminal] = []

    def start(columns: int = 80, lines: int = 24) -> Terminal:
        opened.append(Terminal(FOLLOW, environment(), columns=columns, lines=lines))
        wait_until(opened[-1].newest_frame, seconds=SECONDS, explain=lambda: opened[-1].text)
        return opened[-1]

    yield start
    for terminal in opened:
        with terminal:
            pass


def end(author: Author, history: History, state: str = "COMPLETED", reason: str = "all ended well") -> None:
    """Close the open incident and end the job."""
    with history.session() as session:
        for row in queries.incidents(history, author.job.id):
            one = session.get(Incident, row.id)
            if one is not None and one.closed_at is None:
                one.closed_at, one.outcome, one.downtime_s = time.time(), "recovered", 1.5
    author.move(state, reason, seconds=time.time() - author.zero, event="finished")


def ended(terminal: Terminal) -> int:
    """Wait for the end of the program and return its status."""
    wait_until(lambda: terminal.status() is not None, seconds=SECONDS, explain=lambda: terminal.text)
    status = terminal.status()
    assert status is not None
    return status


def test_a_job_without_incidents_is_polled_less_often(running: Author, book: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls take time from training; during a recovery people want to see it at once."""
    polls: list[float] = []
    real = JobFollower.poll

    def poll(follower: JobFollower, **more: bool) -> tuple[list[JobChange], JobView]:
        polls.append(time.monotonic())
        return real(follower, **more)

    monkeypatch.setattr(JobFollower, "poll", poll)
    monkeypatch.setattr(watching, "HISTORY_INTERVAL", 3600.0)
    watch, signals = JobWatcher(book, PlainLines(), job=running.job), Signals()
    for _ in range(3):
        watch._turn(signals)
    assert len(polls) == 1 + 3, "an incident is open, and the follower polls once when it begins"
    with book.session() as session:
        for row in queries.incidents(book, running.job.id):
            one = session.get(Incident, row.id)
            if one is not None and one.closed_at is None:
                one.closed_at, one.outcome, one.downtime_s = time.time(), "recovered", 1.5
    watch._turn(signals)  # it learns of the end
    polls.clear()
    for _ in range(3):
        watch._turn(signals)
    assert polls == []


def test_a_follower_sees_what_a_reader_sees(running: Author, book: History) -> None:
    """Every field, warnings of the present generation and the condition of nodes included."""
    for generation, kind in ((2, "data-stall"), (3, "straggler-gpu"), (3, "worker-sigkill")):
        fault = FaultRecord(
            job_id=running.job.id, at=time.time(), kind=kind, recommended_action="monitor", target="rank 1 on n0", attributed_to="gpu",
            generation=generation, evidence={"quote": "1.4 times as slow"},
        )  # fmt: skip
        running.write(fault)
    running.node("n1", "lost", "it does not answer", seconds=18)
    running.snapshots(3, step=399, replica_step=398)
    _, followed = JobFollower(book, running.job).poll()
    read = view_job(book, running.job)
    assert [one.kind for one in followed.warnings] == ["straggler-gpu"]
    assert "n1" in followed.nodes.removed
    names = {one.name for one in fields(JobView)} - {"at", "steps"}  # a follower draws the curve of more steps
    assert {name: getattr(followed, name) for name in names} == {name: getattr(read, name) for name in names}
    assert followed.step == read.step


def test_the_picture_shows_the_job_as_it_is(screen: Callable[..., Terminal], running: Author) -> None:
    """Name, state, step of total, loss, rate, ranks, checkpoint, the open incident with its phase and reason, and those before."""
    terminal = screen(80)
    top, bar, numbers, *rows, bottom = terminal.newest_frame()
    assert re.match(r"╭─ gpt-small  RESCHEDULING  0:\d\d:\d\d  generation 3 ─+╮", top)
    assert re.match(r"│ step +400 of 10,000 ━+─+ 4\.0% │", bar)
    assert re.match(r"│ loss +0\.\d+   10\.00 steps/s +│", numbers)
    assert bottom.endswith("╯")
    shown = {label: text for label, text in (row[2:-2].split(maxsplit=1) for row in rows) if label.isalpha()}
    assert "n0 (0–1), n2 (2–3)" in shown["nodes"]  # noqa: RUF001 (a range)
    assert shown["checkpoint"].startswith("step 100, ")
    assert shown["incident"].startswith("3: worker-exception on rank 3 on n2, ")
    assert "▶ T1 reschedule" in shown["recovery"]
    assert "restart 3 of 3 within 1 h" in shown["action"]
    kinds = ("worker-sigkill", "node-lost", "worker-exception")  # the table follows below the frame
    wait_until(lambda: all(kind in terminal.text for kind in kinds), seconds=SECONDS, explain=lambda: terminal.text)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_picture_fits_the_terminal(columns: int, screen: Callable[..., Terminal]) -> None:
    """Every line of the frame is as wide as the terminal, the table no wider; a wide one shows the curve of the loss."""
    terminal = screen(columns)
    assert {len(line) for line in terminal.newest_frame()} == {columns}
    below = terminal.text.rpartition("╯")[2].splitlines()
    assert all(len(line.rstrip()) <= columns for line in below)
    assert bool(set("▁▂▃▄▅▆▇") & set(terminal.text)) is (columns == 120)


LONG_NOTE = (
    "node-1: The processors of this node have more to do than they can: load 9.2 on 2 processors. Cure: find the process that takes them"
    " and end it, or move the job to a node that is free; see /a/folder/with/a/long/path/in/which/the/log/of/the/flow/lies/flow.log"
)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (50, 20)])
def test_no_word_is_broken_and_no_line_too_long(
    columns: int, lines: int, screen: Callable[..., Terminal], running: Author, book: History
) -> None:
    """Events, notes, the panel and the summary: a long text is wrapped, a note cut after two lines."""
    terminal = screen(columns, lines)
    now = time.time() - running.zero
    running.incident(4, "cuda-uncorrectable-ecc", "rank 2 on gpu-node-with-a-long-name-17", seconds=now)
    for number in range(5):
        running.record_event(LONG_NOTE.replace("9.2", f"{number + 9}.2"), seconds=now + 0.1 * number)
    wait_until(lambda: "node-1: The processors" in terminal.text, seconds=SECONDS, explain=lambda: terminal.text)
    end(running, book, reason="all of the 2,000 steps that were asked for are done and the newest checkpoint is whole")
    assert ended(terminal) == 0
    shown = [line for line in re.split(r"[\r\n]+", terminal.text) if line]
    assert max(map(len, shown)) <= columns, max(shown, key=len)
    words = {word for line in shown for word in line.split()}
    for text in ("incident 4: cuda-uncorrectable-ecc on rank 2 on gpu-node-with-a-long-name-17, detected after", "checkpoint is whole"):
        assert set(text.split()) <= words
    assert terminal.text.count("node-1: The processors") == 1, "a note that comes again is no news"
    cut = next(number for number, line in enumerate(shown) if "node-1: The processors" in line)
    assert shown[cut + 1].endswith(" …")
    assert set(shown[cut + 1].removesuffix("…").split()) <= set(LONG_NOTE.replace("9.2", "9.2").split())


def test_a_recovery_is_two_lines(running: Author, book: History) -> None:
    """One when it begins and one when it is over; a program gets every move, decision and generation."""
    child, program = (
        subprocess.Popen([*FOLLOW, *more], env=environment(), stdout=subprocess.PIPE, text=True) for more in ((), ("--json",))
    )
    assert child.stdout
    assert program.stdout
    child.stdout.readline()
    program.stdout.readline()
    at = time.time() - running.zero
    running.move("DIAGNOSING", "rank 2 was killed", seconds=at + 0.02, event="faulted", generation=3)
    running.move("ISOLATING", "restart 4 of 3 within 1 h", seconds=at + 0.03, event="decided", generation=3)
    running.incident(4, "worker-sigkill", "rank 2 on n2", seconds=at)
    running.generation(4, {"n0": [0, 1], "n2": [2, 3]}, seconds=at + 0.05)
    running.move("RUNNING", "all 4 ranks are at work", seconds=at + 0.5, generation=4)
    end(running, book)
    said, output = (one.communicate(timeout=SECONDS)[0] for one in (child, program))
    lines = [line[10:] for line in said.splitlines()]
    begun, over = (line for line in lines if "incident 4" in line)
    assert mentions(begun, "worker-sigkill", "rank 2", "n2", "20 ms", "restart-workers")
    assert mentions(over, "restart-workers", "310 ms", "2 steps", "generation 5", "detect 20 ms", "diagnose 10 ms", "isolate 280 ms")
    assert not any(word in said for word in ("DIAGNOSING", "ISOLATING", "generation 4:", "are at work"))
    events = [json.loads(line) for line in output.splitlines()]
    phases = next(one["phases"] for one in events if one["event"] == "incident-closed" and one["number"] == 4)
    measured = {"detect": pytest.approx(0.02), "diagnose": pytest.approx(0.01), "isolate": pytest.approx(0.28)}
    assert phases == {**measured, "reschedule": None, "resume": None}
    assert sorted(one["after"] for one in events if one["event"] == "transition") == ["COMPLETED", "DIAGNOSING", "ISOLATING", "RUNNING"]


def test_the_picture_follows_the_size_of_the_terminal(screen: Callable[..., Terminal]) -> None:
    """Wider, then as small as a stamp: the next picture fits, and nothing breaks."""
    terminal = screen(80)
    for columns, lines in ((120, 40), (60, 10), (30, 3), (100, 24)):
        terminal.resize(columns, lines)
        wait_until(partial(_is_wide, terminal, columns), seconds=SECONDS, explain=lambda: terminal.text[-2000:])
    assert terminal.status() is None


def _is_wide(terminal: Terminal, columns: int) -> bool:
    """Return whether the newest top edge, which even a cropped picture has, is so wide."""
    edges = re.findall(r"╭─[^\r\n]*╮", terminal.text)
    return bool(edges) and len(edges[-1]) == columns


def test_what_happens_scrolls_by_above_the_picture(screen: Callable[..., Terminal], running: Author) -> None:
    """A new incident is shown when it occurs."""
    terminal = screen()
    running.incident(4, "worker-sigbus", "rank 2 on n2", seconds=time.time() - running.zero)
    wait_until(
        lambda: "incident 4: worker-sigbus on rank 2 on n2, detected after" in terminal.text,
        seconds=SECONDS,
        explain=lambda: terminal.text,
    )


def test_the_end_leaves_the_terminal_as_it_was(screen: Callable[..., Terminal], running: Author, book: History) -> None:
    """Cursor and echo are restored, the summary stays, the status is the job's."""
    terminal = screen()
    assert not terminal.echoes()
    end(running, book)
    assert ended(terminal) == 0
    assert terminal.raw.count(HIDE) == terminal.raw.count(SHOW) > 0
    assert terminal.echoes()
    assert "job 'gpt-small' COMPLETED after" in terminal.text
    summary = dict(re.findall(r"^ +(steps|incidents|checkpoint) +(.+?)\r?$", terminal.text.rpartition("COMPLETED after")[2], re.MULTILINE))
    assert summary["steps"].startswith("400 of 10,000, loss 0.")
    assert summary["incidents"].startswith("3: ")
    assert re.search(r"ETTR \d+\.\d%", terminal.text.rpartition("COMPLETED after")[2])
    assert summary["checkpoint"] == "step 100 of 10,000, /somewhere/step-100"
    assert "holdfast report gpt-small" in terminal.text


def test_ctrl_c_ends_the_watching_and_nothing_else(screen: Callable[..., Terminal], running: Author, book: History) -> None:
    """Status 130, no traceback, the terminal as it was, no request to stop."""
    terminal = screen()
    terminal.type("\x03")
    assert ended(terminal) == 130
    assert "Traceback" not in terminal.text
    assert terminal.raw.count(HIDE) == terminal.raw.count(SHOW)
    assert terminal.echoes()
    assert queries.pending_requests(book, running.job.id) == []


def test_a_termination_leaves_the_terminal_as_it_was(screen: Callable[..., Terminal]) -> None:
    """SIGTERM must not leave the cursor hidden."""
    terminal = screen()
    os.kill(terminal.pid, signal.SIGTERM)
    assert ended(terminal) == 143
    assert terminal.raw.count(HIDE) == terminal.raw.count(SHOW)
    assert terminal.echoes()


def test_a_terminal_that_goes_away_ends_the_watching(screen: Callable[..., Terminal]) -> None:
    """The kernel's SIGHUP does it, in silence."""
    terminal = screen()
    terminal.hang_up()
    assert ended(terminal) == -signal.SIGHUP


@pytest.mark.parametrize("size", [{}, {"COLUMNS": "80", "LINES": "24"}], ids=["asked", "exported"])
def test_a_terminal_that_goes_away_ends_a_watching_that_ignores_the_signal_too(running: Author, size: dict[str, str]) -> None:
    """With SIGHUP ignored, the next draw fails, also where the shell exports the size and it changes no more."""
    with Terminal(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *FOLLOW], environment(**size)) as terminal:
        wait_until(terminal.newest_frame, seconds=SECONDS, explain=lambda: terminal.text)
        terminal.hang_up()
        assert ended(terminal) == 141


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(running: Author) -> None:
    """TERM=dumb, as in editors."""
    with Terminal(["env", "TERM=dumb", *FOLLOW], environment()) as terminal:
        wait_until(lambda: "step 400 of 10,000" in terminal.text, seconds=SECONDS, explain=lambda: terminal.text)
        assert "╭" not in terminal.text


def test_a_pipe_gets_one_line_a_change(running: Author, book: History) -> None:
    """With the time of day; no colours, no picture."""
    child = subprocess.Popen(FOLLOW, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout
    first = child.stdout.readline()
    running.incident(4, "worker-sigbus", "rank 2 on n2", seconds=time.time() - running.zero)
    end(running, book)
    rest, _ = child.communicate(timeout=SECONDS)
    assert re.match(r"\d\d:\d\d:\d\d  step 400 of 10,000  loss 0\.\d+  10\.00 steps/s$", first)
    lines = [line[10:] for line in rest.splitlines()]
    assert any(mentions(line, "incident 4", "worker-sigbus", "rank 2", "n2", "20 ms", "restart-workers") for line in lines)
    ends = [line for line in lines if "COMPLETED" in line]
    assert len(ends) == 1, "the end has one line"
    assert mentions(ends[0], "job 'gpt-small' COMPLETED after", "all ended well")
    assert "\x1b" not in rest
    assert child.returncode == 0


def test_a_program_gets_one_object_a_change(running: Author, book: History) -> None:
    """The last one is the end, with what the faults cost."""
    child = subprocess.Popen([*FOLLOW, "--json"], env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout
    first = json.loads(child.stdout.readline())
    end(running, book, "CANCELLED", "a person asked")
    rest, _ = child.communicate(timeout=SECONDS)
    events = [json.loads(line) for line in rest.splitlines()]
    assert (first["event"], first["step"], first["until"]) == ("progress", 400, 10_000)
    assert [event["event"] for event in events] == ["incident-closed", "transition", "end"]
    assert (events[1]["after"], events[1]["trigger"]) == ("CANCELLED", "finished")
    assert events[-1]["state"] == "CANCELLED"
    assert events[-1]["losses"]["steps_lost"] == 2
    assert child.returncode == 3


def test_a_failed_job_shows_its_traceback(running: Author, book: History) -> None:
    """Status 1, and where to read all of it."""
    child = subprocess.Popen(FOLLOW, env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout
    child.stdout.readline()
    end(running, book, "FAILED", "the script's own error")
    rest, _ = child.communicate(timeout=SECONDS)
    assert all(f"│ {line}" in rest for line in TRACEBACK.splitlines())
    hint = re.search(r"`holdfast (incidents show \w+)`", rest)
    assert hint
    later = Author(book, "gpt-small", time.time())  # the hint is read when the name stands for another run
    later.move("RUNNING", "every worker made its first step", seconds=0)
    assert mentions(subprocess.check_output([*PROGRAM, *hint[1].split()], env=environment(), text=True), "gpt-small, incident 3")
    assert child.returncode == 1


def test_a_history_that_goes_away_ends_no_watching(running: Author, book: History) -> None:
    """The watcher shows it once and continues when the history is back."""
    child = subprocess.Popen(FOLLOW, env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout
    child.stdout.readline()
    with book.session() as session:
        session.connection().exec_driver_sql("ALTER TABLE job_transition RENAME TO moved")
    said = child.stdout.readline()
    with book.session() as session:
        session.connection().exec_driver_sql("ALTER TABLE moved RENAME TO job_transition")
    end(running, book)
    rest, _ = child.communicate(timeout=SECONDS)
    assert mentions(said, "cannot read the history")
    assert one_line_mentions(rest, "history", "again")
    assert child.returncode == 0


def test_following_an_ended_job_shows_its_end(running: Author, book: History) -> None:
    """At once, with the job's status."""
    end(running, book, "FAILED", "the script's own error")
    done = subprocess.run(FOLLOW, env=environment(), capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 1
    assert "job 'gpt-small' FAILED" in done.stdout


def test_a_checkpoint_of_the_last_moment_is_in_the_summary(book: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded after the transition that ended the job, and before the flow exits."""
    monkeypatch.setattr(watching, "POLL_INTERVAL", 0.0)
    job = Author(book, "cc", time.time() - 60)
    job.generation(1, {"n0": [0, 1]}, seconds=1, until=960)
    job.steps(1, 71, generation=1, seconds=2)
    job.checkpoint(60, seconds=9)
    job.move("CANCELLED", "ada asked the job to stop", seconds=50, event="stop-asked")
    shown: list[JobChange] = []
    lines = PlainLines()
    monkeypatch.setattr(lines, "show_change", shown.append)
    statuses = iter((None, 0))

    class Flow:
        """A flow that saves once more, and exits between two polls."""

        pid = 1

        def status(self) -> int | None:
            """Return that it runs, then that it has exited; the checkpoint is recorded in between."""
            status = next(statuses, 0)
            if status is not None and not shown_checkpoints():
                job.checkpoint(71, seconds=51)
            return status

        def release_lock(self) -> None:
            """Do nothing: there is no lock."""

    def shown_checkpoints() -> list[int | None]:
        return [one.step for one in queries.checkpoints(book, job.job.id) if one.step == 71]

    watcher = JobWatcher(book, lines, flow=Flow(), job=job.job)  # type: ignore[arg-type]
    watcher.until_the_end(Signals())
    (end,) = [one for one in shown if one.event == "end"]
    assert one_line_mentions(end.text, "checkpoint", "step 71 of 960"), end.text


def test_the_curve_of_the_loss_spans_its_own_range() -> None:
    """Lowest and highest block for lowest and highest loss; a dot for NaN."""
    assert sparkline([4.0, 3.0, 2.0, 1.0], 10) == "█▆▃▁"
    assert sparkline([1.0, float("nan"), None, 2.0], 10) == "▁··█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([float("inf"), None], 10) == ""
    assert sparkline(list(range(100)), 8)[-1] == "█"
    assert len(sparkline(list(range(100)), 8)) == 8


def test_while_nothing_runs_each_thing_that_is_waited_for_gets_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """First a Prefect server where none is configured, then the controller; what takes no time gets none."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    lines = PlainLines()
    up = f"{UI_MESSAGE}http://127.0.0.1:1/runs"
    for seconds, said in ((0.0, ""), (2.0, ""), (9.0, ""), (40.0, ""), (41.0, up), (43.0, up), (60.0, up)):
        lines.wait(waits_for(said), seconds)
        if seconds == 2.0:
            assert capsys.readouterr().out == ""
    first, second = capsys.readouterr().out.splitlines()
    assert mentions(first, "Prefect server", "PREFECT_API_URL")
    assert mentions(second, "controller")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:2/api")
    assert waits_for("") == waits_for(up)
    assert mentions(waits_for(f"http://127.0.0.1:2/api {UNUSABLE}: no route"), "temporary", UNUSABLE)
