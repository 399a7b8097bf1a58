"""Notices that a node will be taken away: by a file, an address and a signal, seen by a real agent; what cannot be seen is none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.monitor.preemption_watcher import NoticeUnreadable, at_url, in_file
from holdfast.host.ports import free_port
from tests.agent.rig import Flow, Node
from tests.mentions import mentions
from tests.waiting import wait_until

PLAN: dict[str, Any] = {
    "file": None, "url": None, "headers": {}, "pattern": "", "signals": [], "interval": 0.05, "timeout": 60.0, "lead_time": 90.0,
}  # fmt: skip


class Metadata:
    """A metadata service as clouds have one."""

    def __init__(self) -> None:
        self.status, self.body, self.ends = 404, "", threading.Event()
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        """Those that were given out; where `wants_token` is set, only the newest one opens the door."""
        self.wants_token = False
        service = self

        class Answer(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                allowed = self.path == "/latest/api/token" and 1 <= int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
                self.send_response(200 if allowed else 400)
                self.end_headers()
                if allowed:
                    service.tokens.append(f"token-{len(service.tokens)}")
                    self.wfile.write(service.tokens[-1].encode())

            def do_GET(self) -> None:
                token = self.headers["X-aws-ec2-metadata-token"]
                service.asked.append({"path": self.path, "token": token, **dict(self.headers)})
                if service.wants_token and token not in service.tokens[-1:]:
                    self.send_error(401)
                    return
                if service.status == 0:  # it takes the question and gives no answer
                    service.ends.wait(60)
                    return
                self.send_response(service.status)
                self.end_headers()
                self.wfile.write(service.body.encode())

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/spot"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self.ends.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    """Give a metadata service that has no notice."""
    made = Metadata()
    yield made
    made.close()


def prepared(node: Node, flow: Flow, **plan: Any) -> None:
    """Have the agent take on a job whose cluster has its notices there."""
    flow.prepare(node, [sys.executable, "-c", ""], notice={**PLAN, **plan})


def test_a_file_that_comes_is_a_notice_and_one_that_goes_takes_it_back(node: Node, flow: Flow, tmp_path: Path) -> None:
    """Each is reported once, and the node's name stands in the file's."""
    prepared(node, flow, file=str(tmp_path / "{node}.leaving"))
    path = tmp_path / "node.leaving"
    (tmp_path / "new").write_text("host maintenance at noon\n")
    (tmp_path / "new").rename(path)  # whole: the agent may look at any moment
    event = flow.wait("agent.preemption-notice")
    assert event["seconds"] == 90.0
    assert mentions(event["why"], path, "host maintenance at noon")
    path.unlink()
    flow.wait("agent.preemption-cancelled")
    assert sum(one["event"] == "agent.preemption-notice" for one in flow.events) == 1


def test_a_matching_answer_is_a_notice(node: Node, flow: Flow, metadata: Metadata) -> None:
    """Neither 404, nor an answer that says something else, nor none is; that nothing can be seen is reported."""
    metadata.status, metadata.body = 200, "FALSE"
    prepared(node, flow, url=metadata.url + "/{node}", pattern="^TRUE$", headers={"Metadata-Flavor": "Google"})
    wait_until(lambda: len(metadata.asked) > 2, seconds=60)
    flow.ok("ping")
    assert not [one for one in flow.events if one["event"] == "agent.preemption-notice"]
    assert metadata.asked[0]["Metadata-Flavor"] == "Google"
    assert metadata.asked[0]["path"] == "/spot/node"
    metadata.status = 503
    assert "answered with status 503" in flow.wait("notice.unknown")["why"]
    metadata.status, metadata.body = 200, "TRUE"
    assert flow.wait("agent.preemption-notice")["why"] == f"{metadata.url}/node announces preemption: TRUE"


def test_a_metadata_service_that_wants_a_token_is_asked_for_one(node: Node, flow: Flow, metadata: Metadata) -> None:
    """Once, and again when it takes that one no more; without one its refusal is reported, and is no notice."""
    metadata.wants_token = True
    prepared(node, flow, url=metadata.url)
    assert "answered with status 401" in flow.wait("notice.unknown")["why"]
    token_url = metadata.url.replace("/spot", "/latest/api/token")
    prepared(node, flow, url=metadata.url, token_url=token_url)
    wait_until(lambda: sum(one["token"] == "token-0" for one in metadata.asked) > 3, seconds=60)
    assert metadata.tokens == ["token-0"], "a token serves many questions"
    metadata.tokens.append("token-given-to-somebody-else")  # ours has run out
    wait_until(lambda: metadata.asked[-1]["token"] == "token-2", seconds=60)
    metadata.status, metadata.body = 200, '{"action": "terminate"}'
    assert mentions(flow.wait("agent.preemption-notice")["why"], metadata.url, '{"action": "terminate"}')
    assert len(metadata.tokens) == 3


def test_a_command_changes_where_the_agent_looks_for_notices(node: Node, flow: Flow, tmp_path: Path) -> None:
    """While its job runs; an order that names no place changes nothing."""
    prepared(node, flow, file=str(tmp_path / "before"))
    flow.ok("notice", notice={**PLAN, "file": str(tmp_path / "after")})
    assert not flow.order("notice", notice={**PLAN, "interval": "soon"})["ok"]
    (tmp_path / "after").touch()
    assert flow.wait("agent.preemption-notice")["why"] == f"{tmp_path}/after announces preemption"
    (tmp_path / "before").touch()
    (tmp_path / "after").unlink()
    flow.wait("agent.preemption-cancelled")


def test_a_signal_of_the_cluster_s_own_is_a_notice(node: Node, flow: Flow) -> None:
    """The agent goes on all the same."""
    prepared(node, flow, signals=[int(signal.SIGUSR1)])
    os.kill(node.agent, signal.SIGUSR1)
    assert flow.wait("agent.preemption-notice")["why"] == "the cluster sent SIGUSR1"
    assert flow.ok("about", protocol=1)["pid"] == node.agent


@pytest.mark.parametrize(
    "wrong", [{"signals": [9]}, {"signals": [15]}, {"interval": "soon"}, {"headers": [1]}, {"lead_time": -1}, {"pattern": "("}]
)
def test_malformed_preemption_settings_are_refused(node: Node, flow: Flow, wrong: dict[str, Any]) -> None:
    """By the name of its field."""
    answer = flow.order("prepare", **{**a_plan(node), "notice": {**PLAN, **wrong}})
    assert not answer["ok"]
    assert next(iter(wrong)) in answer["why"]


def a_plan(node: Node) -> dict[str, Any]:
    """Return the rest of a job's plan."""
    argv, logs = [sys.executable, "-c", ""], str(node.folder)
    return {"lease": 60.0, "warm": False, "argv": argv, "directory": "/", "environment": {}, "log_directory": logs}


def test_an_unreadable_source_is_no_notice(metadata: Metadata, tmp_path: Path) -> None:
    """A server that does not answer, refuses, is not there; a file that may not be read."""
    assert at_url(metadata.url, {}, "", timeout=60.0) is None, "404: there is none yet"
    metadata.status = 403
    with pytest.raises(NoticeUnreadable, match="status 403"):
        at_url(metadata.url, {}, "", timeout=60.0)
    metadata.status = 0
    with pytest.raises(NoticeUnreadable, match="does not answer"):
        at_url(metadata.url, {}, "", timeout=0.2)
    with pytest.raises(NoticeUnreadable, match="does not answer"):
        at_url(f"http://127.0.0.1:{free_port()}/", {}, "", timeout=60.0)
    assert in_file(str(tmp_path / "none"), "") is None
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(NoticeUnreadable, match="cannot be read"):
        in_file(str(loop), "")
    (tmp_path / "said").write_text("stay")
    assert in_file(str(tmp_path / "said"), "go") is None
