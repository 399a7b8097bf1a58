"""The agent's journal: what was missed is sent, exactly once, whatever the disk does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from holdfast.agent.event_log import EventLog, replayed_events
from holdfast.protocol import decode


def numbers_after(event_log: EventLog, seq: int) -> list[int]:
    """Return the numbers of the events after *seq*, each once checked to be its own line."""
    numbers = []
    for number, line in event_log.since(seq):
        assert decode(line)["seq"] == number
        numbers.append(number)
    return numbers


def filled(path: Path, count: int, *, max_bytes: int = 1 << 20, max_recent: int = 10) -> EventLog:
    """Return a journal with so many frequent events."""
    event_log = EventLog(path, max_bytes=max_bytes, max_recent=max_recent)
    for number in range(count):
        event_log.add({"event": "steps", "number": number}, milestone=False)
    return event_log


@pytest.mark.parametrize("since", [0, 1, 57, 89, 90, 91, 99, 100])
def test_missed_events_are_sent_in_order(tmp_path: Path, since: int) -> None:
    """From memory, from the file, and from both."""
    assert numbers_after(filled(tmp_path / "event-log.jsonl", 100), since) == list(range(since + 1, 101))


def test_a_new_event_log_is_empty(tmp_path: Path) -> None:
    """There is no event zero."""
    assert numbers_after(EventLog(tmp_path / "event-log.jsonl"), 0) == []


def test_after_rotation_the_older_file_is_read_too(tmp_path: Path) -> None:
    """Two files of bounded size hold a contiguous past."""
    event_log = filled(tmp_path / "event-log.jsonl", 100, max_bytes=2000)
    numbers = numbers_after(event_log, 0)
    assert numbers == list(range(numbers[0], 101))
    assert 0 < numbers[0] < 80
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * 2000


def test_milestones_outlive_the_files(tmp_path: Path) -> None:
    """A flow that reattaches to the job after days of steps must still learn that its workers were started."""
    event_log = EventLog(tmp_path / "event-log.jsonl", max_bytes=2000, max_recent=10)
    event_log.add({"event": "of an old generation"})
    event_log.begin_generation()
    event_log.add({"event": "worker.started"})
    for _ in range(200):
        event_log.add({"event": "steps"}, milestone=False)
    event_log.add({"event": "worker.stopped"})
    numbers = numbers_after(event_log, 1)
    assert numbers[0] == 2
    assert numbers[1:] == list(range(numbers[1], 204))
    assert numbers[1] > 3
    assert numbers_after(event_log, 2)[0] == numbers[1]


def test_the_event_log_of_an_earlier_agent_is_set_aside(tmp_path: Path) -> None:
    """Its numbers mean nothing now; neither do those of its rotated file."""
    path = tmp_path / "event-log.jsonl"
    filled(path, 100, max_bytes=2000)
    assert path.with_suffix(".old").exists()
    event_log = filled(path, 20, max_recent=5)
    assert numbers_after(event_log, 0) == list(range(1, 21))
    assert path.with_suffix(".before").exists()


def test_a_reader_that_is_slow_misses_nothing_when_files_are_rotated_under_it(tmp_path: Path) -> None:
    """It holds the files open that it was reading, and goes on from memory."""
    event_log = filled(tmp_path / "event-log.jsonl", 60, max_bytes=4000)
    reader = event_log.since(0)
    first = [next(reader)[0] for _ in range(5)]
    for _ in range(60):
        event_log.add({"event": "steps"}, milestone=False)
    assert first + [number for number, _ in reader] == list(range(first[0], 121))


@given(
    plan=some.lists(some.integers(0, 30), min_size=1, max_size=12),
    reads=some.lists(some.integers(0, 30), min_size=1, max_size=12),
    max_bytes=some.integers(3000, 6000),
)
@settings(deadline=None, max_examples=50)
def test_reading_while_writing_yields_each_event_once(
    tmp_path_factory: pytest.TempPathFactory, plan: list[int], reads: list[int], max_bytes: int
) -> None:
    """Writes and reads take turns in any way; as long as the files hold what was missed, nothing is lost or sent twice."""
    event_log = EventLog(tmp_path_factory.mktemp("j") / "event-log.jsonl", max_bytes=max_bytes, max_recent=4)
    seen: list[int] = []
    reader: Iterator[tuple[int, bytes]] = iter(())
    for writes, many in zip(plan, reads * len(plan), strict=False):
        for _ in range(min(writes, 20)):
            event_log.add({"event": "x"}, milestone=False)
        for _ in range(many):
            event = next(reader, None)
            if event is None:
                reader = event_log.since(seen[-1] if seen else 0)
                event = next(reader, None)
            if event is not None:
                seen.append(event[0])
    seen += numbers_after(event_log, seen[-1] if seen else 0)
    assert seen == list(range(1, event_log.seq + 1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_costs_the_file_and_not_the_events(small_disk: Path) -> None:
    """They are in memory; once there is room again the file goes on with whole lines."""
    event_log = EventLog(small_disk / "event-log.jsonl", max_recent=50)
    while event_log.failing is None:
        event_log.add({"event": "x", "filling": "y" * 500}, milestone=False)
    last_on_disk = event_log.seq - 1
    for _ in range(5):
        event_log.add({"event": "x", "filling": "y" * 500})
    assert event_log.failing == "No space left on device"
    assert numbers_after(event_log, 0) == list(range(1, last_on_disk + 7))
    os.truncate(small_disk / "event-log.jsonl", 0)
    event_log.add({"event": "x"})
    assert event_log.failing is None
    (line,) = (small_disk / "event-log.jsonl").read_bytes().splitlines()
    assert decode(line)["seq"] == event_log.seq


def test_the_events_of_a_jobs_earlier_agents_are_replayed(tmp_path: Path) -> None:
    """Through a chain of them, another job in between, and damage; nothing of other jobs, and only what is no state of the node's."""
    path = tmp_path / "event-log.jsonl"

    def agent(job: str, *steps: int, again: bool = False) -> None:
        event_log = EventLog(path)
        event_log.begin_job(job)
        if again:
            event_log.add({"event": "replay", "events": replayed_events(path, job)}, milestone=False)
        event_log.add({"event": "worker.started", "generation": 1})
        for step in steps:
            event_log.add({"event": "steps", "generation": 1, "steps": [[step, 1.0, 0.1, 0.5]]}, milestone=False)

    def found(job: str) -> list[int]:
        return [event["steps"][0][0] for event in replayed_events(path, job)]

    assert replayed_events(path, "one") == []
    agent("one", 1, 2)
    agent("one", 3, again=True)
    agent("one", 4, again=True)
    assert found("one") == [1, 2, 3, 4]
    agent("two", 7)
    assert (found("one"), found("two"), found("three")) == ([1, 2, 3, 4], [7], [])
    with path.open("ab") as file:
        file.write(b'{"seq":9,"event":"replay","events":7}\n{"seq":9,"event":"steps","steps":[[8')
    assert found("two") == [7]
    assert [event["steps"][0][0] for event in replayed_events(path, "one", most=2)] == [3, 4]
    agent("two", 8)
    assert (found("one"), found("two")) == ([], [7, 8])
