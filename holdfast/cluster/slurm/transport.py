"""Run programs on the nodes of an allocation, each in its own job step."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.cluster.slurm.commands import node_environment
from holdfast.cluster.slurm.parsing import SlurmNodeState
from holdfast.errors import NodeLost, NodeStateUnknown, NoSlurm
from holdfast.spec import SlurmCluster

MAX_SHOWN: Final = 200
"""Letters of an error message that are shown."""
NOT_THE_NODE: Final = re.compile(r"unable to contact slurm controller|temporarily unable|socket timed out|authentication", re.IGNORECASE)
"""Errors of srun that say nothing about the node."""


def step(allocation: str, node: str, *argv: str) -> list[str]:
    """Return the command that runs *argv* on *node* alongside the allocation's other steps, without taking resources from them."""
    program = shutil.which("srun")
    if program is None:
        raise NoSlurm("srun")
    options = [f"--jobid={allocation}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none"]
    return [program, *options, "--quiet", "--chdir=/", *argv]


class StepPipe:
    """The standard input and output of a proxy, through `srun`."""

    def __init__(self, argv: list[str], python: str) -> None:
        self._python = python
        self._process = subprocess.Popen(
            argv,
            env=node_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # a Ctrl-C for us ends no step
        )
        self._errors, self._has_output, self._errors_read = b"", False, threading.Event()
        self._once = threading.Lock()
        threading.Thread(target=self._read_errors, name="srun errors", daemon=True).start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError):
            while data := self._process.stderr.read(4096):
                self._errors = (self._errors + data)[-4096:]
        self._errors_read.set()

    def recv(self, size: int) -> bytes:
        """Return output of the proxy; raise ``ConnectionRefusedError`` when the node is down or was taken out of the allocation."""
        assert self._process.stdout is not None
        try:
            data = self._process.stdout.read(size) or b""
        except ValueError as error:  # closed meanwhile
            raise BrokenPipeError(str(error)) from error
        if not data and not self._has_output:
            self._wait()
            lines = [line for line in self._errors.decode("utf-8", "replace").splitlines() if line.startswith("srun: error:")]
            if lines and not self._has_no_holdfast() and not NOT_THE_NODE.search(lines[0]):
                raise ConnectionRefusedError(lines[0].removeprefix("srun: error:").strip()[:MAX_SHOWN])
        self._has_output = True
        return data

    def sendall(self, data: bytes) -> None:
        """Send *data* to the proxy."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) or 0 :]
        except ValueError as error:
            raise BrokenPipeError(str(error)) from error

    def ended(self) -> str:
        """Return why the step ended without a greeting of the proxy."""
        self._wait()
        if self._has_no_holdfast():
            return f"{self._python} on the node has no Holdfast: install it there, or name the interpreter that has it in `python`"
        lines = [line for line in self._errors.decode("utf-8", "replace").splitlines() if line.strip()]
        last = "".join(letter if letter.isprintable() else "?" for letter in (lines[-1] if lines else ""))
        return f"its step ended without output{f' ({last[:MAX_SHOWN]})' if last else ''}"

    def close(self) -> None:
        """End the step."""
        if self._once.acquire(blocking=False):
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()  # the proxy exits by itself when it sees this
            threading.Thread(target=self._end, name="srun end", daemon=True).start()

    def _end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.terminate()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:  # it waits for a node that is unreachable
            self._process.kill()
            self._process.wait()
        self._errors_read.wait(2.0)
        for file in (self._process.stdout, self._process.stderr):
            if file is not None:
                file.close()

    def _wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors_read.wait(1.0)

    def _has_no_holdfast(self) -> bool:
        return b"No module named" in self._errors or b"No such file" in self._errors


class SlurmTransport:
    """Starts proxies in job steps."""

    def __init__(
        self, cluster: SlurmCluster, allocation_of: Callable[[str], str | None], state_of: Callable[[str], SlurmNodeState | None]
    ) -> None:
        self._python, self._allocation_of, self._state_of = cluster.python or sys.executable, allocation_of, state_of

    def open(self, node: str, until: float, then: float) -> StepPipe:  # noqa: ARG002 (a step has no deadline: the caller closes the pipe)
        """Start a proxy on *node*; raise `NodeLost` when the node is in no allocation of ours, or its slurmd accepts no connection."""
        allocation, state = self._allocation_of(node), self._state_of(node)
        if allocation is None:
            raise NodeLost(node, "it is in no allocation of this job")
        if state is not None and state.port:
            try:  # fails at once where srun would retry for ten seconds and more
                socket.create_connection((state.address, state.port), timeout=max(0.05, until - time.monotonic())).close()
            except socket.gaierror:  # this host cannot resolve the name: srun may
                pass
            except OSError as error:
                raise NodeLost(node, f"its slurmd accepts no connection: {error.strerror or error}") from error
        try:
            return StepPipe(step(allocation, node, self._python, "-m", "holdfast.agent.node.proxy"), self._python)
        except OSError as error:
            raise NodeStateUnknown(node, f"no step can be started: {error}") from error

    def address(self, node: str) -> str:
        """Return Slurm's address of *node*: IPv6 only where it has no other; the name where this host cannot resolve it."""
        state = self._state_of(node)
        name = node if state is None or not state.address else state.address
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            return name
        # IPv4 where there are both: every machine speaks it, and only some may have a route to the IPv6 address.
        return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])

    def close(self) -> None:
        """Do nothing: each pipe has its own step."""
