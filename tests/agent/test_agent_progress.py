"""Progress of workers through the agent: queries and answers, step timings, checksums, bad losses."""

from __future__ import annotations

import sys

import pytest

from holdfast.agent.workers.worker import BLOCK, StepTimings
from tests.agent.rig import CLIENT, Flow, Node
from tests.mentions import mentions

ANSWERS = (
    CLIENT
    + """
hello()
say(t="resumed", step=0, path=None)
for line in incoming:
    question = json.loads(line)
    say(t="status", step=7, waits="vote", seconds=1.5, groups=[], place=question["do"])
"""
)


def test_a_query_reaches_the_ranks_and_their_answers_the_controller_but_not_the_event_log(node: Node, flow: Flow) -> None:
    """A rank's status is worth nothing to a controller that attaches later."""
    flow.prepare(node, [sys.executable, node.script(ANSWERS)])
    flow.start(1, ranks=[0, 1])
    flow.until(lambda: len([one for one in flow.events if one["event"] == "resumed"]) == 2)
    assert flow.ok("query", generation=1, query={"do": "roll-call"}, ranks=[1])["queried"] == [1]
    event = flow.wait("worker.rank-status", rank=1)
    assert event["said"] == {"step": 7, "waits": "vote", "seconds": 1.5, "groups": [], "place": "roll-call"}
    assert sorted(flow.ok("query", generation=1, query={"do": "roll-call"})["queried"]) == [0, 1]
    flow.wait("worker.rank-status", rank=0)
    refused = flow.order("query", generation=2, query={"do": "roll-call"})
    assert refused["ok"] is False
    assert mentions(refused["why"], "generation 2", 1)
    assert flow.order("query", generation=1, query="where are you?")["ok"] is False
    assert "worker.rank-status" not in (node.folder / "event-log.jsonl").read_text()


def test_heartbeats_carry_the_newest_step_timings_and_checksums(node: Node, flow: Flow) -> None:
    """A block's medians: one slow step does not move them. What belongs to another generation is no digest of this one."""
    reports = """
hello()
say(t="resumed", step=0, path=None)
for step in range(1, 18):
    timing = {"own": 9.0 if step == 3 else 0.25, "talk": 0.5, "data": 0.0}
    say(t="beat", step=step, loss=1.0, seconds=0.75, until=None, generation=1, timing=timing)
say(t="check", step=16, digest="abc", shard="p", generation=0)
say(t="check", step=16, digest="def", shard="p", generation=1)
time.sleep(600)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + reports)])
    flow.start(1)
    beat = flow.until(lambda: next((one["ranks"]["0"] for one in flow.heartbeats if one["ranks"]["0"]["checks"]), None))
    assert beat["step_timings"] == [[0, 0.25, 0.5, 0.0], [1, 0.25, 0.5, 0.0]]
    assert beat["checks"] == [{"step": 16, "digest": "def", "shard": "p"}]


def test_a_bad_loss_is_reported_once_until_the_loss_is_finite_again(node: Node, flow: Flow) -> None:
    """Of any rank, not of rank 0 alone, and at once."""
    losses = "1.0, math.nan, math.nan, None, math.nan, 2.0, math.inf"
    reports = f"""
import math
hello()
say(t="resumed", step=0, path=None)
for step, loss in enumerate([{losses}], 1):
    say(t="beat", step=step, loss=loss, seconds=0.1, until=None, generation=1)
say(t="finished", step=7)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + reports)])
    flow.start(1)
    flow.exited(generation=1)
    assert [one["step"] for one in flow.events if one["event"] == "worker.loss"] == [2, 7]


@pytest.mark.parametrize(
    "timing", ['"slow"', '{"own": 1.0}', '{"own": "x", "talk": 0.0, "data": 0.0}', '{"own": -1.0, "talk": 0.0, "data": 0.0}']
)
def test_a_malformed_step_timing_does_no_other_harm(node: Node, flow: Flow, timing: str) -> None:
    """Workers of another version may send anything."""
    reports = f"""
hello()
say(t="resumed", step=0, path=None)
say(t="beat", step=1, loss=1.0, seconds=0.1, until=None, generation=1, timing={timing})
say(t="beat", step=2, loss=1.0, seconds=0.1, until=None, generation=1)
time.sleep(600)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + reports)])
    flow.start(1)
    beat = flow.until(lambda: next((one["ranks"]["0"] for one in flow.heartbeats if one["ranks"]["0"]["step"] == 2), None))
    assert beat["step_timings"] == []


def test_a_block_with_too_few_steps_does_not_count() -> None:
    """Steps with a section in them are left out; the median of the few others would mean nothing."""
    timings = StepTimings()
    for step in range(1, 4 * BLOCK + 1):
        if not BLOCK < step <= 2 * BLOCK or step > 2 * BLOCK - 4:
            timings.add(step, [float(step), 0.0, 0.0])
    assert [block for block, *_ in timings.newest()] == [0, 2, 3]
    assert timings.newest()[0] == [0, 4.5, 0.0, 0.0]


def test_a_script_that_reports_by_heartbeat_may_exit_without_finishing(node: Node, flow: Flow) -> None:
    """It keeps its own state: its status alone says how it ended. One with a session that leaves in the middle has not finished."""
    reports = """
hello()
if os.environ["RANK"] == "1":
    say(t="resumed", step=0, path=None)
say(t="beat", step=7, loss=1.0, seconds=0.1, until=9, generation=1, **({"heartbeat": True} if os.environ["RANK"] == "0" else {}))
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + reports)])
    flow.start(1, ranks=[0, 1])
    assert [flow.exited(rank)["finished"] for rank in (0, 1)] == [True, False]
    assert [flow.wait("worker.stepped", rank=rank)["heartbeat"] for rank in (0, 1)] == [True, False]
