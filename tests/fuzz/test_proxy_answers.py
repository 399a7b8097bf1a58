"""What the gate of a node answers: whatever it is, who asked gets a value of the right kind or the node's trouble, at once."""

from __future__ import annotations

import base64
import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from holdfast.cluster.interface import Logs
from holdfast.cluster.proxy_schema import ANSWERS, MAX_LOGS, problem_of
from holdfast.cluster.remote import RemoteNodes
from holdfast.errors import NodeError, NodeLost
from holdfast.protocol import GREETING, PROTOCOL, decode, encode
from tests.cluster.proxies import Boxes
from tests.fuzz.examples import ANYTHING, SOCKETS

Message = dict[str, Any]
HONEST: Final[dict[str, Message]] = {
    "select-node": {
        "directory": "/d", "interpreter": "/python", "host": "h", "reached": "10.0.0.1", "agent": None, "clock": 7.5,
        "interfaces": [{"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/8"}],
    },
    "processors": {"gpus": 8, "cpus": 64},
    "agent": {"agent": {"pid": 7, "job": "j"}},
    "fence": {"killed": [7]},
    "replay": {"events": [{"event": "steps"}]},
    "logs": {"logs": {"rank-0.log": 5}, "place": "p"},
    "log": {"data": base64.b64encode(b"a line").decode()},
    "listen": {"port": 5, "token": "t"},
    "measure": {"bytes": 9, "seconds": 0.5},
    "connect": {"why": ""},
}  # fmt: skip
"""What an honest gate answers."""
ASK: Final[dict[str, Callable[[RemoteNodes], object]]] = {
    "facts": lambda nodes: (nodes.address("n"), nodes.interface("n"), nodes.node_settings("n", "j"), nodes.folder("n")),
    "survey": lambda nodes: [(one.status, one.pid, one.job) for one in nodes.survey(5.0)],
    "fence": lambda nodes: sum(nodes.fence("n", "j")),
    "recent_events": lambda nodes: [one.get("event") for one in nodes.recent_events("n", "j")],
    "logs": lambda nodes: nodes.logs("n", "j").of("n", {"n": [0]}),
    "log": lambda nodes: len(nodes.log("n", "j", "rank-0.log", None, 10)),
    "bandwidth": lambda nodes: nodes.bandwidth("n", "n", 0.1) >= 0,
    "check_connection": lambda nodes: len(nodes.check_connection("n", "n", 0.1)),
    "wipe": lambda nodes: nodes.wipe_memory("n", "j"),
    "start": lambda nodes: nodes.start_agent("n"),
    "is_reachable": lambda nodes: nodes.is_reachable("n"),
    "processors": lambda nodes: nodes.processors("n", None),
    "connect": lambda nodes: nodes.connect("n").close(),
}
"""All that is asked of a node, and what is done with the answers."""


class FalsePipe:
    """The far end of a connection in the wrong hands: it greets as a gate does, and answers each order as it likes."""

    def __init__(self, answer: Callable[[Message], bytes]) -> None:
        self._answer = answer
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said.put(GREETING + encode({"protocol": PROTOCOL}))

    def recv(self, size: int) -> bytes:
        """Return what it says."""
        return self._said.get()[:size]

    def sendall(self, data: bytes) -> None:
        """Take an order."""
        for line in data.splitlines():
            number, _, text = line.partition(b" ")
            if number == b"0":
                self._said.put(self._answer(decode(text)))

    def close(self) -> None:
        """End it."""
        self._said.put(b"")

    def ended(self) -> str:
        """Say nothing."""
        return ""


@dataclass
class FalseTransport:
    """Leads to a false gate."""

    answer: Callable[[Message], bytes]

    def open(self, node: str, until: float, then: float) -> FalsePipe:
        """Connect."""
        return FalsePipe(self.answer)

    def address(self, node: str) -> str:
        """Return an address."""
        return "10.0.0.1"

    def close(self) -> None:
        """There is nothing to close."""


def asked(ask: Callable[[RemoteNodes], object], answer: Callable[[Message], bytes], interface: str | None = None) -> str:
    """Ask a node whose gate is false; return the trouble that came of it. Any other error is a test's failure, as it is a flow's end."""
    nodes = RemoteNodes(Boxes("/d", interface=interface, names=["n"]), FalseTransport(answer))
    try:
        ask(nodes)
    except (NodeError, OSError) as error:
        return str(error)
    finally:
        nodes.close()
    return ""


