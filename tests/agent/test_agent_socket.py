"""The agent's socket: whatever is sent, the workers go on; a refused command is answered with what to do."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from holdfast.host.process import is_alive
from holdfast.protocol import MAX_LINE_BYTES, PROTOCOL, connect, encode
from tests.agent.rig import CLIENT, SECONDS, Flow, Node
from tests.mentions import mentions

# "end" is left out: it means it
COMMAND_NAMES = (
    "about",
    "attach",
    "ping",
    "prepare",
    "port",
    "start",
    "stop",
    "abandon",
    "regroup",
    "start-hot-spares",
    "drop",
    "forward",
    "living",
)
GROUP_MESSAGES = (
    "groups",
    "broken",
    "regrouped",
    "recovery-failed",
    "coverage",
    "roles",
    "prepared",
    "unprepared",
    "switched",
    "departed",
    "parked",
)
WORDS = (
    "hello",
    "mark",
    "resumed",
    "beat",
    "section",
    "saved",
    "storage-error",
    "exception",
    "finished",
    "commit-request",
    "commit",
    "register-successor",
    *GROUP_MESSAGES,
)
FIELDS = (
    "id",
    "epoch",
    "job",
    "since",
    "protocol",
    "generation",
    "membership",
    "workers",
    "signal",
    "grace",
    "lease",
    "argv",
    "environment",
)
FIELDS_OF_WORKERS = (
    "step",
    "seconds",
    "loss",
    "until",
    "name",
    "begin",
    "limit_s",
    "path",
    "size",
    "kind",
    "why",
    "type",
    "message",
    "errno",
    "generation",
    "roles",
)

ANYTHING: some.SearchStrategy[Any] = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=6),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
EPOCH = 3
"""Of the controller that runs the job."""


def deposes(facts: dict[str, Any]) -> bool:
    """Return whether a command with these facts comes from a newer controller of the same job, which takes over."""
    epoch = facts.get("epoch")
    return isinstance(epoch, int) and epoch > EPOCH


ORDERS = some.builds(
    lambda verb, facts: {**facts, "do": verb},
    some.sampled_from(COMMAND_NAMES) | ANYTHING,
    some.dictionaries(some.sampled_from(FIELDS), ANYTHING).filter(lambda facts: not deposes(facts)),
)
SAYINGS = some.builds(
    lambda word, facts: {**facts, "t": word},
    some.sampled_from(WORDS) | ANYTHING,
    some.dictionaries(some.sampled_from(FIELDS_OF_WORKERS), ANYTHING),
)
LINES = (ORDERS | SAYINGS | some.dictionaries(some.text(max_size=4), ANYTHING, max_size=3)).map(encode)
FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def agent_at_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Flow, int]]:
    """Give an agent that runs a worker, its controller, and the worker's pid."""
    node = Node(tmp_path_factory.mktemp("n")).begin()
    with node.flow(epoch=EPOCH) as flow:
        flow.attach(0)
        flow.prepare(node, [sys.executable, node.script(ECHO)])
        flow.start(1)
        yield node, flow, flow.pid()
    node.end()


ECHO = (
    CLIENT
    + """
hello()
place = sys.argv[0] + ".say"
while True:
    try:
        os.rename(place, place + ".now")
    except FileNotFoundError:
        time.sleep(0.005)
        continue
    with open(place + ".now", "rb") as file:
        try:
            sock.sendall(file.read())
        except OSError:  # cut off: come again
            pass
    sock.close()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["HOLDFAST_SOCKET"])
    os.rename(place + ".now", place + ".done")
"""
)
"""A worker that sends what a file contains."""


def unharmed(node: Node, flow: Flow, pid: int) -> None:
    """Assert that the agent serves its controller and keeps its worker."""
    answer = flow.ok("about", protocol=PROTOCOL)
    assert (answer["pid"], answer["generation"], answer["workers"]) == (node.agent, 1, {"0": pid})
    flow.ok("ping")
    assert is_alive(pid, None)


