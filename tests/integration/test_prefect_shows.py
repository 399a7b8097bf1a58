"""What a person sees in the Prefect UI, asked of the server's API: run names, progress, incidents, events."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import PrefectServer, flows_in, prefect_server_in
from tests.integration.flow_server import Flows
from tests.integration.prefect_api import ask
from tests.integration.stage import Play, Stage
from tests.mentions import mentions, one_line_mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

PATIENCE = 100.0
"""Seconds: a Prefect server on SQLite may wait a whole minute for its own database."""
HEARTBEAT_SECONDS, ALERT_SECONDS = 2, 10
"""Between two heartbeats of a controller, and without one until an alert is sent."""
TWO = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1}
GATE = "while step == 100 and not os.path.exists('gate'): time.sleep(0.05)"
"""What has the script wait, before it ends, for the fault that a test injects."""


def asked(server: PrefectServer, path: str, **body: Any) -> Any:
    """Return the API's answer to a POST."""
    return ask(f"{server.url}/{path}", body)


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


@pytest.fixture(autouse=True)
def heartbeats(stage: Stage) -> None:
    """Have heartbeats come often enough for an alert after ten seconds without one."""
    stage.environment["HOLDFAST_CONTROLLER_HEARTBEAT"] = str(HEARTBEAT_SECONDS)


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[PrefectServer]:
    """Have a server for these tests alone: a flow that other tests kill can lock the database longer than an alert may take."""
    with prefect_server_in(tmp_path_factory.mktemp("server"), tmp_path_factory, prefect_database) as server:
        yield server


@pytest.fixture(scope="module")
def flows(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flows]:
    """Give what starts flows that talk to that server."""
    with flows_in(tmp_path_factory.mktemp("flows"), prefect_server) as flows:
        yield flows


@pytest.fixture(scope="module")
def mailbox(prefect_server: PrefectServer) -> Iterator[Mailbox]:
    """Have all notifications sent to a mailbox while the tests of this file last."""
    with Mailbox() as box:
        threading.Thread(target=box.serve_forever, daemon=True).start()
        notify(prefect_server, "add", "box", "-", "--all", "--no-controller-after", f"{ALERT_SECONDS}s", stdin=box.address)
        yield box
        notify(prefect_server, "rm", "box")
        box.shutdown()


