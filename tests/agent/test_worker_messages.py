"""The messages of workers to the agent, and its answers."""

from __future__ import annotations

import json
import math
import signal
import sys

from holdfast.protocol import connect, encode
from tests.agent.rig import CLIENT, ROOT, SECONDS, Flow, Node
from tests.mentions import mentions
from tests.waiting import wait_until

ASK_IN_A_STOP = (
    CLIENT
    + """
signal.signal(signal.SIGTERM, lambda *_: print(json.dumps(ask(step=2)), flush=True) or os._exit(0))
hello()
print(json.dumps(ask(step=1)), flush=True)
say(t="resumed", step=1, path=None)
time.sleep(600)
"""
)


def test_leave_to_commit_is_given_to_current_workers_while_they_may_live(node: Node, flow: Flow) -> None:
    """A worker that is being stopped may save what it has; once its generation is over, nothing of it counts."""
    flow.prepare(node, [sys.executable, node.script(ASK_IN_A_STOP)])
    flow.start(1)
    flow.wait("resumed")
    flow.stop(1, signal.SIGTERM, SECONDS)
    before, during = map(json.loads, node.output().splitlines()[1:])
    assert before == during == {"re": 1, "ok": True, "why": ""}


def test_a_checkpoint_interval_comes_with_the_leave_to_commit_in_its_generation_only(node: Node, flow: Flow) -> None:
    """It is sent until the next generation begins, which has its own; one for another generation is refused."""
    asks = "\nhello()\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    flow.prepare(node, [sys.executable, node.script(CLIENT + asks + "\nprint(json.dumps(ask(step=1)), flush=True)"), str(node.work / "go")])
    flow.start(1)
    flow.wait("worker.hello")
    refused = flow.order("checkpoint-interval", generation=2, steps=7)
    assert refused["ok"] is False
    assert mentions(refused["why"], "generation 2", 1)
    assert flow.order("checkpoint-interval", generation=1, steps=0)["ok"] is False
    flow.ok("checkpoint-interval", generation=1, steps=7)
    (node.work / "go").touch()
    flow.exited(generation=1)
    assert json.loads(node.output().splitlines()[-1]) == {"re": 1, "ok": True, "why": "", "every": 7}
    flow.start(2)
    flow.exited(generation=2)
    assert json.loads(node.output().splitlines()[-1]) == {"re": 1, "ok": True, "why": ""}


def test_leave_to_commit_is_not_given_to_a_process_that_is_no_worker(node: Node, flow: Flow) -> None:
    """Any process of this user can open the socket."""
    flow.prepare(node, [sys.executable, node.script(CLIENT + "hello(); time.sleep(600)")])
    flow.start(1)
    flow.wait("worker.hello")
    with connect(node.folder / "agent.sock", seconds=SECONDS) as sock:
        for message in ({"t": "hello", "protocol": 1, "rank": 0, "generation": 1}, {"t": "commit-request", "id": 4, "step": 1}):
            sock.sendall(encode(message))
        answer = json.loads(sock.makefile().readline())
    assert (answer["re"], answer["ok"]) == (4, False)
    assert mentions(answer["why"], "no worker")


def test_a_script_in_a_child_of_the_command_counts_as_its_worker(node: Node, flow: Flow) -> None:
    """Wrappers of all kinds stand between the command and the training script; one that outlives its worker speaks for nobody."""
    code = """
hello()
say(t="beat", step=1, seconds=0.1)
print(json.dumps(ask(step=1)), flush=True)
os.kill(os.getppid(), signal.SIGKILL)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(json.dumps(ask(step=2)), flush=True)
"""
    script = node.script(CLIENT + "os.setsid()\n" + code)
    flow.prepare(node, ["/bin/sh", "-c", f"'{sys.executable}' '{script}' '{node.work / 'gone'}'; true"])
    flow.start(1)
    assert flow.wait("worker.stepped")["step"] == 1
    assert flow.exited()["signal"] == signal.SIGKILL
    (node.work / "gone").touch()
    wait_until(lambda: node.output().count("\n") > 2, seconds=60)
    before, after = map(json.loads, node.output().splitlines()[1:])
    assert (before["ok"], after["ok"]) == (True, False)
    assert mentions(after["why"], "no worker")
    flow.stop(1)


