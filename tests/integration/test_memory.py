"""Snapshots in the nodes' memory, with a flow, its agents and their servers: replicas follow the job's nodes, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from holdfast.cli.job_view import view_job
from holdfast.history import queries
from holdfast.host.process import mark_of
from holdfast.memstore import shared_memory, store_folders
from holdfast.memstore.reader import RemoteMemstore
from holdfast.memstore.shared_memory import Label
from tests.integration.stage import ENDLESS, Play, Stage
from tests.mentions import mentions
from tests.waiting import wait_until

TWO = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1}
FIRST = """
import json, socket, types
from pathlib import Path
from holdfast.memstore import notification
from tests.agent.memory_rig import Writer, noise
place = types.SimpleNamespace(memstore=Path(os.environ["HOLDFAST_MEMSTORE"]))
bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
place.ring = lambda: notification.notify(place.memstore, bell)
os.writer = Writer(place, rank=rank)
print("servers", os.environ["HOLDFAST_MEMORY_SERVERS"], flush=True)
print("token", os.environ["HOLDFAST_TOKEN"], flush=True)
"""
EACH = "sys.modules['os'].writer.snapshot(step, bytes(100_000), lineage=generation)"


def kept(stage: Stage, play: Play, node: str) -> dict[str, Label]:
    """Return the snapshots in a node's memory store, by file."""
    place = store_folders.memstore_of(mark_of(stage.nodes.folder(node)), play.job.id)
    return {path.name: label for path, label in shared_memory.labels(place).items()}


def keeps(play: Play, home: str, source: str, *, rank: int, lineage: int) -> bool:
    """Return whether *home* has two whole replicas of a rank of *source* that belong to a generation."""
    stage = play.stage
    sign = f"copy-{store_folders.key_of(mark_of(stage.nodes.folder(source)))}-{rank:05}."
    return sum(name.startswith(sign) and label.lineage == lineage for name, label in kept(stage, play, home).items()) >= 2


def copied(stage: Stage, play: Play, node: str) -> int:
    """Return the newest step of which a node has a replica."""
    return max(label.step for name, label in kept(stage, play, node).items() if name.startswith("copy-"))


def homes(play: Play) -> list[str]:
    """Return the nodes of ranks 0 and 1, and then those without a rank."""
    held = {rank: placed.node for rank, placed in play.chaos.ranks().items()}
    return [held[0], held[1], *(node for node in play.stage.nodes.names() if node not in held.values())]


def printed(stage: Stage, play: Play, word: str, rank: int = 0) -> str:
    """Return what a worker printed last after *word*."""
    log = Path(stage.home / "jobs" / play.name / "logs" / f"rank-{rank}.log").read_text()
    return log.rsplit(f"{word} ", 1)[1].splitlines()[0]


@pytest.mark.long  # of agents alone: tests/agent/test_replicas.py
def test_replicas_follow_the_jobs_nodes(stage: Stage) -> None:
    """Each of two keeps the other's; after a power cut the spare keeps, and is kept; workers know of their own node and the spare."""
    play = stage.play("memory", args=[*ENDLESS, "--first", FIRST, "--each", EACH], **TWO)
    play.steps_to(3)
    first, second, spare = homes(play)
    wait_until(
        lambda: keeps(play, first, second, rank=1, lineage=1) and keeps(play, second, first, rank=0, lineage=1),
        seconds=60,
        explain=play.log,
    )
    servers = {node: tuple(address) for node, address in json.loads(printed(stage, play, "servers")).items()}
    assert sorted(servers) == sorted([first, spare])
    token = printed(stage, play, "token")
    wait_until(
        lambda: set(RemoteMemstore(servers[first], token).labels()) == set(kept(stage, play, first)), seconds=60, explain=play.log
    )  # one at a time is new
    assert RemoteMemstore(servers[spare], printed(stage, play, "token")).labels() == {}
    place = store_folders.memstore_of(mark_of(stage.nodes.folder(second)), play.job.id)
    play.chaos.power_off(1)
    assert not place.exists()
    wait_until(
        lambda: keeps(play, first, spare, rank=1, lineage=2) and keeps(play, spare, first, rank=0, lineage=2),
        seconds=60,
        explain=play.log,
    )
    assert not place.exists()
    os.kill(play.process.pid, signal.SIGTERM)
    play.ends()
    assert stage.kept() == []


def test_memory_outlives_an_agent_and_a_flow(stage: Stage) -> None:
    """A new agent of the node finds the memory store and serves it where the old one did; a new flow leaves the homes as they are."""
    play = stage.play("again-with-memory", args=[*ENDLESS, "--first", FIRST, "--each", EACH], nnodes=2, nproc_per_node=1)
    play.steps_to(3)
    first, second, *_ = homes(play)
    wait_until(lambda: keeps(play, first, second, rank=1, lineage=1), seconds=60, explain=play.log)
    before = printed(stage, play, "servers")
    play.chaos.kill_agent(second)
    wait_until(
        lambda: keeps(play, first, second, rank=1, lineage=2) and keeps(play, second, first, rank=0, lineage=2),
        seconds=60,
        explain=play.log,
    )
    assert printed(stage, play, "servers") == before
    play.dies()
    again = stage.again("again-with-memory", play.spec)
    reattached = lambda: any("reattached" in remark.text for remark in queries.job_events(stage.history, play.job.id))  # noqa: E731
    wait_until(reattached, seconds=60, explain=again.log)
    newest = copied(stage, play, first)
    wait_until(lambda: copied(stage, play, first) > newest + 20, seconds=60, explain=again.log)
    os.kill(again.process.pid, signal.SIGTERM)
    again.ends()
    assert stage.kept() == [], again.log()
    assert [fault.kind for fault in queries.faults(stage.history, play.job.id) if fault.kind in {"replica-lost", "memory-none"}] == []


def test_a_node_without_memory_reports_and_trains_on(stage: Stage) -> None:
    """Once, in the history."""
    (stage.home / "file").touch()
    stage.environment["HOLDFAST_MEMSTORE_ROOT"] = str(stage.home / "file")
    play = stage.play("none", args=["--steps", "10"], nnodes=2, nproc_per_node=1)
    assert play.ends() == 0, play.log()
    faults = queries.faults(stage.history, play.job.id)
    kinds_by_node = sorted((fault.kind, fault.node) for fault in faults if fault.kind.startswith(("memory-", "replica-")))
    assert kinds_by_node == [("memory-none", "node-0"), ("memory-none", "node-1")]
    view = view_job(stage.history, play.job)
    assert view.snapshots is None
    assert view.no_snapshots.startswith(("none: memory-none on node-0 ", "none: memory-none on node-1 ")), "the one that reported first"
    assert sum(mentions(event.text, "no snapshots") for event in queries.job_events(stage.history, play.job.id)) == 1
