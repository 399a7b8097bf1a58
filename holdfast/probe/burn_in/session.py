"""Run the program of burn-in checks on the nodes of a cluster, whatever its kind."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.cluster.local import LocalNodes
from holdfast.detectors.codec import MalformedData, unpacked
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.errors import AllocationRequired
from holdfast.probe.remote import bundle
from holdfast.probe.remote.program import ChildInterpreter, Interpreter, NoAnswer, NodeUnreachable, ProbeFailed, RemoteProgram

if TYPE_CHECKING:
    from holdfast.spec import Cluster, LocalCluster

START_SECONDS: Final = 30.0
"""Time for an interpreter to start on a busy node."""
OVERTIME: Final = 60.0
"""Seconds that a command may take beyond its own: at the lowest priority, alongside training, and torch takes long to load."""
PINGS: Final = 9
"""Questions about a node's clock; the quickest answer counts."""
NEEDED: Final = (
    "holdfast.detectors.evidence",
    "holdfast.detectors.codec",
    "holdfast.detectors.nodes.burn_in_results",
    "holdfast.security.authenticated_listener",
    "holdfast.plurals",
)
CHECKS: Final = "holdfast.probe.burn_in.checks"


@cache
def program(nice: int) -> str:
    """Return the source of the program that runs checks (`checks.program`), at a priority lower by *nice* than usual."""
    checks = [f"{CHECKS}.{file.stem}" for file in sorted((Path(__file__).parent / "checks").glob("*.py")) if file.stem != "__init__"]
    return bundle.program({name: bundle.source_of(name) for name in (*NEEDED, *checks)}, f"{CHECKS}.program", [str(nice)])


class BurnInSession:
    """The program of checks on one node. One thread at a time may use it."""

    def __init__(self, node: str, interpreter: Interpreter, *, nice: int = 0) -> None:
        """Send the program and wait until it is ready; raise `NoAnswer` when it does not start."""
        self.node = node
        until = time.monotonic() + START_SECONDS
        try:
            with _as_probe_failed():
                self._program = RemoteProgram(interpreter, program(nice), until)
                self.facts: dict[str, Any] = self._program.answer("ready", until)
        except BaseException:
            interpreter.close()
            raise

    def ask(self, do: str, *, seconds: float, **facts: object) -> list[Check]:
        """Run a command that works for *seconds*; without an answer, its check is skipped."""
        try:
            mark = self.begin(do, seconds=seconds, **facts)
            return self.checks(mark, time.monotonic() + seconds + 2 * OVERTIME)
        except NoAnswer as error:
            return [Check(name=do, mark=CheckMark.SKIPPED, words=str(error))]

    def begin(self, do: str, *, seconds: float, **facts: object) -> str:
        """Send a command; return the mark that its answers carry."""
        with _as_probe_failed():
            return self._program.begin(time.monotonic() + START_SECONDS, do=do, seconds=seconds, limit=seconds + OVERTIME, **facts)

    def checks(self, mark: str, until: float) -> list[Check]:
        """Return the checks in the last answer to a command."""
        try:
            return [unpacked(Check, one) for one in self.answer(mark, until)]
        except (MalformedData, TypeError) as error:
            raise ProbeFailed(f"its answer is malformed: {error}") from error

    def answer(self, mark: str, until: float) -> Any:  # noqa: ANN401 (any JSON)
        """Return the next answer with *mark*, by *until* (monotonic)."""
        with _as_probe_failed():
            return self._program.answer(mark, until)

    def offset(self, now: Callable[[], float] = time.time) -> tuple[float, float]:
        """Return by how many seconds the node's clock is ahead of *now*, and the error of that."""
        with _as_probe_failed():
            return self._program.clock_offset(PINGS, START_SECONDS, now)

    def close(self) -> None:
        """End the program and all that it started."""
        self._program.close()


@contextmanager
def _as_probe_failed() -> Iterator[None]:
    """Name the program that gave no answer. That is no fault of the node yet: the command was not carried out."""
    try:
        yield
    except NoAnswer as error:
        raise ProbeFailed(f"the burn-in program exited or could not be reached: {error}") from error


class BurnInConnections(ABC):
    """Starts sessions on the nodes of one cluster."""

    concurrent: bool
    """Whether nodes are different machines, so that all may work at once."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the nodes' names, in the cluster's order."""

    @abstractmethod
    def open(self, node: str) -> BurnInSession:
        """Start the program of checks on *node*; raise `NoAnswer` when that fails."""

    @abstractmethod
    def address(self, node: str) -> str:
        """Return the address at which other nodes reach *node*."""

    @abstractmethod
    def folder(self, node: str) -> str:
        """Return the folder in which the disk of *node* is tested."""

    def close(self) -> None:  # noqa: B027 (without shared connections there is nothing to close)
        """Close all connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_burn_in_connections(cluster: Cluster) -> BurnInConnections:
    """Return the connections to the nodes of *cluster*; raise `OperatorError` when something that they need is missing."""
    if cluster.kind == "local":
        return LocalBurnInConnections(cluster)
    if cluster.kind == "slurm":
        raise AllocationRequired("a burn-in", cluster.name)
    from holdfast.cluster.ssh import SshBurnInConnections  # noqa: PLC0415 (paramiko takes 0.1 s, and most clusters do not need it)

    return SshBurnInConnections(cluster)


class LocalBurnInConnections(BurnInConnections):
    """Nodes that are folders of this machine: each has its own process, and one that is switched off is unreachable."""

    concurrent = False

    def __init__(self, cluster: LocalCluster) -> None:
        self._source = LocalNodes.of(cluster)
        self._folder, self._nice = cluster.burn_in.directory, cluster.burn_in.nice

    def names(self) -> list[str]:
        """Return the nodes' names."""
        return self._source.names()

    def address(self, node: str) -> str:
        """Return the loopback address."""
        return self._source.address(node)

    def folder(self, node: str) -> str:
        """Return the node's own folder, which is made here, unless the cluster file names another one."""
        if self._folder is not None:
            return self._folder
        folder = self._source.folder(node)
        with suppress(OSError):  # the check then reports that it cannot write there
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(folder)

    def open(self, node: str) -> BurnInSession:
        """Start the program of checks."""
        if not self._source.is_reachable(node):
            raise NodeUnreachable("it is switched off")
        return BurnInSession(node, ChildInterpreter(), nice=self._nice)