def answering(verb: str, reply: Message) -> Callable[[Message], bytes]:
    """Have a gate answer honestly to all orders but *verb*."""
    return lambda order: (
        b"0 " + encode({"ok": True, **(reply if order["do"] == verb else HONEST.get(order["do"], {})), "re": order.get("id")})
    )


@some.composite
def spoiled(draw: some.DrawFn, whole: Any) -> Any:
    """Draw *whole* with something in it missing, or other than it was, at any depth."""
    if not isinstance(whole, (dict, list)) or not whole or draw(some.integers(0, 4)) == 0:
        return draw(ANYTHING | some.sampled_from([2**70, -1, "\0", "\ud800", "a\nb"]))
    reply, place = whole.copy(), draw(some.sampled_from(sorted(whole) if isinstance(whole, dict) else range(len(whole))))
    if isinstance(reply, dict) and draw(some.booleans()) and draw(some.booleans()):
        del reply[place]
    else:
        reply[place] = draw(spoiled(reply[place]))
    return reply


@pytest.mark.long
@SOCKETS
@given(
    reply=some.sampled_from(sorted(HONEST)).flatmap(
        lambda verb: some.tuples(some.just(verb), spoiled(HONEST[verb]).filter(lambda one: isinstance(one, dict)))
    ),
    interface=some.sampled_from([None, "10.0.0.0/8"]),
    ok=some.sampled_from([True, True, True, False, 1]),
)
@example(reply=("select-node", {**HONEST["select-node"], "interfaces": 5}), interface=None, ok=True)
@example(reply=("fence", {"why": [], "errno": []}), interface=None, ok=False)
def test_whatever_a_gate_answers_it_is_a_value_or_the_nodes_trouble(reply: tuple[str, Message], interface: str | None, ok: object) -> None:
    """All that is asked of it, with the answer to one order spoiled, or a no that says nothing of use."""
    verb, facts = reply
    answer = answering(verb, {**facts, "ok": ok})
    for ask in ASK.values():
        asked(ask, answer, interface)
    if verb == "fence" and (ok is not True or problem_of(verb, facts)):
        assert asked(ASK["fence"], answer), "nobody may take such a node for fenced"


def test_an_honest_gate_is_understood() -> None:
    """Every order that has an answer of its own is among those that are spoiled; a gate may answer more than is known."""
    assert HONEST.keys() == ANSWERS.keys()
    for name, ask in ASK.items():
        assert asked(ask, lambda order: answering("", {})({**order}).replace(b'"ok":', b'"more":[1],"ok":')) == "", name
    nodes = RemoteNodes(Boxes("/d", names=["n"]), FalseTransport(answering("", {})))
    assert (nodes.fence("n"), nodes.log("n", "j", "x", None, 3)) == ([7], b"a l")
    assert nodes.logs("n", "j") == Logs(place="p", sizes={"rank-0.log": 5})
    nodes.close()


@pytest.mark.parametrize("name", ["../../../.ssh/authorized_keys", "/etc/cron.d/x", "rank-0.log/../x", "rank-0.log\n", "job.sh", ""])
def test_a_log_that_is_not_called_like_one_is_the_nodes_trouble(name: str) -> None:
    """Its name would be a path wherever logs are put."""
    assert asked(ASK["logs"], answering("logs", {"logs": {"rank-0.log": 5, name: 5}, "place": "p"}))


def test_a_node_that_names_logs_without_end_is_not_believed() -> None:
    """Each would be asked for."""
    many = {f"rank-{number}.log": 1 for number in range(MAX_LOGS)}
    assert problem_of("logs", {"logs": many}) == ""
    assert problem_of("logs", {"logs": {**many, "hot-spare-0.log": 1}})


@pytest.mark.parametrize(
    "line",
    [b'0 {"re":[]}', b'0 {"closed":[]}', b'0 {"closed":1e999}', b"0 []", b"0 {}", b"{}", b"x {}", b"99999999999 {}", b"0 " + b"[" * 9999],
)
def test_a_line_that_is_none_ends_the_connection_and_nobody_waits(line: bytes) -> None:
    """The order that was asked for, and those after it, fail at once and say why; the thread that listens ends without a traceback."""
    turns = count()
    nodes = RemoteNodes(
        Boxes("/d", names=["n"]), FalseTransport(lambda order: answering("", {})(order) if next(turns) == 0 else line + b"\n")
    )
    node_proxy = nodes.node_proxy("n")
    for _ in range(2):
        with pytest.raises(NodeLost, match=r"malformed data"):
            node_proxy.command("fence", seconds=3600.0)
    assert not node_proxy.is_alive
    with suppress(NodeError):
        nodes.is_reachable("n")
    nodes.close()
