"""`holdfast.heartbeat`: steps are reported, and nothing else happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.agent_double import AgentDouble
from tests.runtime.ranks import ROOT


def run(script: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run *script* in a fresh interpreter, as rank 1."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    words = {**bare, "PYTHONPATH": str(ROOT), "RANK": "1", **(environment or {})}
    return subprocess.run([sys.executable, "-c", script], env=words, capture_output=True, text=True, timeout=90, check=False)


def test_each_step_is_reported_once_with_the_time_since_the_one_before(agent: AgentDouble) -> None:
    """A loss may be a number or anything with an item; a step that was reported already is not reported again."""
    script = """
import sys, time, holdfast
class Scalar:
    def item(self): return 0.25
began = time.monotonic()
for step, loss in (10, 1.5), (10, 9.0), (20, Scalar()), (30, None):
    holdfast.heartbeat(step, loss, until=40)
    time.sleep(0.2)
assert "torch" not in sys.modules
"""
    done = run(script, agent.environment)
    assert (done.returncode, done.stderr) == (0, "")
    beats = agent.wait_for("beat", 3)
    assert [(one["step"], one["loss"], one["until"], one["heartbeat"]) for one in beats] == [
        (10, 1.5, 40, True), (20, 0.25, 40, True), (30, None, 40, True),
    ]  # fmt: skip
    assert beats[0]["seconds"] > 0.0, "what the start took is not less than nothing: a limit for hangs is made of it"
    assert beats[1]["seconds"] >= 0.4
    assert beats[2]["seconds"] >= 0.2
    assert {one["t"] for one in agent.received} == {"hello", "beat"}, "no group, no state, no goodbye"


def test_outside_of_holdfast_and_in_forked_children_it_does_nothing(agent: AgentDouble) -> None:
    """Nor does it cost an import of torch."""
    assert run("import holdfast\nfor step in range(9):\n holdfast.heartbeat(step, 1.0)").stderr == ""
    script = """
import os, holdfast
holdfast.heartbeat(1)
if os.fork() == 0:
    holdfast.heartbeat(2)
    os._exit(0)
os.wait()
holdfast.heartbeat(3)
"""
    assert run(script, agent.environment).returncode == 0
    assert [one["step"] for one in agent.wait_for("beat", 2)] == [1, 3]


@pytest.mark.long
def test_a_session_in_the_same_process_reports_the_steps(agent: AgentDouble, tmp_path: Path) -> None:
    """Its heartbeats are ignored, with one warning: two counts of steps would contradict each other."""
    script = """
import torch, holdfast
model = torch.nn.Linear(2, 1)
with holdfast.session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    for step in session.steps(until=3):
        holdfast.heartbeat(100 + step.number, 1.0)
        step.end(0.5)
"""
    places = {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0", "HOLDFAST_CHECKPOINT_DIR": str(tmp_path)}
    done = run(script, {**agent.environment, **places})
    assert done.returncode == 0, done.stderr
    agent.wait_for("finished")
    assert [one["step"] for one in agent.of("beat")] == [1, 2, 3]
    assert done.stderr.count("session") == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("-1", "ValueError: heartbeat(step=-1"),
        ("1, until=-1", "ValueError: heartbeat(step=1, until=-1"),
        ("1.5", "TypeError"),
        ("1, 'low'", "TypeError: heartbeat(loss=...): the loss must be a number"),
        ("1, [1.0]", "TypeError: heartbeat(loss=...): the loss must be a number"),
        ("1, tokens=-1", "ValueError: heartbeat(tokens=-1)"),
        ("1, samples=1.5", "TypeError: heartbeat(samples=...) got a float, but must be a whole number"),
    ],
)
def test_an_invalid_step_or_loss_is_an_error(agent: AgentDouble, call: str, words: str) -> None:
    """With what is wrong."""
    done = run(f"import holdfast\nholdfast.heartbeat({call})", agent.environment)
    assert words in done.stderr
    assert agent.of("beat") == []


def test_a_section_within_a_section_does_not_end_the_outer_one(agent: AgentDouble) -> None:
    """The agent knows one section at a time: after the inner one it gets the outer one again."""
    script = """
import holdfast
with holdfast.section("evaluation", 60):
    with holdfast.section("save"):
        pass
"""
    assert run(script, agent.environment).returncode == 0
    sections = [(one["name"], one["limit_s"], one["begin"]) for one in agent.wait_for("section", 4)]
    assert sections == [("evaluation", 60, True), ("save", None, True), ("evaluation", 60, True), ("evaluation", 60, False)]
