"""The worker's connection to its agent: every message that matters is sent, and training never waits."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.protocol import Message, listen
from holdfast.runtime import agent_client
from holdfast.runtime.agent_client import QUEUE, AgentLink
from tests.mentions import mentions
from tests.runtime.agent_double import AgentDouble
from tests.runtime.ranks import ROOT
from tests.waiting import wait_until

Lines = Callable[..., AgentLink]


@pytest.fixture
def line_to() -> Iterator[Lines]:
    """Give lines that are hung up when the test ends."""
    made: list[AgentLink] = []

    def line_to(path: Path, **options: int) -> AgentLink:
        made.append(AgentLink(path, **options))
        return made[-1]

    yield line_to
    for line in made:
        line.mute()


@pytest.fixture
def deaf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentDouble]:
    """Give an agent that takes connections and does not read."""
    double = AgentDouble(tmp_path_factory.mktemp("a") / "s", reading=False)
    yield double
    double.close()


def test_every_message_arrives_unchanged(line_to: Lines, agent: AgentDouble) -> None:
    """The protocol, word for word; losses travel to the last bit, NaN too."""
    line = line_to(agent.path, rank=3, generation=5)
    line.mark("group", 0.25)
    line.resumed(8, Path("/c/step-00000008"))
    line.resumed(0, None)
    line.beat(9, 0.1 + 0.2, 0.5, 10, timing={"own": 0.4})
    line.beat(10, math.nan, 0.5, None)
    line.beat(10, None, 0.5, None, snapshot={"step": 9}, timing={})
    line.resumed(8, None, replica=True)
    line.section("evaluation", 60.0, begin=True)
    line.saved(10, Path("/c/step-00000010"), 0.1, 77)
    line.storage_error("checkpoint-torn", None, Path("/c"), "why")
    line.finished(10)
    agent.wait_for("finished")
    assert math.isnan(agent.received.pop(5)["loss"])
    assert agent.received == [
        {"t": "hello", "protocol": 1, "rank": 3, "generation": 5},
        {"t": "mark", "name": "group", "seconds": 0.25, "generation": 5},
        {"t": "resumed", "step": 8, "path": "/c/step-00000008", "generation": 5},
        {"t": "resumed", "step": 0, "path": None, "generation": 5},
        {"t": "beat", "step": 9, "loss": 0.1 + 0.2, "seconds": 0.5, "until": 10, "generation": 5, "timing": {"own": 0.4}},
        {"t": "beat", "step": 10, "loss": None, "seconds": 0.5, "until": None, "generation": 5, "snapshot": {"step": 9}},
        {"t": "resumed", "step": 8, "path": None, "generation": 5, "replica": True},
        {"t": "section", "name": "evaluation", "limit_s": 60.0, "begin": True},
        {"t": "saved", "step": 10, "path": "/c/step-00000010", "seconds": 0.1, "size": 77},
        {"t": "storage-error", "kind": "checkpoint-torn", "step": None, "path": "/c", "why": "why"},
        {"t": "finished", "step": 10},
    ]


def test_an_exception_is_sent_once_with_the_current_step(line_to: Lines, agent: AgentDouble) -> None:
    """The first exception is the one that counts."""
    line = line_to(agent.path)
    line.step = 4
    line.exception(ValueError("first"))
    line.exception(ValueError("second"))
    report = agent.wait_for("exception")
    assert [(one["type"], one["message"], one["step"]) for one in report] == [("ValueError", "first", 4)]


def test_without_an_agent_nothing_happens() -> None:
    """No variable, no socket, no thread; a checkpoint may be committed."""
    line = AgentLink.from_env({})
    threads = set(threading.enumerate())
    line.hello()
    line.beat(1, 1.0, 1.0, 1)
    line.exception(ValueError())
    line.finished(1)
    assert line.may_commit(1).ok
    assert (line.attached, set(threading.enumerate()) - threads) == (False, set())


def test_a_connection_that_fails_is_ignored(line_to: Lines, tmp_path: Path) -> None:
    """The agent does not listen (any more): training goes on, but commits nothing."""
    line = line_to(tmp_path / "nobody")
    line.beat(1, 1.0, 1.0, 1)
    assert line.may_commit(1).ok is False
    assert line.attached is False


def test_an_agent_that_does_not_read_blocks_nothing_and_loses_only_old_heartbeats(line_to: Lines, deaf: AgentDouble) -> None:
    """Ten thousand beats into a full line return at once; when the agent reads on, the newest beats and every other word are there."""
    line = line_to(deaf.path)
    line.section("long", None, begin=True)
    begin = time.process_time()
    for step in range(1, 10_001):
        line.beat(step, 0.5, 0.1, 10_000)
    line.section("long", None, begin=False)
    assert len(line._queue) <= QUEUE
    assert time.process_time() - begin < 5  # of computing; waiting for the agent would never end
    deaf.read_on()
    deaf.wait_for("section", 2)
    steps = [beat["step"] for beat in deaf.of("beat")]
    assert steps == sorted(steps)
    assert len(steps) < 10_000
    assert steps[-(QUEUE - 10) :] == list(range(10_001 - (QUEUE - 10), 10_001))


def test_queued_messages_are_sent_without_a_new_one(line_to: Lines, deaf: AgentDouble) -> None:
    """The begin of a section that did not fit into the socket arrives although no message follows."""
    line = line_to(deaf.path)
    for step in range(2000):
        line.beat(step, 0.5, 0.1, None)
    line.section("evaluation", 600, begin=True)
    deaf.read_on()
    deaf.wait_for("section", name="evaluation")
    wait_until(lambda: not any(thread.name == "holdfast-link" for thread in threading.enumerate()), seconds=60)


def test_an_agent_that_exits_is_ignored(line_to: Lines, agent: AgentDouble) -> None:
    """Beats after its end go nowhere, quietly."""
    line = line_to(agent.path)
    line.hello()
    agent.wait_for("hello")
    agent.vanish()
    for step in range(100):
        line.beat(step, 1.0, 1.0, None)
    line.finished(100)
    assert line.attached is False


def test_the_agent_gives_permission_to_commit(line_to: Lines, agent: AgentDouble) -> None:
    """Yes and no arrive with their reasons; beats in between do not get in the way."""
    line = line_to(agent.path)
    line.beat(1, 1.0, 1.0, None)
    assert (line.may_commit(1).ok, line.may_commit(2).ok) == (True, True)
    agent.leave = False
    refused = line.may_commit(3)
    assert refused.ok is False
    assert mentions(refused.why, "generation 2")


@pytest.mark.parametrize(("said", "expected"), [(None, None), (250, 250), (0, None), (-3, None), (True, None), ("7", None), (2.5, None)])
def test_a_new_checkpoint_interval_arrives_with_the_permission(line_to: Lines, agent: AgentDouble, said: Any, expected: int | None) -> None:
    """Anything but a positive number of steps is ignored."""
    agent.interval = said
    assert line_to(agent.path).may_commit(1).every == expected


def test_an_agent_that_does_not_answer_gives_no_permission(line_to: Lines, agent: AgentDouble) -> None:
    """The question has a limit in time, and an answer that comes too late belongs to no other question."""
    agent.silent = True
    line = line_to(agent.path)
    late = line.may_commit(1, seconds=0.05)
    assert (late.ok, "does not answer" in late.why) == (False, True)


def test_an_answer_that_came_while_the_worker_was_stopped_counts(
    line_to: Lines, agent: AgentDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that continues after a stop leaves `poll` without what has arrived, once the time of that call is over."""
    returned: list[str] = []

    class AfterAStop:
        """A poll whose first answer is that of a process that was stopped until its deadline."""

        def __init__(self) -> None:
            self._poll = select.poll()

        def register(self, *watched: Any) -> None:
            self._poll.register(*watched)

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            found = self._poll.poll(60_000)  # the answer has arrived
            if not returned:
                returned.append("nothing")
                return []
            return found

    line = line_to(agent.path)
    line.hello()
    agent.wait_for("hello")
    monkeypatch.setattr(agent_client, "select", SimpleNamespace(poll=AfterAStop, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT))
    assert line.may_commit(1, seconds=0.0).ok
    assert returned


