"""Listing the memory of nodes that have no rank: a server that is slow to answer is asked again where its snapshots are needed."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.runtime.snapshots import restore
from holdfast.runtime.snapshots.restore import SnapshotSource
from holdfast.runtime.snapshots.restore_planner import SnapshotRef
from tests.agent.memory_rig import TOKEN, MemoryNode, Writer, noise

STEP = 7


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    """Return a node that holds a snapshot of rank 3."""
    one = MemoryNode("busy", token=TOKEN).begin()
    writer = Writer(one)
    writer.snapshot(STEP, noise(1000))
    yield one
    writer.close()
    one.end()


def listed(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch, *, suffices: Callable[[set[SnapshotRef]], bool]
) -> tuple[set[SnapshotRef], list[list[str]]]:
    """List the memory of *node*, whose server is stopped until the first answers are exchanged; return also who was silent, by try."""
    monkeypatch.setattr(restore, "LIST_SECONDS", (0.2, 60.0))
    source = SnapshotSource(None, "here", {node.name: node.address}, TOKEN)
    silent: list[list[str]] = []
    assert node.process is not None
    process = node.process

    def gather(found: dict[str, list[str]]) -> list[dict[str, list[str]]]:
        silent.append(found["silent"])
        process.send_signal(signal.SIGCONT)
        return [found]

    process.send_signal(signal.SIGSTOP)
    return source.merge_facts([source.facts(4)], 4, lowest=True, gather=gather, suffices=suffices), silent


def test_a_silent_server_is_asked_again_where_its_snapshots_are_needed(node: MemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """One second of a busy machine must not cost the state in its memory."""
    found, silent = listed(node, monkeypatch, suffices=bool)
    assert silent == [["busy"], []]
    assert {(one.node, one.step, one.rank) for one in found} == {("busy", STEP, 3)}


def test_a_silent_server_is_not_waited_for_where_the_rest_suffices(node: MemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivors have everything."""
    found, silent = listed(node, monkeypatch, suffices=lambda _found: True)
    assert silent == [["busy"]]
    assert found == set()


def test_all_servers_are_asked_at_the_same_time(node: MemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many silent servers take no longer than one, and do not keep the answer of another one away."""
    monkeypatch.setattr(restore, "LIST_SECONDS", (60.0,))
    together: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as nobody:

        def serve() -> None:
            """Say nothing until all have come; then hang up on all."""
            while len(together) < 20:
                together.append(nobody.accept()[0])
            for one in together:
                one.close()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        servers = {node.name: node.address, **{f"silent-{number}": nobody.getsockname() for number in range(20)}}
        source = SnapshotSource(None, "here", servers, TOKEN)
        found = source.merge_facts([source.facts(4)], 4, lowest=True, gather=lambda one: [one], suffices=bool)
        assert {one.node for one in found} == {"busy"}
        assert len(together) == 20, "one after the other: the second came when the first had been given up"
        serving.join(60)
