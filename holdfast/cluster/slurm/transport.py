"""Programs on nodes of an allocation, each in a step of its own: gates and wardens."""

from __future__ import annotations

import os
import pwd
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

from holdfast.cluster.slurm.commands import environment
from holdfast.cluster.slurm.parsing import SlurmNodeState
from holdfast.errors import NodeLost, NodeStateUnknown, NoSlurm
from holdfast.source_tree import source_tree_env
from holdfast.spec import SlurmCluster

SHOWN: Final = 200
AWAY: Final = re.compile(r"unable to contact slurm controller|temporarily unable|socket timed out|authentication", re.IGNORECASE)
"""What srun says of troubles that are not the node's."""


def user() -> str:
    """Return the name of who runs this."""
    return pwd.getpwuid(os.geteuid()).pw_name


def directory_of(cluster: SlurmCluster) -> str:
    """Return the folder on each node for what is ours."""
    return cluster.directory or f"/tmp/holdfast-{user()}"  # noqa: S108 (the warden takes it only when it is ours)


def python_of(cluster: SlurmCluster) -> str:
    """Return the interpreter on the nodes."""
    return cluster.python or sys.executable


def handed_on() -> dict[str, str]:
    """Return the environment of what runs on nodes. From a source tree, which nodes share as they do homes, they take it from there."""
    words = environment()
    return words | source_tree_env(words)


def step(allocation: str, node: str, *argv: str) -> list[str]:
    """Return the command that runs *argv* on *node* beside whatever else runs in the allocation, and takes nothing from it."""
    program = shutil.which("srun")
    if program is None:
        raise NoSlurm("srun")
    words = [f"--jobid={allocation}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none"]
    return [program, *words, "--quiet", "--chdir=/", *argv]


class StepPipe:
    """A gate's standard input and output, through `srun`."""

    def __init__(self, argv: list[str], python: str) -> None:
        self._python = python
        self._process = subprocess.Popen(
            argv,
            env=handed_on(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # a Ctrl-C that is meant for us ends no step
        )
        self._said, self._spoke, self._heard = b"", False, threading.Event()
        self._once = threading.Lock()
        threading.Thread(target=self._hear, name="srun errors", daemon=True).start()

    def _hear(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError):
            while data := self._process.stderr.read(4096):
                self._said = (self._said + data)[-4096:]
        self._heard.set()

    def recv(self, size: int) -> bytes:
        """Return what the gate said."""
        assert self._process.stdout is not None
        try:
            data = self._process.stdout.read(size) or b""
        except ValueError as error:  # closed meanwhile
            raise BrokenPipeError(str(error)) from error
        if not data and not self._spoke and (why := self._unreached()):
            raise ConnectionRefusedError(why)
        self._spoke = True
        return data

    def _unreached(self) -> str:
        """Say why Slurm could not begin the step, if it was for the node's sake: it is down, or was taken out of the allocation."""
        self._wait()
        lines = [line for line in self._said.decode("utf-8", "replace").splitlines() if line.startswith("srun: error:")]
        if not lines or _is_missing(self._said) or AWAY.search(lines[0]):
            return ""
        return lines[0].removeprefix("srun: error:").strip()[:SHOWN]

    def _wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._heard.wait(1.0)

    def sendall(self, data: bytes) -> None:
        """Say *data* to the gate."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) or 0 :]
        except ValueError as error:
            raise BrokenPipeError(str(error)) from error

    def close(self) -> None:
        """End the step."""
        if self._once.acquire(blocking=False):
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()  # the gate ends by itself where it can hear this
            threading.Thread(target=self._end, name="srun end", daemon=True).start()

    def _end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.terminate()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:  # it waits for a node that does not answer
            self._process.kill()
            self._process.wait()
        self._heard.wait(2.0)
        for file in (self._process.stdout, self._process.stderr):  # nobody waits in them any more: what has ended gives no more
            if file is not None:
                file.close()

    def ended(self) -> str:
        """Return why there is no gate."""
        self._wait()
        return _why(self._said, self._python)


def _is_missing(said: bytes) -> bool:
    return b"No module named" in said or b"No such file" in said


def _why(said: bytes, python: str) -> str:
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    if _is_missing(said):
        return f"there is no Holdfast in {python} on the node: install it there, or name the interpreter that has it in `python`"
    words = "".join(letter if letter.isprintable() else "?" for letter in (lines[-1] if lines else ""))
    return f"its step ended before it spoke{f' ({words[:SHOWN]})' if words else ''}"


class SlurmTransport:
    """Starts gates in steps."""

    def __init__(
        self, cluster: SlurmCluster, allocation_of: Callable[[str], str | None], state_of: Callable[[str], SlurmNodeState | None]
    ) -> None:
        self._python, self._allocation_of, self._state_of = python_of(cluster), allocation_of, state_of

    def open(self, node: str, until: float, then: float) -> StepPipe:  # noqa: ARG002 (a step has no deadline of its own: who waits ends it)
        """Start a gate on *node*; raise `NodeLost` when the node is in no allocation of ours, or nobody takes connections there."""
        allocation = self._allocation_of(node)
        if allocation is None:
            raise NodeLost(node, "it is in no allocation of this job")
        self._knock(node, until)
        try:
            return StepPipe(step(allocation, node, self._python, "-m", "holdfast.agent.node.proxy"), self._python)
        except OSError as error:
            raise NodeStateUnknown(node, f"no step can be started: {error}") from error

    def _knock(self, node: str, until: float) -> None:
        """See that slurmd's port takes a connection, which is known at once: `srun` tries for ten seconds and more."""
        state = self._state_of(node)
        if state is None or not state.port:
            return
        try:
            socket.create_connection((state.address, state.port), timeout=max(0.05, until - time.monotonic())).close()
        except socket.gaierror:  # its name is not for us to resolve: srun may know better
            return
        except OSError as error:
            raise NodeLost(node, f"slurmd takes no connection there: {error.strerror or error}") from error

    def address(self, node: str) -> str:
        """Return the address that Slurm has of *node*, of IPv6 where it has no other; its name where that is not for us to resolve."""
        state = self._state_of(node)
        told = node if state is None or not state.address else state.address
        try:
            found = socket.getaddrinfo(told, None, type=socket.SOCK_STREAM)
        except OSError:
            return told
        # IPv4 where there is both: every machine speaks it, and the name may have an IPv6 address that only some have a route to
        return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])

    def close(self) -> None:
        """There is nothing to let go of: each pipe is a step of its own."""