def send_alone(node: Node, data: bytes) -> bytes:
    """Send *data* on a connection of its own; return what the agent answers until it has read all."""
    with connect(node.folder / "agent.sock", seconds=SECONDS) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has read enough
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionResetError):
            while more := sock.recv(65536):
                received += more
        return received


@given(data=some.binary(max_size=200) | some.lists(some.binary(max_size=40), max_size=4).map(b"\n".join))
@FUZZ
def test_garbage_harms_nobody(agent_at_work: tuple[Node, Flow, int], data: bytes) -> None:
    """Bytes of any kind, whole lines and half ones."""
    node, flow, pid = agent_at_work
    send_alone(node, data)
    unharmed(node, flow, pid)


@given(lines=some.lists(LINES, min_size=1, max_size=4))
@FUZZ
def test_malformed_commands_harm_nobody(agent_at_work: tuple[Node, Flow, int], lines: list[bytes]) -> None:
    """Known and unknown commands with missing fields and fields of any type: refused, or without effect on another job."""
    node, flow, pid = agent_at_work
    orders = sum("do" in json.loads(line) for line in lines)
    answers = [json.loads(line) for line in send_alone(node, b"".join(lines)).splitlines()]
    assert sum("re" in answer for answer in answers) >= orders
    unharmed(node, flow, pid)


@pytest.mark.parametrize("depth", [*range(20, 100, 20), *range(100, 1200, 11)])
def test_deeply_nested_messages_harm_nobody(agent_at_work: tuple[Node, Flow, int], depth: int) -> None:
    """It is read just within the interpreter's limit, and would exceed it when it is passed on, shown or answered."""
    node, flow, pid = agent_at_work
    deep = b"[" * depth + b"]" * depth
    send_alone(node, b'{"do": "ping", "epoch": %d, "id": %b}\n' % (EPOCH, deep) + b'{"do": "ping", "id": 1, "epoch": %b}\n' % deep)
    send_alone(node, b'{"t": "commit-request", "id": %b}\n' % deep)
    unharmed(node, flow, pid)


