"""What a person sees in the Prefect UI, asked of the server's API: run names, progress, incidents, events."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import PrefectServer
from tests.integration.stage import Stage
from tests.waiting import wait_until

TWO = {"wanted": 2, "ranks": 1, "spare": 1}


def asked(server: PrefectServer, path: str, **body: Any) -> Any:
    """Return the API's answer to a POST."""
    request = urllib.request.Request(  # noqa: S310 (our own http address)
        f"{server.url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 (our own http address)
        return json.load(answer)


class Mailbox(http.server.ThreadingHTTPServer):
    """A webhook's receiving end."""

    def __init__(self) -> None:
        self.mail: list[dict[str, Any]] = []

        class Slot(http.server.BaseHTTPRequestHandler):
            def do_POST(slot) -> None:  # noqa: N805 (the library's name; `self` is the mailbox)
                self.mail.append(json.loads(slot.rfile.read(int(slot.headers["Content-Length"]))))
                slot.send_response(204)
                slot.end_headers()

            def log_message(slot, *_: object) -> None:  # noqa: N805 (as above)
                """Keep the output of tests quiet."""

        super().__init__(("127.0.0.1", 0), Slot)

    @property
    def address(self) -> str:
        """Return where to send to."""
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


@pytest.fixture
def mailbox(prefect_server: PrefectServer) -> Iterator[Mailbox]:
    """Have all messages sent to a mailbox while the test lasts."""
    with Mailbox() as box:
        threading.Thread(target=box.serve_forever, daemon=True).start()
        notify(prefect_server, "add", "box", "--webhook", "-", "--all", stdin=box.address)
        yield box
        box.shutdown()


def notify(server: PrefectServer, *words: str, stdin: str = "") -> str:
    """Run `holdfast notify`; return what it said."""
    command = [sys.executable, "-m", "holdfast", "notify", *words]
    done = subprocess.run(command, env=server.environment, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_shows_its_name_progress_incidents_and_events(stage: Stage, prefect_server: PrefectServer, mailbox: Mailbox) -> None:
    """The flow run is named for the job; each incident is a page of its own; each is one message to whoever asked for them."""
    play = stage.play("shown", args=["--steps", "120"], nodes=TWO)
    play.chaos.at_step(10, lambda: play.chaos.kill(1))
    assert play.ends() == 0, play.log()

    by_name = {"name": {"any_": ["train shown"]}}
    (run,) = asked(prefect_server, "flow_runs/filter", flow_runs=by_name)
    assert run["state_type"] == "COMPLETED"
    assert run["state"]["message"] == "all 2 rank(s) ended with status 0"
    tasks = {one["name"] for one in asked(prefect_server, "task_runs/filter", flow_runs=by_name)}
    assert {"launch shown", "monitor shown", "detect shown", "isolate shown", "reschedule shown", "resume shown"} <= tasks

    (page,) = asked(prefect_server, "artifacts/filter", artifacts={"key": {"any_": ["shown-incident-1"]}})
    assert page["flow_run_id"] == run["id"]
    for words in ("worker-sigkill", "restart-in-place", "restart 1 of 3 within 3600 s", "reschedule", "T1"):
        assert words in page["data"]

    (progress,) = asked(prefect_server, "artifacts/filter", artifacts={"key": {"any_": ["shown-progress"]}})
    assert progress["flow_run_id"] == run["id"]
    assert progress["data"] == 100.0
    assert "step 120 of 120, loss 0.0083" in progress["description"]

    def events() -> set[str]:
        found = asked(prefect_server, "events/filter", filter={"event": {"prefix": ["holdfast."]}}, limit=50)
        return {one["event"] for one in found["events"] if one["resource"]["prefect.resource.id"] == "holdfast.job.shown"}

    wanted = {"holdfast.fault.seen", "holdfast.incident.recovered", "holdfast.recovery.done", "holdfast.job.completed"}
    wait_until(lambda: wanted <= events(), seconds=60, explain=lambda: str(events()))

    def mail() -> list[dict[str, Any]]:
        return [one["payload"] for one in mailbox.mail if one["resource"] == "holdfast.job.shown"]

    wait_until(lambda: len(mail()) >= 2, seconds=30, explain=lambda: str(mailbox.mail))
    over, ended = sorted(mail(), key=lambda one: one["state"], reverse=True)
    (incident,) = play.incidents()
    assert (over["id"], over["state"], over["attention"]) == (f"incident {incident.id}", "over", False)
    assert "incident 1, worker-sigkill of rank 1" in over["subject"]
    assert "restart-in-place: training again after" in over["text"]
    assert (ended["state"], ended["subject"]) == ("ended", "[shown] completed")
    assert "box   webhook  all       yes" in notify(prefect_server, "list")
    assert "nothing goes there any more" in notify(prefect_server, "remove", "box")
