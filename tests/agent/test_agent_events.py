"""Events reach every flow that asks, in order and once, however slowly it reads and whenever it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol import PROTOCOL, LineBuffer, Message, encode
from tests.agent.rig import CLIENT, Flow, Node

TALKER = (
    CLIENT
    + """
hello()
for step in range(1, int(sys.argv[1]) + 1):
    say(t="saved", step=step, path="/" + "x" * 4000, seconds=0.1, size=step)
say(t="finished", step=step)
incoming.read()
"""
)
"""A worker that has much to report: events of 4 KiB that no journal in memory holds all of."""


def numbers(flow: Flow) -> list[int]:
    """Return the sequence numbers that a controller received."""
    return [event["seq"] for event in flow.events]


def test_attaching_since_a_number_sends_exactly_the_missed_events(node: Node, flow: Flow) -> None:
    """Whatever the number, and whatever comes after goes on without a gap."""
    flow.prepare(node, [sys.executable, node.script(TALKER), "50"])
    flow.start(1)
    last = flow.wait("finished")["seq"]
    for since in (0, 1, last // 2, last - 1, last, last + 50):
        with node.flow().attach(since) as late:
            late.ok("ping")
            assert numbers(late) == list(range(min(since, last) + 1, last + 1))
    with node.flow().attach(last) as late:
        flow.stop(1)
        late.wait("workers.exited")
        assert numbers(late) == list(range(last + 1, last + 1 + len(late.events)))


def test_an_answer_comes_after_the_replayed_events(node: Node, flow: Flow) -> None:
    """A flow that reattaches to a job asks a second time to know that it has received everything."""
    flow.prepare(node, [sys.executable, node.script(TALKER), "2000"])
    flow.start(1)
    last = flow.wait("finished")["seq"]
    with node.flow() as late:
        orders = [{"id": 1, "do": "attach", "since": 0, "protocol": PROTOCOL, "epoch": 1}, {"id": 2, "do": "ping", "epoch": 1}]
        late.raw(b"".join(map(encode, orders)))
        late.until(lambda: late.answers.get(1))
        late.until(lambda: late.answers.get(2))
        assert numbers(late) == list(range(1, last + 1))


def test_a_reader_that_stalls_misses_nothing_and_costs_no_memory(node: Node, flow: Flow) -> None:
    """It gets its events from the journal as it reads on; others get them at once."""
    with node.flow().attach(0) as slow:
        before = _resident(node.agent)
        flow.prepare(node, [sys.executable, node.script(TALKER), "8000"])
        flow.start(1)
        last = flow.wait("finished")["seq"]
        assert _resident(node.agent) - before < 3 * (16 << 20), "4096 events of 4 KiB are kept in memory, and as many milestones at most"
        flow.ok("ping")
        slow.wait("finished")
        assert numbers(slow) == list(range(1, last + 1))
        flow.stop(1)
        assert slow.exited()["seq"] == last + 1


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_reader_that_reconnects_gets_each_event_once(node: Node, flow: Flow) -> None:
    """It attaches again after the last event it has read whole, as often as its connection ends."""
    flow.prepare(node, [sys.executable, node.script(TALKER), "3000"])
    flow.start(1)
    seen: list[int] = []
    while not any(event["event"] == "finished" for event in flow.events):
        with node.flow().attach(seen[-1] if seen else 0) as reader:
            reader.receive(0.05)
            seen += numbers(reader)
        flow.receive(0.01)
    with node.flow().attach(seen[-1]) as reader:
        reader.ok("ping")
        seen += numbers(reader)
    assert seen == list(range(1, flow.wait("finished")["seq"] + 1))


def test_heartbeats_skip_a_reader_that_is_behind(node: Node, flow: Flow) -> None:
    """An old beat is worth nothing: they neither pile up nor hold events back."""
    flow.prepare(node, [sys.executable, node.script(CLIENT + "hello(); incoming.read()")])
    flow.start(1)
    flow.until(lambda: len(flow.heartbeats) > 2)
    beat = flow.heartbeats[-1]["ranks"]["0"]
    assert beat["process"] in {"R", "S"}
    assert beat["pid"] == flow.pid()
    assert (beat["step"], beat["section"], beat["managed"]) == (None, None, False)


def test_attaching_again_on_the_same_connection_starts_over(node: Node, flow: Flow) -> None:
    """There is one position a connection."""
    flow.prepare(node, [sys.executable, "-c", ""])
    flow.start(1)
    flow.exited()
    count = len(flow.events)
    flow.attach(0).ok("ping")
    assert numbers(flow) == [*range(1, count + 1), *range(1, count + 1)]


@pytest.fixture
def on_a_full_disk(tmp_path: Path) -> Iterator[Node]:
    """Give a node whose folder lies on a disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False).returncode:
        pytest.skip("only root mounts a disk")
    node = Node(tmp_path, "disk/node")
    node.log = tmp_path / "agent.log"
    yield node.begin()
    node.end()
    subprocess.run(["umount", "-l", disk], check=True)


def test_on_a_full_disk_events_keep_flowing(on_a_full_disk: Node) -> None:
    """The journal stays behind; the workers and their flow do not."""
    node = on_a_full_disk
    with node.flow().attach(0) as flow:
        flow.prepare(node, [sys.executable, node.script(TALKER), "200"])
        flow.start(1)
        last = flow.wait("finished")["seq"]
        flow.stop(1)
        with node.flow().attach(0) as late:
            late.wait("workers.exited")
            assert numbers(late) == list(range(1, late.events[-1]["seq"] + 1))
            assert late.events[-1]["seq"] > last
        flow.start(2)
        flow.pid(generation=2)
        flow.stop(2)
    assert "event-log.failing why=No space left on device" in node.log.read_text()


def test_the_event_log_on_disk_is_what_was_sent(node: Node, flow: Flow) -> None:
    """It is there for people when agent and flow are gone."""
    flow.prepare(node, [sys.executable, "-c", ""])
    flow.start(1)
    flow.exited()
    first, *stored = list[Message](LineBuffer().feed((node.folder / "event-log.jsonl").read_bytes()))
    assert (first, stored) == ({"job": "job"}, flow.events)