@given(lines=some.lists(LINES, min_size=1, max_size=4))
@settings(FUZZ, max_examples=60)
def test_malformed_messages_of_a_worker_harm_nobody(agent_at_work: tuple[Node, Flow, int], lines: list[bytes]) -> None:
    """The same from a real worker; what the controller then gets has the types it expects."""
    node, flow, pid = agent_at_work
    place = node.work / "script.py.say"
    done = place.with_name("script.py.say.done")
    done.unlink(missing_ok=True)
    place.with_name("writing").write_bytes(b"".join(line for line in lines if b'"do"' not in line))
    place.with_name("writing").rename(place)
    while not done.exists():
        flow.receive(0.01)
    unharmed(node, flow, pid)
    for event in flow.events:
        assert isinstance(event.get("step", 0), int | None)
        assert isinstance(event.get("seconds", 0.0), float | int) or event["event"] == "worker.regrouped"
        assert all(isinstance(step, int) for step, *_ in event.get("steps", ()))


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ({"do": "dance"}, ("unknown command 'dance'", "about, attach, ping")),
        ({"do": 5}, ("field 'do'", "text", "'5'")),
        ({"do": "about"}, ("protocol 1", "controller None", "install")),
        ({"do": "about", "protocol": 99}, ("protocol 1", "controller 99", "install")),
        ({"do": "attach", "since": 0, "protocol": "1"}, ("protocol 1", "install")),
        ({"do": "attach", "protocol": 1}, ("field 'since'", "whole number", "at least 0", "missing")),
        ({"do": "attach", "protocol": 1, "since": -1}, ("field 'since'", -1)),
        ({"do": "ping", "epoch": float("inf")}, ("field 'epoch'",)),
        ({"do": "ping", "epoch": 2**70}, ("field 'epoch'",)),
        ({"do": "ping", "epoch": True}, ("field 'epoch'",)),
        ({"do": "ping", "epoch": 2}, ("newer controller", "epoch 3", "yours 2")),
        ({"do": "ping", "job": "another", "epoch": 9}, ("held by", "job job")),
        ({"do": "prepare", "job": "another"}, ("held by", "job job")),
        ({"do": "prepare"}, ("field 'job'", "text", "missing")),
        ({"do": "start", "generation": 1, "membership": {}, "workers": []}, ("generation 1", "newer than 1")),
        (
            {"do": "start", "generation": 2, "membership": {}, "workers": []},
            ("1 worker of", "generation 1", "still run"),
        ),
        ({"do": "start", "generation": 2, "membership": {"n": ["x"]}, "workers": []}, ("field 'membership'",)),
        ({"do": "start", "generation": 2, "membership": {}, "workers": [{"rank": 0}]}, ("field 'environment'",)),
        (
            {"do": "start", "generation": 2, "membership": {}, "workers": [{"rank": 0, "environment": {"A=B": "c"}}]},
            ("field 'environment'",),
        ),
        ({"do": "stop", "generation": 0, "signal": 9, "grace": 0}, ("generation 0", "over", "this is 1")),
        ({"do": "stop", "generation": 1, "signal": 999, "grace": 0}, ("field 'signal'", "number of a signal", "'999'")),
        ({"do": "stop", "generation": 1, "signal": 15, "grace": float("nan")}, ("field 'grace'", "number of seconds")),
    ],
)
def test_a_refused_command_is_answered_with_what_to_do(
    agent_at_work: tuple[Node, Flow, int], order: dict[str, Any], named: tuple[object, ...]
) -> None:
    """And changes nothing."""
    node, flow, pid = agent_at_work
    (answer,) = send_alone(node, encode({"id": 8, "epoch": 3, **order})).splitlines()
    refusal = json.loads(answer)
    assert (refusal["re"], refusal["ok"]) == (8, False)
    assert mentions(refusal["why"], *named)
    unharmed(node, flow, pid)


def test_garbage_is_answered_with_what_the_socket_takes(agent_at_work: tuple[Node, Flow, int]) -> None:
    """A person with a terminal may try it."""
    node, flow, pid = agent_at_work
    assert mentions(json.loads(send_alone(node, b"hello?\n"))["why"], "JSON")
    unharmed(node, flow, pid)


def test_a_line_without_end_is_cut_off(agent_at_work: tuple[Node, Flow, int]) -> None:
    """It would fill the agent's memory."""
    node, flow, pid = agent_at_work
    assert b"too long" in send_alone(node, b"x" * (MAX_LINE_BYTES + (2 << 20)))
    unharmed(node, flow, pid)


def test_half_a_line_waits_for_its_other_half(agent_at_work: tuple[Node, Flow, int]) -> None:
    """Others are served meanwhile."""
    node, flow, pid = agent_at_work
    with node.flow(epoch=3) as other:
        other.raw(b'{"id":9,"do":"pi')
        unharmed(node, flow, pid)
        other.raw(b'ng","epoch":3}\n')
        assert other.until(lambda: other.answers.get(9))["ok"]


def test_a_client_that_sends_without_end_does_not_starve_others(agent_at_work: tuple[Node, Flow, int]) -> None:
    """The loop gives everybody a turn."""
    node, flow, pid = agent_at_work
    child = os.fork()
    if child == 0:
        try:
            with connect(node.folder / "agent.sock", seconds=SECONDS) as sock:
                while True:
                    sock.sendall(b'{"t":"beat","step":1}\n' * 10_000)
        finally:
            os._exit(0)
    try:
        for _ in range(20):
            unharmed(node, flow, pid)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_client_that_reads_no_answers_is_disconnected(agent_at_work: tuple[Node, Flow, int]) -> None:
    """Memory is not for the taking in this direction either."""
    node, flow, pid = agent_at_work
    with connect(node.folder / "agent.sock", seconds=SECONDS) as sock, pytest.raises((BrokenPipeError, ConnectionResetError)):
        sock.sendall(encode({"id": "x" * 100_000, "do": "ping", "epoch": 3}) * 500)
    unharmed(node, flow, pid)


