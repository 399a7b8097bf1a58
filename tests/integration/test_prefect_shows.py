"""What a person sees in the Prefect UI, asked of the server's API: run names, progress, incidents, events."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

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


def test_a_run_shows_its_name_progress_incidents_and_events(stage: Stage, prefect_server: PrefectServer) -> None:
    """The flow run is named for the job; each incident is a page of its own; automations can hang on the events."""
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
    wait_until(lambda: wanted <= events(), seconds=20, explain=lambda: str(events()))