def notify(server: PrefectServer, *words: str, stdin: str = "") -> str:
    """Run `holdfast admin notify`; return what it said."""
    command = [sys.executable, "-m", "holdfast", "admin", "notify", *words]
    done = subprocess.run(command, env=server.environment, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mail(box: Mailbox, job: str) -> list[dict[str, Any]]:
    """Return what was sent about *job*."""
    return [one["payload"] for one in box.mail if one["resource"] == f"holdfast.job.{job}"]


def events(server: PrefectServer, job: str) -> list[dict[str, Any]]:
    """Return the events of *job* that the server has, the oldest first."""
    wanted = {"event": {"prefix": ["holdfast."]}, "resource": {"id": [f"holdfast.job.{job}"]}}
    return list(reversed(asked(server, "events/filter", filter=wanted, limit=50)["events"]))


def artifact(server: PrefectServer, key: str) -> dict[str, Any]:
    """Return the newest version of an artifact: Prefect's client makes one twice where the answer of a busy server came too late."""
    versions = asked(server, "artifacts/filter", artifacts={"key": {"any_": [key]}})
    return dict(max(versions, key=lambda one: one["created"]))


def each_once(server: PrefectServer, job: str) -> list[dict[str, Any]]:
    """Wait until the server has the events of a job with one incident, and see that it has none twice; return them."""
    names = {"job.launching", "fault.seen", "incident.opened", "incident.recovered", "job.completed"}
    whole = {f"holdfast.{name}" for name in names}
    wait_until(lambda: whole <= {one["event"] for one in events(server, job)}, seconds=PATIENCE, explain=lambda: str(events(server, job)))
    found = [one for one in events(server, job) if one["event"] in whole]
    faults = [(one["payload"]["kind"], one["payload"]["target"]) for one in found if one["event"] == "holdfast.fault.seen"]
    assert ("worker-sigkill", "rank 1 on node-1") in faults
    assert len(faults) == len(set(faults)), "the same fault is sent once"
    rest = [one["event"] for one in found if one["event"] != "holdfast.fault.seen"]
    assert sorted(rest) == sorted(whole - {"holdfast.fault.seen"}), "each once"
    return found


def test_a_run_shows_its_name_page_incidents_and_events(stage: Stage, prefect_server: PrefectServer, mailbox: Mailbox) -> None:
    """The flow run is named for the job; it has a page, and so has each incident; each is one notification, no event is twice."""
    play = stage.play("shown", args=["--steps", "120", "--each", GATE], **TWO)
    play.chaos.at_step(10, lambda: play.chaos.kill(1))
    (play.spec.parent / "gate").touch()
    assert play.ends() == 0, play.log()

    by_name = {"name": {"any_": ["train shown"]}}
    (run,) = asked(prefect_server, "flow_runs/filter", flow_runs=by_name)
    assert run["state_type"] == "COMPLETED"
    assert mentions(run["state"]["message"], "2 ranks", "status 0")
    link = f"{prefect_server.url.removesuffix('/api')}/runs/flow-run/{run['id']}"

    incident = artifact(prefect_server, "shown-incident-1")
    assert incident["flow_run_id"] == run["id"]
    assert mentions(incident["description"], "Incident 1", "rank 1 on node-1", "SIGKILL", "recovered")
    for words in ("worker-sigkill", "restart-workers", "restart 1 of 3 within 3600 s", "T1 reschedule", link):
        assert words in incident["data"]
    progress = artifact(prefect_server, "shown-progress")
    assert (progress["flow_run_id"], progress["data"]) == (run["id"], 100.0)
    assert "step 120 of 120, loss 0.00833" in progress["description"]
    page = artifact(prefect_server, "shown")
    assert page["flow_run_id"] == run["id"]
    for words in (
        "# shown: COMPLETED",
        "nothing to do",
        f"/artifacts/artifact/{incident['id']}",
        "all workers were restarted",
        "rank 1",
        link,
    ):
        assert words in page["data"]

    found = each_once(prefect_server, "shown")
    roles = {one["event"]: {of["prefect.resource.role"]: of["prefect.resource.id"] for of in one["related"]} for one in found}
    about = {"flow-run": f"prefect.flow-run.{run['id']}", "cluster": "holdfast.cluster.stage"}
    assert about.items() <= roles["holdfast.job.completed"].items()
    more = {"incident": "holdfast.incident.shown.1", "node": "holdfast.node.stage.node-1"}
    assert (about | more).items() <= roles["holdfast.incident.recovered"].items()

    wait_until(lambda: len(mail(mailbox, "shown")) >= 2, seconds=PATIENCE, explain=lambda: str(mailbox.mail))
    over, ended = sorted(mail(mailbox, "shown"), key=lambda one: one["state"], reverse=True)
    (row,) = play.incidents()
    assert (over["id"], over["state"], over["level"], over["nodes"]) == (f"incident {row.id}", "over", "info", ["node-1"])
    assert mentions(over["subject"], "[stage/shown]", "incident 1", "rank 1 on node-1", "SIGKILL", "recovered")
    assert (over["cluster"], over["link"], bool(over["host"])) == ("stage", link, True)
    assert (ended["state"], ended["subject"]) == ("ended", "[stage/shown] completed")
    listed = notify(prefect_server, "ls")
    assert one_line_mentions(listed, "box", "Webhook", "all", "10.0 s", "yes")


ECC = "if rank == 1 and generation == 1 and step == 5: raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
WRONG = "if rank == 0 and step == 8: raise ValueError('sizes do not fit in /a/very/long/path/to/model.py:12')"


def test_a_quarantine_needs_a_person_and_a_failed_job_is_one_notification(
    stage: Stage, prefect_server: PrefectServer, mailbox: Mailbox
) -> None:
    """The quarantine comes with its incident, and is an event of the node; the failure of the job with the incident that it is of."""
    stage.count = 4
    play = stage.play("ecc-reported", args=["--steps", "10", "--each", ECC], nnodes=2, nproc_per_node=1, spare_nodes=1)
    assert play.ends() == 0, play.log()
    wait_until(lambda: len(mail(mailbox, "ecc-reported")) >= 2, seconds=PATIENCE, explain=lambda: str(mailbox.mail))
    incident = next(one for one in mail(mailbox, "ecc-reported") if one["state"] == "over")
    assert incident["level"] == "attention"
    assert incident["subject"].endswith("; node-1 quarantined")
    assert one_line_mentions(incident["text"], "node-1", "quarantined", "cuda-uncorrectable-ecc")
    assert "node-1 is quarantined" in artifact(prefect_server, "ecc-reported-incident-1")["data"]
    of_node = {
        "event": {"name": ["holdfast.node.service.quarantined"]},
        "resource": {"id": ["holdfast.node.stage.node-1"]},
        "related": {"id": ["holdfast.job.ecc-reported"]},
    }

    def moves() -> list[dict[str, Any]]:
        return list(asked(prefect_server, "events/filter", filter=of_node, limit=50)["events"])

    wait_until(moves, seconds=PATIENCE)
    assert len(moves()) == 1

    play = stage.play("wrong", args=["--steps", "10", "--each", WRONG], nnodes=2, nproc_per_node=1)
    assert play.ends() == 1, play.log()
    wait_until(
        lambda: [one for one in mail(mailbox, "wrong") if one["state"] == "ended"], seconds=PATIENCE, explain=lambda: str(mailbox.mail)
    )
    (failed,) = [one for one in mail(mailbox, "wrong") if one["level"] == "attention"]
    assert mentions(failed["subject"], "[stage/wrong]", "rank 0")
    assert "model.py:12" in failed["text"]
    assert "/a/very/long/path" not in failed["text"] + failed["subject"]


def test_a_job_without_a_controller_is_an_alert_that_the_next_controller_withdraws(
    stage: Stage, prefect_server: PrefectServer, mailbox: Mailbox
) -> None:
    """The server sends it when the flow is killed, each time; not when another flow takes over in time, and not of a job that has ended."""

    def levels() -> list[str]:
        return [one["level"] for one in mail(mailbox, "lost") if one["id"] == "controller stage/lost"]

    def expect_levels(*recommended_actions: str) -> None:
        wait_until(
            lambda: levels() == [*before, *recommended_actions],
            seconds=PATIENCE,
            explain=lambda: f"{levels()}\n{mailbox.mail}\n{play.log()}",
        )

    def alerts() -> list[str]:
        return [one["name"] for one in asked(prefect_server, "automations/filter") if "-alert-" in one["name"]]

    play = stage.play("lost", args=["--steps", "100000"], nnodes=2, nproc_per_node=1)
    shows(prefect_server, play, 1)
    play.dies()
    died = time.monotonic()
    play = stage.again("lost", play.spec)
    shows(prefect_server, play, 2)
    in_time = time.monotonic() - died < ALERT_SECONDS - HEARTBEAT_SECONDS
    wait_until(lambda: levels()[-1:] != ["attention"], seconds=PATIENCE, explain=play.log)
    before = levels()
    assert before == [] or not in_time, "there was a heartbeat in time"
    assert alerts() == ["holdfast-box-alert-lost"]
    workers = play.pids()
    play.dies()
    expect_levels("attention")
    alert = [one for one in mail(mailbox, "lost") if one["level"] == "attention"][-1]
    assert mentions(alert["subject"], "[stage/lost]", "no controller")
    for words in ("Training continues", "nobody would answer the next fault", "`holdfast run lost.yaml`", "Retry"):
        assert words in alert["text"]
    play = stage.again("lost", play.spec)
    expect_levels("attention", "resolved")
    shows(prefect_server, play, 3)
    play.dies()
    expect_levels("attention", "resolved", "attention")
    play = stage.again("lost", play.spec)
    expect_levels("attention", "resolved", "attention", "resolved")
    assert play.pids() == workers, "it has trained on all the time"
    play.stops()
    assert alerts() == [], "nobody waits for a heartbeat of a job that has ended"


def shows(server: PrefectServer, play: Play, versions: int) -> None:
    """Wait until so many flows have shown the job's progress: what is killed in a request may hold the server's database for a minute."""
    wanted = {"key": {"any_": [f"{play.name}-progress"]}}
    wait_until(lambda: len(asked(server, "artifacts/filter", artifacts=wanted)) >= versions, seconds=PATIENCE, explain=play.log)
