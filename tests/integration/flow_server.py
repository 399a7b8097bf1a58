"""Fork a flow for each order: a program that `Flows` speaks with, itself forked from a process that has Prefect and the flow imported.

Nothing here starts a thread or a connection before the fork, so a fork is as good as ``python -m holdfast.flows.training_job``, and three
seconds of a core cheaper. That those words themselves work is seen wherever a test uses the command, and where a stage has its own Prefect
server.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.imported import Program
from tests.reaping import Children
from tests.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
IMPORTS: Final = (
    *("holdfast.flows.training_job", "holdfast.prefect_client.flow_program", "tests.integration.flow_server"),
    *("fastapi", "graphviz", "prefect.flow_engine", "prefect.task_engine", "sqlalchemy.dialects.sqlite"),
)
"""What a flow is, and what it imports when it runs, which is a third of the work of a short one."""


class Flows:
    """The tests' end: starts flows, and knows how they ended."""

    def __init__(self, imported: Path, environment: Mapping[str, str]) -> None:
        """Have the process at the socket *imported*, which has `IMPORTS` imported with the Prefect of *environment*, fork the server."""
        self.prefect = prefect_of(environment)
        self._server = Program(imported, "tests.integration.flow_server", environment={**environment, "PYTHONPATH": str(ROOT)})
        assert self._server.ask({}) == {}

    def start(self, spec: Path, log: Path, environment: Mapping[str, str]) -> Flow:
        """Start a flow for the job that *spec* describes, with *environment* and nothing else of ours; what it prints goes to *log*."""
        assert prefect_of(environment) == self.prefect, "Prefect's settings are read when it is imported"
        return Flow(int(self._server.ask({"spec": str(spec), "log": str(log), "environment": dict(environment)})["pid"]), self)

    def ended(self, pid: int) -> int | None:
        """Return the exit status (negative: the signal) of a flow that has ended."""
        status = self._server.ask({}).get(str(pid))
        return None if status is None else int(status)

    def close(self) -> None:
        """End the server; flows are the stages' to end."""
        self._server.close()


@dataclass
class Flow:
    """One flow's process, with the words of `subprocess.Popen`."""

    pid: int
    flows: Flows
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, if it has ended."""
        if self.returncode is None:
            self.returncode = self.flows.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit status, once it has ended."""
        try:
            wait_until(lambda: self.poll() is not None, seconds=timeout)
        except AssertionError:
            raise subprocess.TimeoutExpired("flow", timeout) from None
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def prefect_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of *environment* Prefect reads."""
    return {name: value for name, value in environment.items() if name.startswith("PREFECT_")}


def main() -> None:
    """Serve one order after another until there are no more; in a fork, become the flow."""
    from holdfast.flows.training_job import training_job  # noqa: PLC0415
    from holdfast.prefect_client import flow_program  # noqa: PLC0415 (the tests' end needs none of it)

    children = Children()
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if "spec" in order:
            pid = os.fork()
            if not pid:
                become(order["log"], order["environment"])
                end(flow_program.main([order["spec"]], training_job))
            children.begun(pid)
            answer = {"pid": pid}
        else:
            answer = children.ended()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def end(status: int) -> NoReturn:
    """End a flow as the interpreter does, but for taking all modules apart: that is most of a second of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(log: str, environment: dict[str, str]) -> None:
    """Have a session, files and an environment of one's own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.clear()
    os.environ.update(environment)
