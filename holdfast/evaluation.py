"""Run a user's evaluation of a checkpoint, and read the metrics that it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

from pydantic import BaseModel, ConfigDict

from holdfast.checkpoints.inventory import CheckpointInfo
from holdfast.errors import EvaluationFailed
from holdfast.host.process import kill_group
from holdfast.report.text.wording import clipped, duration

CHECKPOINT: Final = "HOLDFAST_CHECKPOINT"
STEP: Final = "HOLDFAST_CHECKPOINT_STEP"
METRICS: Final = "HOLDFAST_METRICS"
MAX_LINES: Final = 200
"""Last lines of output that are kept, to find the metrics and the error in."""
DRAIN_SECONDS: Final = 5.0
"""How long to wait for its last lines; a process that it started may keep the pipe open."""
MAX_QUOTED: Final = 300
"""Characters of a line that an error quotes."""


class Evaluation(BaseModel):
    """The metrics of one checkpoint."""

    model_config = ConfigDict(frozen=True)

    job: str
    step: int
    """Of the checkpoint."""
    checkpoint: Path
    metrics: dict[str, Any]
    """The JSON object that the evaluation wrote to the file named by `HOLDFAST_METRICS`, or printed last."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that evaluates a checkpoint."""

    command: Sequence[str]
    """Program and arguments; ``{checkpoint}`` and ``{step}`` in them are replaced by the checkpoint's folder and step."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    workdir: str | os.PathLike[str] | None = None
    timeout_seconds: float | None = None


def command_of(script: str | os.PathLike[str] | None, command: Sequence[str] | None, args: Sequence[str]) -> list[str]:
    """Return the command of an evaluation: a Python *script* with *args*, or any *command*; raise ``ValueError`` for neither and both."""
    if (script is None) is (command is None):
        raise ValueError("name either `script` (a Python file) or `command` (a list)")
    if command is not None:
        if args:
            raise ValueError("`args` belong to `script`; append them to `command`")
        return list(command)
    assert script is not None
    return [sys.executable, os.fspath(script), *args]


def evaluate(checkpoint: CheckpointInfo, program: Program, on_line: Callable[[str], None] = lambda _: None) -> Evaluation:
    """Run *program* on *checkpoint* and return its metrics; *on_line* is called with each line that it prints.

    Raise `EvaluationFailed` when it cannot be started, takes too long, exits with another status than 0, or reports no metrics.
    It is killed with all its children when this function raises.
    """
    begun = time.monotonic()
    what = f"the evaluation of '{checkpoint.job}' at step {checkpoint.step}"
    with tempfile.TemporaryDirectory(prefix="holdfast-evaluation-") as folder:
        report = Path(folder) / "metrics.json"
        lines = _run(what, _filled(program, checkpoint, report), on_line)
        metrics = _written(what, report) or _printed(lines)
    if metrics is None:
        cure = f"print one as the last line, or write it to the file that {METRICS} names"
        raise EvaluationFailed(what, f"it exited with status 0 but reported no metrics as a JSON object; {cure}")
    seconds = time.monotonic() - begun
    return Evaluation(job=checkpoint.job, step=checkpoint.step, checkpoint=checkpoint.path, metrics=metrics, seconds=seconds)


def _filled(program: Program, checkpoint: CheckpointInfo, report: Path) -> Program:
    """Return *program* with the checkpoint and the metrics file filled in."""
    values = {"{checkpoint}": str(checkpoint.path), "{step}": str(checkpoint.step)}
    command = list(program.command)
    for name, value in values.items():
        command = [one.replace(name, value) for one in command]
    ours = {CHECKPOINT: str(checkpoint.path), STEP: str(checkpoint.step), METRICS: str(report)}
    return replace(program, command=command, env={**os.environ, **program.env, **ours})


def _run(what: str, program: Program, on_line: Callable[[str], None]) -> Sequence[str]:
    """Run *program* to its end; return its last lines."""
    lines: deque[str] = deque(maxlen=MAX_LINES)
    with _started(what, program) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines, on_line), name="evaluation", daemon=True)
        reader.start()
        try:
            status = process.wait(program.timeout_seconds)
        except subprocess.TimeoutExpired:
            raise EvaluationFailed(what, f"it took longer than {duration(program.timeout_seconds)} and was killed{_last(lines)}") from None
        reader.join(DRAIN_SECONDS)
    if status < 0:
        raise EvaluationFailed(what, f"it was killed by {signal.Signals(-status).name}{_last(lines)}")
    if status:
        raise EvaluationFailed(what, f"it exited with status {status}{_last(lines)}")
    return list(lines)


@contextmanager
def _started(what: str, program: Program) -> Iterator[subprocess.Popen[str]]:
    """Run *program* in a process group of its own, which is killed after the block."""
    try:
        process = subprocess.Popen(
            list(program.command),
            env=program.env,
            cwd=program.workdir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise EvaluationFailed(what, f"`{program.command[0]}` could not be started: {error.strerror or error}") from error
    try:
        yield process
    finally:
        kill_group(process.pid, signal.SIGKILL)
        process.wait()


def _read(output: IO[str], lines: deque[str], on_line: Callable[[str], None]) -> None:
    with output:
        for line in output:
            lines.append(line.rstrip("\n"))
            on_line(lines[-1])


def _last(lines: Sequence[str]) -> str:
    """Return the last line that is not empty: of a traceback it names the error."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; its last line: {clipped(last, MAX_QUOTED)}" if last else "; it printed nothing"


def _written(what: str, report: Path) -> dict[str, Any] | None:
    """Return the metrics in the file; None when it was not written."""
    try:
        text = report.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        metrics = json.loads(text)
    except ValueError as error:
        raise EvaluationFailed(what, f"the file that {METRICS} names is not JSON: {error}") from None
    if not isinstance(metrics, dict):
        raise EvaluationFailed(what, f"the file that {METRICS} names holds {type(metrics).__name__}, not a JSON object")
    return metrics


def _printed(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the last JSON object among the printed *lines*."""
    for line in reversed(lines):
        with suppress(ValueError):
            if line.lstrip().startswith("{") and isinstance(found := json.loads(line), dict):
                return found
    return None
