"""An evaluation runs as a real process: what it is given, what counts as metrics, and every way in which it fails."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from holdfast.checkpoints.inventory import CheckpointInfo, latest
from holdfast.errors import EvaluationFailed
from holdfast.evaluation import Evaluation, Program, command_of, evaluate
from holdfast.host.process import is_alive
from tests.mentions import mentions
from tests.waiting import wait_until
from tests.workflows.conftest import Save

LOAD = """
import json, os, sys, warnings
import torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
state = {"model": {"weight": torch.zeros(64)}}
dcp.load(state, checkpoint_id=os.environ["HOLDFAST_CHECKPOINT"], no_dist=True)
print("loaded", *sys.argv[1:])
print(json.dumps({"mean": state["model"]["weight"].mean().item(), "step": int(os.environ["HOLDFAST_CHECKPOINT_STEP"])}))
print("done")
"""


@pytest.fixture
def checkpoint(save: Save, tmp_path: Path) -> CheckpointInfo:
    """Give a checkpoint of step 70."""
    save(tmp_path, 70)
    return latest(tmp_path, "gpt")


def run(checkpoint: CheckpointInfo, code: str, *args: str, timeout_seconds: float | None = 60.0) -> Evaluation:
    """Evaluate *checkpoint* by Python *code*."""
    return evaluate(checkpoint, Program(command=[sys.executable, "-c", code, *args], timeout_seconds=timeout_seconds))


def test_an_evaluation_reads_the_checkpoint_and_its_last_json_line_is_the_result(checkpoint: CheckpointInfo) -> None:
    """The tensor of step 70 holds 70; places in the arguments are filled in, and each line is passed on."""
    lines: list[str] = []
    program = Program(command=[sys.executable, "-c", LOAD, "{checkpoint}", "at-{step}", '{"braces": 1}'])
    found = evaluate(checkpoint, program, lines.append)
    assert (found.job, found.step, found.checkpoint, found.metrics) == ("gpt", 70, checkpoint.path, {"mean": 70.0, "step": 70})
    assert lines[0] == f'loaded {checkpoint.path} at-70 {{"braces": 1}}'
    assert lines[-1] == "done"


def test_a_metrics_file_goes_before_what_is_printed(checkpoint: CheckpointInfo) -> None:
    """A program whose output is not its own, such as one under `torchrun`, writes a file."""
    code = "import os, pathlib; print('{\"a\": 1}'); pathlib.Path(os.environ['HOLDFAST_METRICS']).write_text('{\"b\": 2}')"
    assert run(checkpoint, code).metrics == {"b": 2}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('no such layer')", ("status 1", "RuntimeError: no such layer")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ("SIGSEGV", "nothing")),
        ("print('loss 2.3')", ("status 0", "no metrics", "JSON")),
        ("print([1, 2])", ("status 0", "no metrics", "JSON")),
        (
            "import os; open(os.environ['HOLDFAST_METRICS'], 'w').write('loss=2')",
            ("HOLDFAST_METRICS", "JSON"),
        ),
        (
            "import os; open(os.environ['HOLDFAST_METRICS'], 'w').write('[1]')",
            ("HOLDFAST_METRICS", "list"),
        ),
    ],
)
def test_an_evaluation_without_metrics_fails(checkpoint: CheckpointInfo, code: str, words: tuple[str, ...]) -> None:
    """It names the job and the step, and what the program said last."""
    with pytest.raises(EvaluationFailed) as raised:
        run(checkpoint, code)
    assert mentions(raised.value.what, "'gpt'", "step 70")
    assert mentions(raised.value.reason, *words)


def test_a_missing_command_is_named(checkpoint: CheckpointInfo) -> None:
    """As the system puts it."""
    with pytest.raises(EvaluationFailed, match="`/nowhere/eval`"):
        evaluate(checkpoint, Program(command=["/nowhere/eval"]))


def test_an_evaluation_that_takes_too_long_is_killed_with_its_children(checkpoint: CheckpointInfo) -> None:
    """Nothing of it is left."""
    pids: list[int] = []
    program = Program(command=["sh", "-c", "sleep 600 & echo $!; wait"], timeout_seconds=3.0)
    with pytest.raises(EvaluationFailed, match=r"3\.00 s"):
        evaluate(checkpoint, program, lambda line: pids.append(int(line)))
    assert len(pids) == 1
    wait_until(lambda: not is_alive(pids[0], None), seconds=60)


def test_a_flow_that_is_cancelled_leaves_no_evaluation_running(checkpoint: CheckpointInfo) -> None:
    """What Prefect raises for a termination reaches the wait, and the program is killed on the way out."""
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        os.kill(os.getpid(), 2)

    assert threading.current_thread() is threading.main_thread()
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        evaluate(checkpoint, Program(command=[sys.executable, "-c", code]), interrupt)
    assert not is_alive(pids[0], None)


def test_a_script_or_a_command_is_named_and_not_both() -> None:
    """As in a job file."""
    assert command_of("eval.py", None, ["--fast"]) == [sys.executable, "eval.py", "--fast"]
    assert command_of(None, ["torchrun", "eval.py"], ()) == ["torchrun", "eval.py"]
    with pytest.raises(ValueError, match="name either"):
        command_of(None, None, ())
    with pytest.raises(ValueError, match="name either"):
        command_of("eval.py", ["eval"], ())
    with pytest.raises(ValueError, match="append them"):
        command_of(None, ["eval"], ["--fast"])
