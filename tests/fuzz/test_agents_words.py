"""What agents send a controller: whatever it is, the controller goes on, and no node speaks for the ranks of another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.reactor import EventQueue
from holdfast.control.agents.schema import answer_error
from holdfast.control.checkpoints.final_checkpoint import NodeSnapshots
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.event_table import EVENTS
from holdfast.errors import CommandRejected
from holdfast.history import queries
from holdfast.protocol import decode, encode
from tests.control.bare_controller import bare_controller
from tests.fuzz.examples import ANYTHING, SOCKETS
from tests.mentions import mentions

Message = dict[str, Any]
MEMBERSHIP: Final = {"a": [0], "b": [1]}
NAMES: Final = sorted(EVENTS)
BEAT: Final[Message] = {
    "step": 5, "age": 0.1, "section": None, "section_limit": None, "managed": True, "process": "S", "wait": "", "output_age": 0.3,
    "snapshot": {"step": 4}, "step_timings": [[1, 0.1, 0.1, 0.0]], "checks": [{"step": 5, "digest": "d", "shard": "p"}], "replica": None,
}  # fmt: skip
FACTS: Final[Message] = {
    "at": 5.0, "generation": 1, "rank": 0, "id": 0, "pid": 7, "step": 5, "until": 9, "code": None, "signal": 9, "ended": 5.0,
    "seconds": 0.5, "size": 10, "why": "w", "path": "/p", "name": "n", "kind": "checkpoint-damaged", "group": "g", "output": "",
    "oom": None, "oom_blind": None, "finished": False, "ordered": False, "raised": None, "errno": 5, "loss": 0.5,
    "steps": [[5, 5.0, 0.1, 0.5, 256, None]], "ranks": {"0": BEAT}, "said": {}, "events": [], "roles": [[0, 1]], "copies": [],
    "seen_at": 5.0, "part": "p", "quote": "q", "source": "s", "over": 1, "counter_increases": {},
    "for_generation": 2, "peer": "h:9", "on": [0], "recordings": "/t", "heartbeat": False, "replica": False, "grouped": True, "calls": 1,
    "level": "managed-groups", "text": "t",
}  # fmt: skip
"""All that any event carries, as an agent may say it."""
ABOUT: Final[Message] = {
    "agent": "x", "job": None, "generation": 1, "since": 0, "membership": MEMBERSHIP, "workers": {"0": 7}, "grouped": [0],
    "hot_spares": {"3": {"role": 0, "ready": True}}, "roles": {"roles": [[0, 1]]}, "memory": {"port": 9, "to": [["h", 9]]},
}  # fmt: skip


@some.composite
def spoiled(draw: some.DrawFn, whole: Message) -> Message:
    """Draw *whole* with some of its fields missing, or holding something else, at any depth."""
    reply = dict(whole)
    for name in draw(some.lists(some.sampled_from(sorted(reply)), max_size=3)):
        match draw(some.sampled_from(("out", "other", "within"))):
            case "out":
                reply.pop(name, None)
            case "within" if isinstance(reply.get(name), dict) and reply[name]:
                reply[name] = draw(spoiled(reply[name]))
            case _:
                reply[name] = draw(ANYTHING)
    return reply


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobController]:
    """Give a job of two ranks on two nodes, in its first generation; nothing of it runs."""
    with bare_controller(tmp_path_factory.mktemp("run"), MEMBERSHIP) as made:
        yield made


def receive(run: JobController, *messages: tuple[str, Message]) -> None:
    """Have agents say something, and the flow take it in."""
    for one in messages:
        run.agents.event_queue.put(one)
    run.pump(0.0)


@SOCKETS
@given(name=some.sampled_from(NAMES), facts=spoiled(FACTS))
@example(name="worker.hello", facts={"rank": 999, "at": 1.0})
@example(name="worker.exited", facts={**FACTS, "signal": "nine"})
@example(name="worker.exited", facts={**FACTS, "output": None})
@example(name="worker.raised", facts={**FACTS, "raised": {"type": "E", "message": "m"}})
@example(name="worker.regrouped", facts={**FACTS, "seconds": {"meet": 0.1}})
@example(name="steps", facts={"generation": 1, "steps": [[5]]})
@example(name="worker.stepped", facts={**FACTS, "step": 2**70})
def test_whatever_an_agent_sends_the_controller_can_decide(run: JobController, name: str, facts: Message) -> None:
    """What was believed can be explained, and goes into the history."""
    receive(run, ("a", {"event": name, **facts}))
    run.faults.all()
    run.checkpoints.snapshots.poll(run.generations.state, 5.0, training=True)
    run.generations.begin(1, dict(MEMBERSHIP), rank_table=run.generations.rank_table)


@SOCKETS
@given(name=some.sampled_from(NAMES), facts=spoiled(FACTS))
def test_no_node_speaks_for_the_ranks_of_another(run: JobController, name: str, facts: Message) -> None:
    """Beats, ends and exceptions of a rank are believed from its own agent alone."""
    before = repr(run.generations.state.ranks[1]), list(run.generations.state.evidence)
    if name.startswith("worker."):
        receive(run, ("a", {"event": name, **facts, "rank": 1}), ("a", {"event": "heartbeats", "generation": 1, "ranks": {"1": BEAT}}))
        assert (repr(run.generations.state.ranks[1]), run.generations.state.evidence) == before
        run.generations.begin(1, dict(MEMBERSHIP), rank_table=run.generations.rank_table)


def test_an_agent_that_is_reached_late_and_knows_of_an_older_generation_has_the_recovery_decided_anew(run: JobController) -> None:
    """It was presumed to be in the present one, of which the flow before did not live to record it."""
    run.generations.begin(1, dict(MEMBERSHIP), rank_table=run.generations.rank_table)
    run.generations.state.unseen = {1}
    run.agents._late.put(("b", {**ABOUT, "generation": 1}))
    run._publish_findings()
    assert (run.faults.acting(), run.generations.state.unseen) == ([], set())
    run.agents._late.put(("b", {**ABOUT, "generation": 0}))
    run._publish_findings()
    assert [one.kind for one in run.faults.acting()] == ["recovery-cut-short"]
    run.generations.begin(1, dict(MEMBERSHIP), rank_table=run.generations.rank_table)


def test_invalid_messages_are_reported_once_and_others_read(run: JobController) -> None:
    """A remark names the node; the history took in all that was believed."""
    for rank in ({}, {"rank": "1"}, {"rank": 1}):
        receive(run, ("b", {"event": "worker.hello", "generation": 1, **rank}))
    assert run.generations.state.ranks[1].hello
    assert run.recorder.flush(10.0)
    assert len([one for one in queries.job_events(run.history, run.job.id) if mentions(one.text, "agent of b", "invalid event")]) == 1


@SOCKETS
@given(reply=spoiled(ABOUT))
def test_what_an_agent_says_of_itself_is_used_only_if_it_can_be(reply: Message) -> None:
    """A flow that reattaches to a job reads these fields, of all agents together."""
    assert answer_error("about", ABOUT) == ""
    if not answer_error("about", reply):
        assert max(reply["generation"], reply["since"]) >= 0
        assert all(int(number) >= 0 and one.get("role") is not str for number, one in reply["hot_spares"].items())
        assert sum(rank for ranks in reply["membership"].values() for rank in ranks) >= 0
        assert all(len(tuple(address)) == 2 for address in (reply.get("memory") or {}).get("to") or ())


ANSWERED: Final[dict[str, Message]] = {
    "attach": {"agent": "x", "since": 4},
    "prepare": {"warm": True, "memory": {"port": 9, "to": [["h", 9]]}},
    "port": {"port": 9},
    "stored": {"snapshots": [{"name": "n", "rank": 0, "world": 2, "step": 5, "lineage": 1}]},
    "living": {"generation": 1, "ranks": [0]},
    "token": {"token": "t"},
    "outbox-read": {"records": [{"table": "step"}], "next": 7},
}
"""What an honest agent answers to the orders of whose answers a flow reads more than that they were carried out."""
READ: Final[dict[str, Callable[[Message], object]]] = {
    "attach": lambda reply: (reply["agent"], int(reply["since"])),
    "prepare": lambda reply: int((reply.get("memory") or {}).get("port") or 0),
    "port": lambda reply: int(reply["port"]),
    "stored": lambda reply: [
        NodeSnapshots(node="a", **{name: one[name] for name in ANSWERED["stored"]["snapshots"][0]}) for one in reply["snapshots"]
    ],
    "living": lambda reply: {rank for rank in reply["ranks"] if reply["generation"] == 1},
    "token": lambda reply: str(reply["token"]),
    "outbox-read": lambda reply: [[one.get("table") for one in reply["records"]], (reply["next"] or 0) > 0],
}
"""How a flow reads them."""


@pytest.fixture(scope="module")
def agent() -> Iterator[tuple[AgentClient, dict[str, Message]]]:
    """Give a connection to an agent that answers each order as the table says that comes with it."""
    ours, theirs = socket.socketpair()
    answers: dict[str, Message] = {}

    def serve() -> None:
        with theirs, theirs.makefile("rb") as lines:
            for line in lines:
                send_command = decode(line)
                theirs.sendall(encode({"ok": True, **answers[send_command["do"]], "re": send_command["id"]}))

    serving = threading.Thread(target=serve)
    serving.start()
    channel = AgentClient("a", lambda: ours, EventQueue(), epoch=1)
    yield channel, answers
    channel.close()
    serving.join()


@SOCKETS
@given(reply=some.sampled_from(sorted(ANSWERED)).flatmap(lambda verb: some.tuples(some.just(verb), spoiled(ANSWERED[verb]))))
@example(reply=("prepare", {"memory": [1]}))
@example(reply=("stored", {"snapshots": [{}]}))
def test_an_answer_to_an_order_can_be_read_or_is_the_nodes_trouble(
    agent: tuple[AgentClient, dict[str, Message]], reply: tuple[str, Message]
) -> None:
    """As a flow reads it; what an honest agent says is understood."""
    channel, answers = agent
    verb, facts = reply
    answers[verb] = ANSWERED[verb]
    assert READ[verb](channel.send_command(verb, seconds=60.0))
    answers[verb] = facts
    try:
        answer = channel.send_command(verb, seconds=60.0)
    except CommandRejected as refused:
        answer, why = ANSWERED[verb], str(refused)
    else:
        why = "sent an invalid answer"
    assert mentions(why, "invalid answer")
    READ[verb](answer)
