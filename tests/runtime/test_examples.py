"""The examples run as they are: with Holdfast's library, without any agent, and without Holdfast at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.spec import checks, load_job
from tests.runtime.agent_double import AgentDouble
from tests.runtime.damage import names
from tests.runtime.ranks import ROOT, Ranks

EXAMPLES = ROOT / "examples"
SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "32", "--bytes", "100000", "--warmup", "4"]


def result(path: Path) -> Any:
    """Return what the demo wrote at its end."""
    return json.loads(path.read_text())


def test_a_killed_example_ends_with_the_parameters_of_an_undisturbed_one(ranks: Ranks, agent: AgentDouble, tmp_path: Path) -> None:
    """Four DDP ranks, one killed in the middle: after the restart loss and parameters are equal to the bit."""
    script = str(EXAMPLES / "byte_gpt.py")
    argv = ["--steps", "30", *SMALL, "--result", str(tmp_path / "a.json")]
    ranks.run("script", 4, path=script, argv=argv)
    argv[-1] = str(tmp_path / "b.json")
    kept = agent.environment | {"HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "c"), "HOLDFAST_SAVE_EVERY": "7"}
    run = ranks.start("script", 4, kept, path=script, argv=argv)
    agent.wait_for("beat", 4, step=9)
    os.kill(run.pids[3], 9)
    agent.wait_for("exception", peer_lost=True)
    for pid in run.pids[:3]:  # what the agent does: neighbours in the ring have seen it, the others never would
        with suppress(ProcessLookupError):  # one that has seen it may have ended by itself
            os.kill(pid, 9)
    assert run.wait()[3].status == -9
    ranks.run("script", 4, kept, path=script, argv=argv)
    assert agent.of("resumed")[-1]["step"] >= 7
    assert result(tmp_path / "b.json") == result(tmp_path / "a.json")


def test_the_example_runs_under_plain_python(tmp_path: Path) -> None:
    """No agent, no ranks, no checkpoint directory: it trains, and leaves nothing but what it was asked for."""
    command = [sys.executable, str(EXAMPLES / "byte_gpt.py"), "--steps", "3", *SMALL, "--result", str(tmp_path / "r.json")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    ended = subprocess.run(command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert names(tmp_path) == ["r.json"]
    assert result(tmp_path / "r.json")["steps"] == 3


@pytest.mark.long
def test_a_script_without_holdfast_resumes_from_its_own_checkpoint_under_torchrun(ranks: Ranks, tmp_path: Path) -> None:
    """It does not use Holdfast; its second run resumes after the first."""
    script, kept = str(EXAMPLES / "plain_ddp.py"), str(tmp_path / "plain_ddp.pt")
    first = ranks.start("script", 2, path=script, argv=["--steps", "20", "--checkpoint", kept]).wait()
    assert [one.status for one in first] == [0, 0], first
    assert "step 20: loss" in first[0].log
    assert "resumed" not in first[0].log
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "--steps", "40"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    aborted_at_the_end = "terminate called without an active exception" in ended.stderr  # torch's own: runtime/threads.py says why
    assert ended.returncode == 0 or aborted_at_the_end, ended.stderr
    assert "rank 0: resumed after step 20" in ended.stdout  # lines of two ranks may run into each other
    assert names(tmp_path) == ["plain_ddp.pt"]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml") if path.name != "prefect.yaml"))
def test_each_job_file_is_valid(name: str, holdfast_home: Path) -> None:
    """What `holdfast validate` would say: nothing."""
    job, cluster = load_job(EXAMPLES / name)
    assert cluster is not None
    assert checks(job, cluster) == []