def test_more_connections_than_the_agent_serves_do_not_lock_out_those_it_has(agent_at_work: tuple[Node, Flow, int]) -> None:
    """They are closed at once; when they end, others may connect."""
    node, flow, pid = agent_at_work
    crowd: list[socket.socket] = []
    try:
        for _ in range(300):
            crowd.append(connect(node.folder / "agent.sock", seconds=SECONDS))
            flow.ok("ping")
        unharmed(node, flow, pid)
    finally:
        for sock in crowd:
            sock.close()
    with node.flow(epoch=3) as other:
        other.ok("ping")


def test_an_agent_out_of_descriptors_goes_on(tmp_path: Path) -> None:
    """A low limit must end connections, not workers."""
    node = Node(tmp_path).begin()
    resource.prlimit(node.agent, resource.RLIMIT_NOFILE, (40, 40))
    crowd: list[socket.socket] = []
    try:
        with node.flow() as flow:
            flow.ok("ping")
            crowd += [connect(node.folder / "agent.sock", seconds=SECONDS) for _ in range(80)]
            flow.ok("ping")
            for sock in crowd:
                sock.close()
            flow.attach(0)
            flow.prepare(node, [sys.executable, "-c", ""])
            flow.start(1)
            assert flow.exited()["code"] == 0
    finally:
        node.end()


def test_a_command_of_an_older_controller_is_refused(node: Node) -> None:
    """Another controller has its lease; the newest one's commands are carried out."""
    with node.flow(epoch=4) as old, node.flow(epoch=5) as new:
        old.prepare(node, [sys.executable, "-c", "import time; time.sleep(600)"])
        old.start(1)
        new.attach(0)
        for verb, facts in (("ping", {}), ("stop", {"generation": 1, "signal": 9, "grace": 0.0}), ("end", {}), ("port", {})):
            assert mentions(old.order(verb, **facts)["why"], "epoch 5", 4)
        assert old.ok("about", protocol=PROTOCOL)["workers"]
        new.ok("ping")


def test_commands_of_other_jobs_do_not_depose_a_controller(node: Node) -> None:
    """Epochs count the flows of one job; another job's says nothing about this one."""
    with node.flow(epoch=4) as control_job, node.flow(epoch=90, job="other") as other, node.flow(epoch=91, job=None) as reader:
        control_job.prepare(node, [sys.executable, "-c", ""])
        assert mentions(other.order("attach", since=0, protocol=PROTOCOL)["why"], "job job")
        assert mentions(other.order("prepare", job="other")["why"], "job job")
        assert reader.ok("about", protocol=PROTOCOL)["job"] == "job"
        control_job.ok("ping")


def test_a_controller_that_died_before_its_job_held_the_node_leaves_it_to_others(node: Node) -> None:
    """An epoch counts from the moment a job holds the node."""
    with node.flow(epoch=90, job="other") as dead:
        dead.attach(0)
    with node.flow(epoch=1) as flow:
        flow.prepare(node, [sys.executable, "-c", ""])
        flow.ok("ping")


def test_a_start_without_a_job_is_refused(node: Node) -> None:
    """Nothing is known of what to run."""
    with node.flow() as flow:
        assert mentions(flow.order("start", generation=1, membership={}, workers=[])["why"], "'prepare'")


def test_ports_are_free_and_outside_the_range_of_outgoing_connections(node: Node) -> None:
    """One that the kernel may hand to any connection is taken when the rank gets to it."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with node.flow() as flow:
        ports = {flow.ok("port")["port"] for _ in range(20)}
    assert len(ports) > 10
    assert all(10_000 <= port < max(low, 11_000) for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("", port))
