"""Snapshots are on another node as soon as they are whole here, and whatever happens on the way leaves none that is broken."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.memstore.server.handler import RequestHandler
from holdfast.agent.memstore.server.replica_store import Rejected, ReplicaStore
from holdfast.agent.memstore.server.replicator import BURST_SECONDS, TailReader, TokenBucket
from holdfast.host.process import mark_of
from holdfast.memstore import shared_memory, store_folders
from holdfast.memstore.connection import DATA, FRAME, TAIL, MemstoreConnection, connect
from holdfast.memstore.reader import RemoteMemstore
from holdfast.memstore.shared_memory import PAGE, Snapshot
from tests.agent.memory_rig import SECONDS, TOKEN, MemoryNode, Writer, label_of, noise
from tests.agent.rig import Flow, Node
from tests.waiting import wait_until

MakeNode = Callable[..., MemoryNode]
BIG = 6 * 2**20 + 4321
SMALL = 2**18 + 4321
"""Written in no time: what it takes to be sent is the bandwidth's doing alone."""


def received(node: MemoryNode) -> int:
    """Return how many bytes of the replica that comes in are there."""
    progress = [0]
    for path in node.memstore.glob("copy-*.snap"):
        page = path.read_bytes()[:PAGE]
        if page[:7] == b"HFDRAFT":
            progress.append(shared_memory.progress_of(page))
    return max(progress)


def test_a_replica_grows_with_the_snapshot_and_is_complete_right_after_it(make: MakeNode) -> None:
    """Its bytes are there before the snapshot is; what is missing then is the tail."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer, data = Writer(here), noise(BIG)
    writer.begin(7, data)
    for end in (1, PAGE, 2**20, 5 * 2**20, BIG):
        writer.write(0, end)
        wait_until(lambda end=end: received(there) == end, seconds=SECONDS)  # type: ignore[misc]
        assert there.copies() == []
    label = writer.seal()
    there.keeps(7)
    assert there.copies() == [label]
    (path,) = shared_memory.labels(there.memstore)
    assert path.name == f"copy-{store_folders.key_of('here')}-00003.0.snap"
    with Snapshot(path) as copy:
        assert bytes(copy.data) == data
    writer.close()


def test_the_server_reports_which_step_is_complete_on_another_node(make: MakeNode) -> None:
    """For each rank the newest, as news of snapshots come."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer = Writer(here)
    for step in (7, 8):
        writer.snapshot(step, noise(5000, step))
        there.keeps(step)

        def is_replicated(step: int = step) -> bool:
            here.ring()
            return [one["ranks"] for one in here.events_named("replicas")][-1:] == [{"3": step}]

        wait_until(is_replicated, seconds=SECONDS)
    writer.close()


def test_the_two_newest_complete_ones_stay_while_the_next_is_written(make: MakeNode) -> None:
    """At every moment there is one to go back to, of a step that others have too."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer = Writer(here)
    for step in range(1, 9):
        writer.begin(step, noise(5000, step))
        writer.write(0, 5000)
        wait_until(lambda: received(there) == 5000, seconds=SECONDS)
        assert there.copied_steps() == [before for before in (step - 2, step - 1) if before > 0]
        writer.seal()
        there.keeps(step)
        wait_until(lambda step=step: there.copied_steps() == [*range(max(1, step - 2), step + 1)], seconds=SECONDS)  # type: ignore[misc]
    assert len(list(there.memstore.glob("copy-*"))) == 3
    writer.close()


def test_an_abandoned_draft_leaves_no_replica(make: MakeNode) -> None:
    """The worker died over it; the next one begins another, in this slot or in another one."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer = Writer(here)
    writer.begin(7, noise(BIG))
    writer.write(0, 2**20)
    wait_until(lambda: received(there) == 2**20, seconds=SECONDS)
    writer.close()
    second = Writer(here)
    second.slots[0], second.slots[1] = second.slots[1], second.slots[0]
    second.snapshot(6, noise(1000), lineage=2)
    there.keeps(6)
    wait_until(lambda: not second.slots[0].busy(), seconds=SECONDS)  # the server has seen that nothing more comes of the draft
    second.slots[0].begin(label_of(7, b"again", lineage=2))
    second.slots[0].discard()
    second.snapshot(8, noise(2000), lineage=2)
    there.keeps(8)
    assert there.copied_steps() == [6, 8]
    second.close()


