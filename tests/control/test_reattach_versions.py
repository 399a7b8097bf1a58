"""A controller of one version and agents of another: refused over the real socket, with both versions and the cure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.agents import client
from holdfast.control.agents.reactor import EventQueue
from holdfast.control.supervisor.reattach import refuse_another_version
from holdfast.errors import CommandRejected, NodeLost, VersionMismatch
from holdfast.host.process import is_alive
from holdfast.protocol import connect
from tests.agent.rig import CLIENT, Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Return a real agent."""
    made = Node(tmp_path).begin()
    yield made
    made.end()


@pytest.mark.parametrize("spoken", [0, 2, 17])
def test_a_controller_of_another_version_is_refused_and_the_workers_continue(
    node: Node, monkeypatch: pytest.MonkeyPatch, spoken: int
) -> None:
    """Older or newer: the node does not count as lost, which would end what runs there."""
    with node.flow() as own:
        own.attach(0)
        own.prepare(node, [sys.executable, node.script(CLIENT + "hello()\ntime.sleep(600)\n")])
        own.start(1)
        pid = own.pid()
        monkeypatch.setattr(client, "PROTOCOL", spoken)
        other = client.AgentClient("w1", lambda: connect(node.folder / "agent.sock", seconds=30), EventQueue(), epoch=9, job="job")
        with pytest.raises(CommandRejected) as about:
            other.about()
        with pytest.raises(CommandRejected, match=f"this agent speaks protocol 1, the controller {spoken}"):
            other.attach()
        other.close()
        with pytest.raises(VersionMismatch) as refused:
            refuse_another_version("gpt", {"w0": NodeLost("w0", "gone"), "w1": about.value})
        for words in ("protocol 1", f"the controller {spoken}", "on w1", "Training continues", "holdfast stop gpt"):
            assert words in str(refused.value)
        assert is_alive(pid, None)
        own.ok("ping")  # the newer epoch of who was refused deposes nobody


def test_other_rejections_are_not_about_versions() -> None:
    """An agent of another job, or a lost one."""
    refuse_another_version(
        "gpt", {"w0": NodeLost("w0", "gone"), "w1": CommandRejected("w1", "held by job other", "attach"), "w2": {"agent": "a"}}
    )
