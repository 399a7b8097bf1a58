"""Inject faults into a running job: kill and stop ranks, agents and nodes, at a chosen step.

For the demo, the tests and the benchmarks. Each fault returns its wall-clock time, so that detection can be measured from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import NodeLost
from holdfast.history import History, queries
from holdfast.plurals import plural
from holdfast.protocol import PROTOCOL, LineBuffer, Message, encode

T = TypeVar("T")
ATTEMPTS, RETRY_SECONDS = 20, 0.1  # an agent that is exiting may answer one query and not the next

if TYPE_CHECKING:
    from holdfast.cluster.local import LocalNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The process of a rank."""

    rank: int
    node: str
    pid: int


class Chaos:
    """Injects faults into one job on a local cluster."""

    def __init__(self, nodes: LocalNodes, history: History, job: str) -> None:
        self._nodes, self._history, self._job = nodes, history, job

    def ask(self, node: str) -> Message:
        """Return what the agent of *node* reports about itself; raise `NodeLost` if it does not answer."""
        try:
            with self._nodes.connect(node) as sock:
                sock.settimeout(5.0)
                sock.sendall(encode({"id": 1, "do": "about", "protocol": PROTOCOL}))
                lines = LineBuffer()
                while data := sock.recv(65536):
                    for message in lines.feed(data):
                        return message
        except OSError as error:
            raise NodeLost(node, str(error)) from error
        raise NodeLost(node, "its agent did not answer")

    def ranks(self) -> dict[int, Placed]:
        """Return node and process of every rank."""
        return {
            int(rank): Placed(rank=int(rank), node=node, pid=pid)
            for node, report in self._reports().items()
            for rank, pid in report["workers"].items()
            if pid
        }

    def parked(self, but: Collection[str] = ()) -> int:
        """Return the number of hot spares that wait for a rank, on all nodes *but* some."""
        reports = {node: report for node, report in self._reports().items() if node not in but}
        return sum(bool(one["ready"]) for report in reports.values() for one in report.get("hot_spares", {}).values())

    def _reports(self) -> dict[str, Message]:
        """Return the reports of all running agents; try again if one exits during the query."""
        attempts = 1
        while True:
            try:
                return {view.name: self.ask(view.name) for view in self._nodes.survey() if view.status == "up"}
            except NodeLost:
                if attempts == ATTEMPTS:
                    raise
            attempts += 1
            time.sleep(RETRY_SECONDS)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to the process of *rank*; try again if it has none, as one that is being replaced."""
        attempts = 1
        while True:
            try:
                os.kill(self.ranks()[rank].pid, number)
            except (KeyError, ProcessLookupError) as error:
                if attempts == ATTEMPTS:
                    raise LookupError(f"rank {rank} of job {self._job} has no process") from error
            else:
                return time.time()
            attempts += 1
            time.sleep(RETRY_SECONDS)

    def kill(self, rank: int) -> float:
        """Kill *rank* by SIGKILL."""
        return self.signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> float:
        """Suspend *rank* by SIGSTOP."""
        return self.signal(rank, signal.SIGSTOP)

    def kill_agent(self, node: str) -> float:
        """Kill the agent of *node* by SIGKILL; the node itself stays up."""
        os.kill(self.ask(node)["pid"], signal.SIGKILL)
        return time.time()

    def power_off(self, rank: int) -> tuple[float, str]:
        """Power off the node of *rank*; return the time and the node."""
        node = self.ranks()[rank].node
        at = time.time()
        self._nodes.power_off(node)
        return at, node

    def power_on(self, node: str) -> None:
        """Power on *node*."""
        self._nodes.power_on(node)

    def step(self) -> int:
        """Return the newest finished step of the job; 0 before the first one."""
        job = queries.live_job(self._history, self._job)
        newest = queries.last_step(self._history, job.id) if job is not None else None
        return newest.step if newest is not None else 0

    def complete(self) -> bool:
        """Return whether all ranks of the newest generation have stepped: one may make many steps before another starts."""
        job = queries.live_job(self._history, self._job)
        generations = queries.generations(self._history, job.id) if job is not None else []
        return bool(generations) and generations[-1].first_step_at is not None

    def at_step(self, step: int, act: Callable[[], T], *, parked: int = 0, seconds: float = 300.0) -> T:
        """Call *act* once *step* is finished, all ranks have stepped and *parked* hot spares wait; raise ``TimeoutError`` otherwise."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.step() >= step and self.complete() and (not parked or self.parked() >= parked):
                return act()
            time.sleep(0.02)
        raise TimeoutError(f"job {self._job} did not reach step {step} with {plural(parked, 'hot spare')} ready within {seconds:.0f} s")
