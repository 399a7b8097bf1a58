"""Break a running job on purpose: kill, stop and raise in ranks, take agents and nodes away, at a chosen step.

For the demo, the tests and the benchmarks. Every act returns when it was done (wall clock), so that
detection can be measured from the fault itself.
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
from holdfast.protocol import PROTOCOL, LineBuffer, Message, encode

T = TypeVar("T")
LOOKS, LOOK_SECONDS = 20, 0.1  # an agent that moves its ranks away or ends may answer one question and not the next

if TYPE_CHECKING:
    from holdfast.cluster.local import LocalNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a rank lives now."""

    rank: int
    node: str
    pid: int


class Chaos:
    """Breaks one job on a local cluster."""

    def __init__(self, nodes: LocalNodes, history: History, job: str) -> None:
        self._nodes, self._history, self._job = nodes, history, job

    def ask(self, node: str) -> Message:
        """Return what the agent of *node* says of itself, as anybody may ask who can reach it."""
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
        """Return where every rank lives."""
        return {
            int(rank): Placed(rank=int(rank), node=node, pid=pid)
            for node, told in self._tellings().items()
            for rank, pid in told["workers"].items()
            if pid
        }

    def parked(self, but: Collection[str] = ()) -> int:
        """Return how many standbys wait for a rank, on all nodes *but* some."""
        tellings = {node: told for node, told in self._tellings().items() if node not in but}
        return sum(bool(one["ready"]) for told in tellings.values() for one in told.get("standbys", {}).values())

    def _tellings(self) -> dict[str, Message]:
        """Return what the agent of every node says that is up; one that ends while it is asked has left, as the next look shows."""
        looks = 1
        while True:
            try:
                return {view.name: self.ask(view.name) for view in self._nodes.survey() if view.status == "up"}
            except NodeLost:
                if looks == LOOKS:
                    raise
            looks += 1
            time.sleep(LOOK_SECONDS)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to the process of *rank*."""
        os.kill(self.ranks()[rank].pid, number)
        return time.time()

    def kill(self, rank: int) -> float:
        """End *rank* by SIGKILL."""
        return self.signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> float:
        """Stop *rank* by SIGSTOP: it lives, and does nothing."""
        return self.signal(rank, signal.SIGSTOP)

    def kill_agent(self, node: str) -> float:
        """End the agent of *node* by SIGKILL; the node itself stays."""
        os.kill(self.ask(node)["pid"], signal.SIGKILL)
        return time.time()

    def power_off(self, rank: int) -> tuple[float, str]:
        """Take the whole node of *rank* away; return when, and which node it was."""
        node = self.ranks()[rank].node
        at = time.time()
        self._nodes.power_off(node)
        return at, node

    def power_on(self, node: str) -> None:
        """Let *node* answer again."""
        self._nodes.power_on(node)

    def step(self) -> int:
        """Return the newest step that the job has finished; 0 while there is none, or no job yet."""
        job = queries.live_job(self._history, self._job)
        newest = queries.last_step(self._history, job.id) if job is not None else None
        return newest.step if newest is not None else 0

    def complete(self) -> bool:
        """Tell whether all ranks of the newest generation are at work: one may have made many steps before another began."""
        job = queries.live_job(self._history, self._job)
        generations = queries.generations(self._history, job.id) if job is not None else []
        return bool(generations) and generations[-1].first_step_at is not None

    def at_step(self, step: int, act: Callable[[], T], *, parked: int = 0, seconds: float = 300.0) -> T:
        """Do *act* once *step* is done, all ranks are at work and so many standbys are *parked*.

        Raise ``TimeoutError`` when it does not get there.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.step() >= step and self.complete() and (not parked or self.parked() >= parked):
                return act()
            time.sleep(0.02)
        raise TimeoutError(f"job {self._job} did not reach step {step} with {parked} standby(s) parked within {seconds:.0f} s")
