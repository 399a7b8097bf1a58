"""The child that judges what only torch can read: `holdfast.runtime.checkpoint_verifier`, one task after the other."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from holdfast.runtime.checkpoint_verifier.findings import Findings
from holdfast.source_tree import source_tree_env


class VerifierProcess:
    """Starts the process when it is first asked, with the job's own Python."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(OSError):
                self._process.stdin.close()  # it ends when nothing more can come
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
        self._stderr.close()

    def ask(self, *, disk: Path | None = None, memory: Sequence[Path] = (), world: int = 0) -> Findings:
        """Have a checkpoint, or the snapshots of one step, or both judged; what keeps the process from it is a finding too."""
        task = {"disk": None if disk is None else str(disk), "memory": [str(path) for path in memory], "world": world}
        try:
            return self._answer(task)
        except (OSError, ValueError) as error:
            why = self._last_line() or str(error)
            return Findings(broken=[f"the proof could not be made by {self._python}: {why}"])

    def _answer(self, task: dict[str, Any]) -> Findings:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        return Findings(**json.loads(process.stdout.readline()))

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # training needs the cores more
        environment |= source_tree_env(os.environ)
        return subprocess.Popen(
            [self._python, "-m", "holdfast.runtime.checkpoint_verifier"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
            cwd="/",
        )

    def _last_line(self) -> str:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return lines[-1][:300] if lines else ""