def test_steps_are_logged_before_leave_is_given_to_save_them(node: Node, flow: Flow) -> None:
    """Otherwise a checkpoint could be newer than the newest recorded step."""
    code = """
journal = os.path.join(os.path.dirname(os.environ["HOLDFAST_SOCKET"]), "event-log.jsonl")
hello()
for step in range(1, 30):
    say(t="beat", step=step, seconds=0.1, loss=1 / step)
    ask(step=step)
    steps = [one for line in open(journal) for one in json.loads(line).get("steps", ())]
    assert steps[-1][0] == step, steps
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1)
    end = flow.exited()
    assert end["code"] == 0, end["output"]
    assert [step[0] for event in flow.events for step in event.get("steps", ())] == list(range(1, 30))


def test_every_step_of_rank_0_is_reported_once_with_its_loss(node: Node, flow: Flow) -> None:
    """Those that follow quickly are sent together; other ranks' steps would add nothing."""
    code = """
hello()
for step in range(1, 501):
    say(t="beat", step=step, seconds=0.001, loss=float("nan") if step == 7 else step / 2, until=500)
say(t="finished", step=500)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1, (0, 1))
    for rank in (0, 1):
        end = flow.exited(rank)
        assert (end["step"], end["finished"]) == (500, True)
        assert flow.wait("worker.stepped", rank=rank)["until"] == 500
    steps = [step for event in flow.events for step in event.get("steps", ())]
    assert [step[0] for step in steps] == list(range(1, 501))
    assert math.isnan(steps[6][3])
    assert steps[7][3] == 4.0
    assert sum("steps" in event for event in flow.events) < 200


def test_the_last_messages_of_a_worker_come_before_its_end(node: Node, flow: Flow) -> None:
    """However much it sent in its last instant: its exception is the evidence for the diagnosis."""
    code = """
hello()
for step in range(3000):
    say(t="saved", step=step, path="/" + "x" * 50, seconds=0.1, size=1)