@pytest.mark.parametrize("begun", [False, True], ids=["unread", "read"])
def test_an_answer_counts_that_its_receiver_handles_after_the_deadline(
    line_to: Lines, agent: AgentDouble, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    """After a stop of the process, the thread that reads may continue later than the one that waits."""
    line = line_to(agent.path)
    held, free = threading.Event(), threading.Event()

    def hold(_command: Message) -> None:
        held.set()
        assert free.wait(60)

    line.listen(hold)
    agent.wait_for("hello")
    command = {"do": "wait"}
    if begun:
        agent.with_answers = command
    else:
        agent.send(command)
        assert held.wait(60)
    is_receiving = line._is_receiving

    def look() -> bool:
        assert held.wait(60)
        late = is_receiving()
        free.set()
        return late

    monkeypatch.setattr(line, "_is_receiving", look)
    assert line.may_commit(1, seconds=0.0).ok
    assert free.is_set(), "the answer was handled before"


def test_an_agent_that_answers_garbage_gives_no_permission(line_to: Lines, tmp_path: Path) -> None:
    """What is not the protocol ends the line, not the training."""
    server = listen(tmp_path / "s")
    line = line_to(tmp_path / "s")
    line.hello()
    connection, _ = server.accept()
    connection.sendall(b"\xff\xfe not json\n")
    assert line.may_commit(1).ok is False
    connection.close()
    server.close()


def test_a_forked_child_does_not_send_for_its_parent(agent: AgentDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data loader's worker neither beats nor holds the line open: the agent sees the end with the parent."""
    script = (
        "import os, sys, time\n"
        "from holdfast.runtime.agent_client import link\n"
        "link().hello()\n"
        "if os.fork() == 0:\n"
        "    link().beat(1, 1.0, 1.0, None)\n"
        "    link().finished(1)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "sys.stdin.readline()\n"
        "link().finished(7)\n"
    )
    ended = threading.Event()
    closing = agent._listen

    def watch(connection: socket.socket) -> None:
        closing(connection)
        ended.set()

    monkeypatch.setattr(agent, "_listen", watch)
    environment = os.environ | agent.environment | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.wait(60) == 0
        assert ended.wait(60), "the child holds the line open"
        os.kill(child, 9)
    assert [message["t"] for message in agent.received] == ["hello", "finished"]
    assert agent.received[1]["step"] == 7


def test_the_connection_does_not_import_torch() -> None:
    """The starter of a worker uses it before there is torch, and `import holdfast` alone fetches nothing."""
    code = (
        "import sys, holdfast, holdfast.runtime.agent_client as l; print('torch' in sys.modules, 'numpy' in sys.modules, l.link().attached)"
    )
    completed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert completed.stdout.split() == ["False", "False", "False"]
