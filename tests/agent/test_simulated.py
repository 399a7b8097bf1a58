"""What benchmarks have simulated agents say is what real ones say: the same orders bring the same answers and events, field by field."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated.agent import REGROUPED
from benchmarks.simulated.nodes import SimulatedNodes
from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.protocol import Message, connect
from tests.agent.rig import CLIENT, ROOT, SECONDS, Node

GROUPED = (
    CLIENT
    + f"REGROUPED = json.loads({json.dumps(REGROUPED)!r})"
    + """
rank, fresh = int(os.environ["RANK"]), "HOLDFAST_FRESH" in os.environ
def train(step, **of):
    say(t="mark", name="group", seconds=0.1, **of)
    say(t="mark", name="load", seconds=0.1, **of)
    if of:
        say(t="regrouped", step=step - 1, **REGROUPED, **of)
    say(t="resumed", step=step - 1, path=None, **of)
    say(t="beat", step=step, seconds=0.1, loss=0.5, until=100, **of)
hello()
if not fresh:
    say(t="groups")
    train(1)
    if not rank:
        say(t="roles", roles=[[0, 1]], recordings="here", copies=[])
for line in incoming:
    message = json.loads(line)
    if message.get("do") == "abandon":
        say(t="broken", step=1, group="0", why="connection closed", generation=1)
    elif message.get("do") == "regroup":
        train(2, generation=message["generation"])
"""
)
"""A worker that says of its groups what the runtime says."""


class Talk:
    """A flow's talk with one agent, and all that it received."""

    def __init__(self, connected: Callable[[], Any]) -> None:
        self.event_queue, self.answers, self.events = EventQueue(), dict[str, Message](), list[Message]()
        self.channel = AgentClient("node", connected, self.event_queue, epoch=1, job="job")

    def send_command(self, verb: str, **facts: Any) -> None:
        """Give an order that has to be carried out."""
        self.answers[verb] = self.channel.send_command(verb, seconds=SECONDS, **facts)

    def wait(self, event: str, **facts: Any) -> Message:
        """Wait for an event."""
        while True:
            _, message = self.event_queue.get(timeout=SECONDS)
            self.events.append(message)
            if message["event"] == event and facts.items() <= message.items():
                return message

    def go_through(self, plan: Message, kill: Callable[[int], object]) -> None:
        """Start two ranks, lose one, go on with a fresh one in its place, and stop."""
        self.answers["about"] = self.channel.about()
        self.channel.attach(since=0)
        self.send_command("ping")
        self.send_command("prepare", **plan)
        self.send_command("port")
        places = {"WORLD_SIZE": "2", "HOLDFAST_GENERATION": "1"}
        workers = [{"rank": rank, "environment": {**places, "RANK": str(rank)}} for rank in (0, 1)]
        self.send_command("start", generation=1, membership={"node": [0, 1]}, first=0, workers=workers)
        pid = self.wait("worker.started", rank=1)["pid"]
        self.wait("worker.roles")
        self.wait("heartbeats")
        self.send_command("living")
        kill(pid)
        self.wait("worker.exited", rank=1, ordered=False)
        self.send_command("abandon", generation=1, lost=[1], kill=[])
        if not any(one["event"] == "worker.broken" for one in self.events):
            self.wait("worker.broken", rank=0)
        facts = {"world": 2, "incarnations": [[0, 0, 1], [1, 1, 2]], "changed": [1], "since": 1}
        fresh = {"RANK": "1", "HOLDFAST_FRESH": "1", "HOLDFAST_GENERATION": "2"}
        seats = [{"rank": 0, "from": "kept", "environment": {}}, {"rank": 1, "from": "fresh", "environment": fresh}]
        self.send_command("regroup", generation=2, membership={"node": [0, 1]}, first=0, facts=facts, workers=seats)
        stepped: set[int] = set()
        while stepped != {0, 1}:
            stepped.add(self.wait("worker.stepped", generation=2)["rank"])
        self.send_command("stop", generation=2, signal=int(signal.SIGKILL), grace=0.0)
        self.wait("workers.exited", generation=2)
        self.send_command("end")

    def shapes(self) -> dict[str, dict[str, set[str]]]:
        """Return for each verb and event the fields that were sent, and the types of their values."""
        found: dict[str, dict[str, set[str]]] = {}
        named = [*((f"answer to {verb}", one) for verb, one in self.answers.items()), *((one["event"], one) for one in self.events)]
        for name, message in named:
            ranks = list(message["ranks"].values()) if name == "heartbeats" else []
            for kind, one in [(name, message), *(("a rank of beats", rank) for rank in ranks)]:
                for field, value in one.items():
                    found.setdefault(kind, {}).setdefault(field, set()).add(type(value).__name__)
        return found


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Give one simulated node."""
    command = [sys.executable, "-m", "benchmarks.simulated.host", str(tmp_path), "1"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield SimulatedNodes("simulated", tmp_path, 1)
    finally:
        process.kill()
        process.communicate()


def test_a_simulated_agent_sends_what_a_real_one_sends(node: Node, simulated: SimulatedNodes) -> None:
    """Each answer and event has the same fields, of the same types where both have a value; so it cannot report what there is not."""
    plan = {"lease": 60.0, "warm": False, "watch": False, "beat": 0.25, "argv": [sys.executable, node.script(GROUPED)]}
    plan |= {
        "directory": str(node.work),
        "environment": {"PYTHONUNBUFFERED": "1"},
        "log_directory": str(node.logs),
        "python": "",
        "preload": [],
    }
    real = Talk(lambda: connect(node.folder / "agent.sock", seconds=SECONDS))
    with closing(real.channel):
        real.go_through({**plan}, lambda pid: os.kill(pid, signal.SIGKILL))
    (name,) = simulated.names()
    simulated.start_agent(name)
    played = Talk(lambda: simulated.connect(name))
    with closing(played.channel):
        played.go_through({**plan}, lambda _: simulated.ask(do="kill", nodes=[name], rank=1))
    theirs, ours = real.shapes(), played.shapes()
    assert ours.keys() <= theirs.keys()
    assert theirs.keys() - ours.keys() <= {"node.counter-increases", "node.fault", "notice.unknown"}
    for kind, fields in ours.items():
        assert fields.keys() == theirs[kind].keys(), kind
        for field, types in fields.items():
            known, theirs_known = types - {"NoneType"}, theirs[kind][field] - {"NoneType"}
            assert not known or not theirs_known or known & theirs_known, (kind, field, types, theirs[kind][field])