def test_a_snapshot_that_is_completed_after_a_newer_one_was_begun_is_replicated(make: MakeNode) -> None:
    """So it looks to a server that reads one slot just before it is sealed, and the next one after that; then the worker dies."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer, newer = Writer(here), Writer(here)
    writer.slots, newer.slots = writer.slots[:1], newer.slots[1:]
    writer.begin(5, noise(1000))
    newer.begin(6, noise(BIG))
    newer.write(0, 2**20)
    wait_until(lambda: received(there) == 2**20, seconds=SECONDS)
    newer.close()
    writer.write(0, 1000)
    writer.seal()
    there.keeps(5)
    assert there.copied_steps() == [5]
    writer.close()


def test_a_slow_replica_node_skips_steps_and_has_complete_ones(make: MakeNode) -> None:
    """The snapshot that is sent stays until it is sent; the worker sees that and takes another slot."""
    here, there = make("here"), make("there")
    here.replicate(there, bandwidth=2 * SMALL)
    writer, seen, step = Writer(here), set[int](), 0
    until = time.monotonic() + SECONDS
    while len(seen) < 3 and time.monotonic() < until:
        step += 1
        writer.snapshot(step, noise(SMALL, step))
        there.verify()
        seen |= set(there.copied_steps())
        time.sleep(0.02)
    assert len(seen) >= 3
    assert len(seen) < step / 2
    assert writer.busy_seen
    there.keeps(step)
    writer.close()


def test_a_small_snapshot_does_not_wait_for_a_huge_one(make: MakeNode) -> None:
    """Ranks of one node share the bandwidth."""
    here, there = make("here"), make("there")
    huge, small = Writer(here, rank=3), Writer(here, rank=4)
    here.replicate(there, ranks=[3, 4], bandwidth=2**18)
    huge.snapshot(1, noise(2**25))
    wait_until(lambda: received(there) > 0, seconds=SECONDS)
    small.snapshot(1, noise(50_000))
    there.keeps(1, rank=4)
    assert there.copied_steps(rank=3) == []
    huge.close()
    small.close()


def test_no_more_bytes_are_sent_than_the_limit_allows() -> None:
    """Counted on a clock of the test's own: after each moment, of any beginning."""
    now, rate, taken = [0.0], 10_000_000, list[tuple[float, int]]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    bucket = TokenBucket(clock=lambda: now[0], sleep=sleep)
    bucket.limit(rate)
    for size in [1, 2**20, 5000, 2**20, 70_000] * 20:
        left = size
        while left:
            got = bucket.take(left)
            assert 0 < got <= left
            taken.append((now[0], got))
            left -= got
    for first in range(0, len(taken), 7):
        sent = 0
        for at, got in taken[first:]:
            sent += got
            assert sent <= (at - taken[first][0]) * rate + rate * BURST_SECONDS + 1
    bucket.limit(None)
    assert bucket.take(2**40) == 2**40


