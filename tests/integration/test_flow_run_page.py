"""The flow-run page shows the story: task runs named for what happened, in the order of a graph, and incidents in the log."""

from __future__ import annotations

import re
from typing import Any

from tests.integration.conftest import PrefectServer
from tests.integration.stage import Play, Stage
from tests.integration.test_prefect_shows import asked
from tests.integration.test_takeover_flow import SPARE, begun, goes_on, recovered, stands_by
from tests.mentions import mentions
from tests.waiting import wait_until


def story(server: PrefectServer, name: str) -> list[dict[str, Any]]:
    """Return the task runs of the flow run of that name, first to last."""
    found = asked(server, "task_runs/filter", flow_runs={"name": {"any_": [f"train {name}"]}}, sort="EXPECTED_START_TIME_ASC")
    return sorted(found, key=lambda one: one["start_time"])


def warnings(server: PrefectServer, name: str) -> list[str]:
    """Return what the log of the flow run of that name says at WARNING or above."""
    (run,) = asked(server, "flow_runs/filter", flow_runs={"name": {"any_": [f"train {name}"]}})
    records = asked(server, "logs/filter", logs={"flow_run_id": {"any_": [run["id"]]}, "level": {"ge_": 30}}, sort="TIMESTAMP_ASC")
    return [str(one["message"]) for one in records]


def stopped(play: Play) -> None:
    """Have the job stopped once it trains again."""
    goes_on(play)
    play.stops()


def test_an_incident_reads_from_launch_to_monitor_with_who_what_and_how_long(stage: Stage, prefect_server: PrefectServer) -> None:
    """A hot spare replaces a killed rank: each step is one task run with a message, follows the one before, and nothing else is shown."""
    play = begun(stage, "story", **SPARE)
    stands_by(play)
    play.chaos.kill(1)
    recovered(play)
    stopped(play)
    names = ("launch", "monitor", "detect", "decide", "isolate", "reschedule", "resume", "monitor")
    wait_until(lambda: len(story(prefect_server, "story")) == len(names), seconds=60, explain=lambda: str(story(prefect_server, "story")))
    wait_until(
        lambda: all(one["state"]["type"] == "COMPLETED" for one in story(prefect_server, "story")),
        seconds=60,
        explain=lambda: str(story(prefect_server, "story")),
    )
    lines = story(prefect_server, "story")
    titles = [one["name"] for one in lines]
    assert [title.partition(":")[0] for title in titles] == list(names)
    patterns = (
        r"launch: 2 ranks on node-0, node-1, \d.*",
        r"monitor: .*, fault seen",
        r"detect: rank 1 on node-1, SIGKILL",
        r"decide: replace rank 1",
        r"isolate: rank 1 stopped, \d.*",
        r"reschedule: rank 1 to hot spare on node-2",
        r"resume: rank 1 replaced by hot spare on node-2, \d.*",
        r"monitor: .*, stop requested",
    )
    for title, pattern in zip(titles, patterns, strict=True):
        assert re.fullmatch(pattern, title), title
    assert all(one["state"]["message"] for one in lines)
    assert [one["state"]["name"] for one in lines][1:4] == ["Fault seen", "Diagnosed", "Decided"]
    follows = [[source["id"] for source in one["task_inputs"].get("wait_for", [])] for one in lines]
    assert follows == [[], *([one["id"]] for one in lines[:-1])]

    wait_until(lambda: len(warnings(prefect_server, "story")) == 2, seconds=60, explain=lambda: str(warnings(prefect_server, "story")))
    opened, end = warnings(prefect_server, "story")
    assert mentions(opened, "Incident 1", "rank 1 on node-1", "SIGKILL")
    assert "Decision: replace rank 1" in opened
    assert mentions(end, "Incident 1", "0 steps")
    assert re.search(r"http://\S+/artifacts/key/story-incident-1$", end)