say(t="exception", type="ValueError", message="the last word", traceback="Traceback", step=7, errno=None, peer_lost=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    for generation in range(1, 6):
        flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
        flow.start(generation)
        end = flow.exited(generation=generation)
        assert end["raised"]["message"] == "the last word"
        raised = flow.wait("worker.raised", generation=generation)
        assert raised["seq"] == end["seq"] - 1
        assert raised["raised"] == end["raised"]
        assert sum(event["event"] == "saved" and event["generation"] == generation for event in flow.events) == 3000


def test_malformed_messages_are_dropped(node: Node, flow: Flow) -> None:
    """A worker of another version goes on being monitored."""
    code = """
hello()
for word in ("mark", "resumed", "section", "saved", "storage-error", "exception", "dance", []):
    say(t=word)
say(t="mark", name=1, seconds=2)
say(t="beat", step="x")
say(t="beat", step=True, seconds=1)
say(t="mark", name="load", seconds=2)
time.sleep(600)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1)
    flow.wait("mark", name="load")
    assert [event["event"] for event in flow.events] == ["worker.started", "worker.hello", "mark"]
    log = node.log.read_text()
    bad = next(line for line in log.splitlines() if "worker.bad-message" in line and mentions(line, "message=beat"))
    assert mentions(bad, "sender=rank 0, generation 1", "'step'", "'x'")
    assert any(mentions(line, "worker.unknown-message", "sender=rank 0, generation 1", "message=dance") for line in log.splitlines())


def test_snapshot_reports_go_to_the_controller_with_the_heartbeats(node: Node, flow: Flow) -> None:
    """Costs, which are reported now and then, stay with the newest step; the age is by this node's clock; nothing of it is logged."""
    code = """
hello()
costs = {"every": 1, "copied": 2.0, "overlapped": 1.5, "colour": "red"}
say(t="beat", step=8, seconds=0.1, snapshot={"step": 7, "at": time.time() - 100, **costs})
say(t="beat", step=9, seconds=0.1, snapshot={"step": 8, "at": time.time() - 50})
say(t="beat", step=10, seconds=0.1, snapshot={"step": -1})
time.sleep(600)
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1)
    beat = flow.until(lambda: next((one for one in flow.heartbeats if one["ranks"]["0"]["snapshot"].get("step") == 8), None))
    reported = beat["ranks"]["0"]
    age = reported["snapshot"].pop("age")
    assert reported["snapshot"] == {"step": 8, "every": 1, "copied": 2.0, "overlapped": 1.5}
    assert 50 <= age < 100
    assert reported["step"] == 9
    assert reported["replica"] is None
    wait_until(lambda: "field 'step' must be a whole number of at least 0, but it is '-1'" in node.log.read_text(), seconds=60)
    assert not any("snapshot" in json.dumps(event) for event in flow.events)


def test_a_generation_begins_without_snapshot_reports(node: Node, flow: Flow) -> None:
    """What a process reported before it was kept for another generation does not belong to that one."""
    code = 'hello()\nsay(t="beat", step=8, seconds=0.1, snapshot={"step": 7, "at": 1.0})\ntime.sleep(600)'
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1)
    flow.until(lambda: any(one["ranks"]["0"]["snapshot"].get("step") == 7 for one in flow.heartbeats))
    flow.stop(1)
    flow.prepare(node, [sys.executable, node.script(CLIENT + "hello(); time.sleep(600)")])
    flow.start(2)
    beat = flow.until(lambda: next((one for one in flow.heartbeats if one["generation"] == 2), None))
    assert beat["ranks"]["0"]["snapshot"] == {}


def test_a_worker_of_another_protocol_is_reported_and_ignored(node: Node, flow: Flow) -> None:
    """The answer to its question names the cure."""
    code = 'say(t="hello", protocol=2)\nsay(t="beat", step=1, seconds=1)\nprint(json.dumps(ask(step=1)), flush=True)'
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1)
    assert mentions(flow.wait("worker.protocol-mismatch")["why"], "protocol 2", "agent 1")
    end = flow.exited()
    assert (end["code"], end["step"]) == (0, None)
    answer = json.loads(node.output().splitlines()[-1])
    assert (answer["ok"], mentions(answer["why"], "protocol 2", "agent 1")) == (False, True)


def test_heartbeats_report_steps_and_sections(node: Node, flow: Flow) -> None:
    """A long section has its own limit; with the goodbye no steps are expected any more."""
    code = """
hello()
say(t="resumed", step=41, path="/x")
say(t="section", name="evaluation", limit_s=12.5, begin=True)
sys.stdin = incoming
incoming.readline()
"""
    flow.prepare(node, [sys.executable, node.script(CLIENT + code)])
    flow.start(1)
    beat = flow.until(lambda: next((one["ranks"]["0"] for one in flow.heartbeats if one["ranks"]["0"]["section"]), None))
    assert (beat["step"], beat["section"], beat["section_limit"], beat["managed"]) == (41, "evaluation", 12.5, True)
    assert 0 <= beat["age"] < SECONDS
    assert 0 <= beat["output_age"] < SECONDS


def test_the_messages_of_the_runtime_are_understood(node: Node, flow: Flow) -> None:
    """Both ends of the protocol are tested together."""
    code = """
from pathlib import Path
from holdfast.runtime.agent_client import StepSize, link
line = link()
line.mark("group", 0.5)
line.resumed(3, Path("/c/3"))
line.section("evaluation", 5.0, begin=True)
line.section("evaluation", None, begin=False)
line.beat(4, 0.25, 0.1, 10, StepSize(samples=32))
assert line.may_commit(4) == type(line.may_commit(4))(ok=True, why="")
line.saved(4, Path("/c/4"), 0.1, 1000)
line.storage_error("checkpoint-torn", 2, Path("/c/2"), "half of it")
try:
    raise OSError(28, "No space left on device")
except OSError as error:
    line.exception(error)
line.finished(4)
"""
    flow.prepare(node, [sys.executable, node.script(code)], environment={"PYTHONPATH": str(ROOT)})
    flow.start(1)
    end = flow.exited()
    assert end["code"] == 0, end["output"]
    names = [
        "worker.started",
        "worker.hello",
        "mark",
        "resumed",
        "worker.stepped",
        "steps",
        "saved",
        "storage-error",
        "worker.raised",
        "finished",
    ]
    assert [event["event"] for event in flow.events] == [*names, "worker.exited"]
    facts = {event["event"]: event for event in flow.events}
    assert facts["resumed"]["path"] == "/c/3"
    number, _, *rest = facts["steps"]["steps"][0]
    assert (number, rest) == (4, [0.1, 0.25, 32, None])
    assert facts["storage-error"]["kind"] == "checkpoint-torn"
    assert (facts["worker.raised"]["raised"]["errno"], facts["worker.raised"]["raised"]["type"]) == (28, "OSError")