def test_what_does_not_fit_is_rejected_and_reported_once(make: MakeNode) -> None:
    """There is room for this node's own ranks first, for others' after that."""
    here, there = make("here"), make("there", limit=3 * BIG)
    own = Writer(there, rank=0)
    own.snapshot(1, noise(BIG // 2))
    here.replicate(there, ranks=[3, 4])
    big, small = Writer(here, rank=3), Writer(here, rank=4)
    for step in range(1, 5):
        big.snapshot(step, noise(2 * BIG, step))
        small.snapshot(step, noise(1000, step))
        there.keeps(step, rank=4)
    wait_until(lambda: there.events_named("memstore.full"), seconds=SECONDS)
    time.sleep(0.2)
    (event,) = there.events_named("memstore.full")
    assert "rank 3" in event["why"]
    assert there.copied_steps(rank=3) == []
    for writer in (own, big, small):
        writer.close()


def test_a_lost_replica_node_is_reported_once_and_so_is_its_return(make: MakeNode) -> None:
    """Not at once: one that is replaced within seconds is no news."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer = Writer(here)
    writer.snapshot(1, noise(1000))
    there.keeps(1)
    there.kill()
    there.listening.close()
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(there.address)  # nobody else gets the port, and who connects to it is refused
    for step in range(2, 8):
        writer.snapshot(step, noise(1000, step))
        time.sleep(0.1)
    wait_until(lambda: here.events_named("replica.lost"), seconds=SECONDS)
    back = MemoryNode("there")
    back.listening.close()
    held.listen(64)
    back.listening = there.listening = held
    try:
        back.begin()
        back.keeps(7)
        wait_until(lambda: here.events_named("replica.restored"), seconds=SECONDS)
        assert [len(here.events_named(event)) for event in ("replica.lost", "replica.restored")] == [1, 1]
        assert here.events_named("replica.lost")[0]["peer"] == f"{there.address[0]}:{there.address[1]}"
    finally:
        back.end()
    writer.close()


@pytest.mark.parametrize("victim", ["source", "home"])
def test_a_server_that_is_killed_in_the_middle_leaves_only_complete_replicas(make: MakeNode, victim: str) -> None:
    """Again and again, wherever it was; in the end all is well."""
    here, there = make("here"), make("there")
    writer = Writer(here)
    for step in range(1, 13):
        here.replicate(there)
        writer.begin(step, noise(BIG, step))
        writer.write(0, BIG * step // 14)
        if step % 3:
            wait_until(lambda: received(there) > 0, seconds=SECONDS)
        if step % 2:
            writer.write(0, BIG)
            writer.seal()
        (here if victim == "source" else there).kill()
        there.verify()
        (here if victim == "source" else there).begin()
    writer.snapshot(13, noise(BIG, 13))
    here.replicate(there)
    there.keeps(13)
    writer.close()


def test_what_is_on_its_way_is_what_was_sent(make: MakeNode) -> None:
    """When a server is killed the worker may begin its next snapshot in the file before the other node has received a byte of this one."""
    here, data = make("here"), noise(100_000)
    writer = Writer(here)
    writer.snapshot(1, data)
    slot = writer.slot
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname(), SECONDS) as mine:
        its, _ = listening.accept()
        with its:
            its.settimeout(SECONDS)
            with TailReader(slot.path) as reader:
                wait_until(lambda: reader.poll() and reader.complete, seconds=SECONDS)
                assert reader.send(mine, 0, len(data)) == len(data)
            wait_until(lambda: not slot.busy(), seconds=SECONDS)
            slot.begin(label_of(2, data))
            slot.data[:] = bytes(len(data))
            assert its.recv(len(data), socket.MSG_WAITALL) == data
    slot.discard()
    writer.close()


def test_a_file_that_is_fetched_is_not_overwritten_until_it_has_arrived(make: MakeNode) -> None:
    """A small one has left the server long before the rank that waits for it has read a byte."""
    here, data = make("here"), noise(1000)
    writer = Writer(here)
    label = writer.snapshot(1, data)
    with connect(here.address, TOKEN, seconds=SECONDS) as line:
        path = writer.slot.path
        assert line.request({"do": "get", "name": path.name, "step": 1, "lineage": 1, "digest": label.digest})["ok"]
        line.socket.settimeout(SECONDS)
        wait_until(lambda: len(line.socket.recv(label.file_size, socket.MSG_PEEK)) == label.file_size, seconds=SECONDS)
        assert writer.slot.busy()
        assert line.receive_exactly(label.file_size)[PAGE : PAGE + len(data)] == data
    wait_until(lambda: not writer.slot.busy(), seconds=SECONDS)
    writer.close()


class SourceThatDies(MemstoreConnection):
    """The home's end of a connection whose source dies once it has sent all: it never hears that the replica is complete."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Answer the label alone."""
        if self.answers:
            raise ConnectionResetError
        self.answers += 1
        super().send(message)

    answers = 0


def test_a_replica_whose_source_dies_before_it_hears_of_it_is_kept(make: MakeNode) -> None:
    """It is the one that the replica is for."""
    here, there = make("here"), make("there")
    data = noise(1000)
    writer = Writer(here)
    writer.snapshot(1, data)
    sealed = list[None]()
    handler = RequestHandler(ReplicaStore(there.memstore, 2**30), TOKEN, lambda *_, **__: None, lambda: sealed.append(None))
    mine, its = socket.socketpair()
    with (
        TailReader(writer.slot.path) as reader,
        SourceThatDies(mine, seconds=SECONDS) as home,
        MemstoreConnection(its, seconds=SECONDS) as end,
    ):
        label, tail = asdict(reader.label), reader.tail()
        its.sendall(FRAME.pack(DATA, len(data)) + data + FRAME.pack(TAIL, len(tail)))
        end.send(label)
        its.sendall(tail)
        handler._receive_replica(home, "here", 3, reader.label)
    assert sealed
    there.keeps(1)
    writer.close()


@pytest.mark.long
def test_a_worker_that_is_killed_in_the_middle_leaves_only_complete_replicas(make: MakeNode, tmp_path: Path) -> None:
    """At many places of its writing."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.agent.memory_rig import *\n"
        "class Place:\n"
        "    def __init__(self, path): self.memstore, self._bell = Path(path), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "    def ring(self): notification.notify(self.memstore, self._bell)\n"
        "writer, step = Writer(Place(sys.argv[1])), int(sys.argv[2])\n"
        "while True:\n    step += 1\n    data = noise(10 * 2**20, step)\n    writer.begin(step, data, lineage=step)\n"
        "    for end in range(2**20, 11 * 2**20, 2**20): writer.write(end - 2**20, end)\n"
        "    writer.seal()\n"
    )
    here, there = make("here"), make("there")
    here.replicate(there)
    for life in range(5):
        command = [sys.executable, str(script), str(here.memstore), str(1000 * life)]
        pid = os.posix_spawn(command[0], command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
        first = 1000 * life
        wait_until(lambda first=first: any(step > first for step in there.copied_steps()), seconds=SECONDS)  # type: ignore[misc]
        time.sleep(0.017 * life)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        there.verify()
        newest = max(label.step for path, label in shared_memory.labels(here.memstore).items())
        there.keeps(newest)


# -- what stays -----------------------------------------------------------------------------------------------------------


def test_what_a_lost_node_left_stays_until_nobody_can_need_it(make: MakeNode) -> None:
    """And is removed once two newer steps are whole of ranks that live."""
    here, there = make("here"), make("there")
    here.replicate(there)
    writer, own = Writer(here), Writer(there, rank=0)
    there.replicate(here, ranks=[0])
    writer.snapshot(5, noise(1000))
    there.keeps(5)
    here.kill()
    own.snapshot(5, noise(1000))
    replica_store = ReplicaStore(there.memstore, 2**30)
    assert replica_store.tidy(frozenset({0})) == []
    own.snapshot(6, noise(1000), lineage=2)
    assert replica_store.tidy(frozenset({0})) == []
    own.snapshot(7, noise(1000), lineage=2)
    assert [name.split(".")[0] for name in replica_store.tidy(frozenset({0}))] == [f"copy-{store_folders.key_of('here')}-00003"]
    assert there.copies() == []
    writer.close()
    own.close()


def test_files_of_a_rank_that_moved_away_are_removed(make: MakeNode) -> None:
    """Once the ranks that are here are two steps further."""
    here = make("here")
    moved, stays = Writer(here, rank=3), Writer(here, rank=4)
    moved.snapshot(5, noise(1000))
    stays.snapshot(5, noise(1000))
    replica_store = ReplicaStore(here.memstore, 2**30)
    for step in (6, 7):
        assert replica_store.tidy(frozenset({4})) == []
        stays.snapshot(step, noise(1000))
    assert replica_store.tidy(frozenset({3, 4})) == []
    assert {name[:10] for name in replica_store.tidy(frozenset({4}))} == {"rank-00003"}
    moved.close()
    stays.close()


def test_one_replica_of_a_rank_comes_in_at_a_time_for_each_free_slot(make: MakeNode) -> None:
    """A connection that hangs does not cost what is whole."""
    there = make("there")
    replica_store = ReplicaStore(there.memstore, 2**30)
    open_slots = [replica_store.open(store_folders.key_of("here"), 3, label_of(step, b"12345")) for step in (1, 2, 3)]
    with pytest.raises(Rejected):
        replica_store.open(store_folders.key_of("here"), 3, label_of(4, b"12345"))
    for slot in open_slots:
        replica_store.close(slot, sealed=False)
    replica_store.close(replica_store.open(store_folders.key_of("here"), 3, label_of(5, b"12345")), sealed=False)


# -- with agents ----------------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.agent.memory_rig import *
class Place:
    memstore = Path(os.environ["HOLDFAST_MEMSTORE"])
    _bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    def ring(self): notification.notify(self.memstore, self._bell)
writer = Writer(Place(), rank=int(os.environ["RANK"]))
step = 0
while True:
    step += 1
    writer.snapshot(step, noise(100_000, step))
    time.sleep(0.05)
"""


def test_agents_have_their_nodes_keep_each_others_snapshots(tmp_path: Path) -> None:
    """Two real agents; a server that is killed comes back on its port, and the agent's end ends it."""
    nodes = [Node(tmp_path / name) for name in ("a", "b")]
    flows: list[Flow] = []
    try:
        ports = []
        for rank, node in enumerate(nodes):
            flow = node.begin().flow().attach(0)
            flows.append(flow)
            script = node.script(WORKER.format(root=str(Path(__file__).parents[2])))
            answer = flow.prepare(
                node,
                [sys.executable, script],
                environment={"HOLDFAST_TOKEN": TOKEN},
                memory={"address": "127.0.0.1", "limit": None},
            )
            ports.append(answer["memory"]["port"])
            flow.start(1, (rank,))
        for flow, port in zip(flows, reversed(ports), strict=True):
            flow.ok("replicate", to=[["127.0.0.1", port]], bandwidth=None)
            assert flow.ok("about", protocol=1)["memory"]["to"] == [["127.0.0.1", port]]

        def copies(port: int, rank: int) -> list[int]:
            return [
                label.step
                for name, label in RemoteMemstore(("127.0.0.1", port), TOKEN, SECONDS).labels().items()
                if name.startswith("copy") and label.rank == rank
            ]

        wait_until(lambda: len(copies(ports[0], 1)) >= 2 and len(copies(ports[1], 0)) >= 2, seconds=SECONDS)
        for rank, flow in enumerate(flows):  # a controller learns of it with the beats

            def known(flow: Flow = flow, rank: str = str(rank)) -> bool:
                return any((one["ranks"][rank]["replica"] or 0) >= 2 for one in flow.heartbeats)

            flow.until(known, "a word on replicas")
        server = servers_of(nodes[1])[0]
        assert os.sched_getscheduler(server) == os.SCHED_IDLE
        assert TOKEN.encode() not in Path(f"/proc/{server}/cmdline").read_bytes() + Path(f"/proc/{server}/environ").read_bytes()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: servers_of(nodes[1]) not in ([], [server]), seconds=SECONDS)
        newest = max(copies(ports[1], 0))
        wait_until(lambda: max(copies(ports[1], 0)) > newest + 3, seconds=SECONDS)
        assert not [one for one in flows[0].events if one["event"].startswith("replica")]
        flows[0].stop(1)  # what is there stays then
        flows[1].stop(1)
        name, label = max(RemoteMemstore(("127.0.0.1", ports[1]), TOKEN, SECONDS).labels().items(), key=lambda item: item[1].time)
        RemoteMemstore(("127.0.0.1", ports[1]), TOKEN).fetch(name, label, tmp_path / "got.snap")
        os.kill(nodes[0].agent, signal.SIGKILL)
        nodes[0].wait_until_empty()
    finally:
        for flow in flows:
            flow.socket.close()
        for node in nodes:
            node.end()


def servers_of(node: Node) -> list[int]:
    """Return the memory servers of a node."""
    found = []
    for pid in node.remains():
        with suppress(OSError):  # it has ended meanwhile
            if b"holdfast.agent.memstore.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_an_agent_that_comes_after_one_that_was_killed_serves_on_the_same_port(new_node: Node) -> None:
    """Workers on other nodes know no other."""
    ports = []
    node = new_node
    for _ in range(2):
        with node.begin().flow() as flow:
            answer = flow.prepare(node, ["true"], environment={"HOLDFAST_TOKEN": TOKEN}, memory={"address": "127.0.0.1", "limit": None})
            ports.append(answer["memory"]["port"])
            assert RemoteMemstore(("127.0.0.1", ports[-1]), TOKEN, SECONDS).labels() == {}
            os.kill(node.agent, signal.SIGKILL)
        node.wait_until_empty()
        node.ended()
    assert ports[0] == ports[1]
    assert store_folders.memstore_of(mark_of(node.folder), "job").exists()


def test_an_address_that_is_not_the_nodes_is_reported_and_nothing_is_served(node: Node, flow: Flow) -> None:
    """Training goes on, and so do snapshots."""
    answer = flow.prepare(node, ["true"], environment={"HOLDFAST_TOKEN": TOKEN}, memory={"address": "127.0.0.1", "limit": None})
    assert answer["memory"]["port"]
    flow.ok("prepare", **{**_plan(node), "memory": {"address": "203.0.113.7", "limit": None}})
    assert "203.0.113.7" in flow.wait("memstore.unavailable", what="server")["why"]
    assert flow.ok("about", protocol=1)["memory"]["port"] is None
    assert not flow.order("replicate", to=[], bandwidth=None)["ok"]


def _plan(node: Node) -> dict[str, object]:
    environment = {"HOLDFAST_TOKEN": TOKEN}
    facts = {"lease": 60.0, "warm": False, "python": sys.executable, "preload": [], "argv": ["true"], "directory": str(node.work)}
    return {**facts, "environment": environment, "log_directory": str(node.logs)}
