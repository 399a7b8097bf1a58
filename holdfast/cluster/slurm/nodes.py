"""The nodes that Slurm has given to a job: reached through steps of their allocations, with agents that live as long as these."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from holdfast.agent.workers import log_files
from holdfast.cluster.interface import Confirm, Logs, NodeView
from holdfast.cluster.local import logs_here
from holdfast.cluster.remote import HANDS, REACH_SECONDS, RemoteNodes
from holdfast.cluster.slurm.allocation_request import IDLE
from holdfast.cluster.slurm.allocations import Allocations
from holdfast.cluster.slurm.parsing import SlurmNodeState
from holdfast.cluster.slurm.step_launcher import NONE
from holdfast.cluster.slurm.transport import SlurmTransport, directory_of, handed_on, python_of, step
from holdfast.errors import HoldfastError, NodeLost
from holdfast.paths import job_directory
from holdfast.protocol import BadLine, decode
from holdfast.spec import SlurmCluster

START_SECONDS: Final = 40.0
"""How long an agent may take to listen: a step has to begin, and perhaps a warden before it."""
SOON: Final = 0.25
"""Seconds between two attempts at a warden that was begun a moment ago."""


@dataclass(frozen=True, slots=True)
class SlurmPlace:
    """What a cluster's description says about what is done on its nodes."""

    name: str
    directory: str
    interface: str | None
    domains: dict[str, str]
    names: list[str] = field(default_factory=list)
    directories: dict[str, str] = field(default_factory=dict)
    interfaces: dict[str, str] = field(default_factory=dict)


class SlurmNodes(RemoteNodes):
    """Nodes of allocations. Others are only named, with what Slurm says of them."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.allocator = Allocations(cluster)
        self._spec = cluster
        self._wardens: list[subprocess.Popen[bytes]] = []
        reach = SlurmTransport(cluster, self._allocation_of, self._state_of)
        super().__init__(SlurmPlace(cluster.name, directory_of(cluster), cluster.interface, cluster.domains), reach)
        self._domains = dict(cluster.domains)

    def _allocation_of(self, node: str) -> str | None:
        found = self.allocator.allocation_of(node)
        return None if found is None else found.id

    def _state_of(self, node: str) -> SlurmNodeState | None:
        return self.allocator.states.get(node)

    def names(self) -> list[str]:
        """Return the names of the cluster's nodes, in Slurm's order."""
        if not self.allocator.states:
            self._learn()
        return list(dict.fromkeys([*self.allocator.states, *self.allocator.nodes()]))

    def _learn(self) -> None:
        """Ask now, where nobody has begun to follow what Slurm says."""
        if not self.allocator.is_followed:
            self.allocator.look()

    # -- agents -------------------------------------------------------------------------------------------------------

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Have the node's warden start an agent; start a warden first where none came with the allocation."""
        if confirm is not None:
            self._admit(node, confirm)
        until = time.monotonic() + START_SECONDS
        told = self._ask_warden(node)
        if told is None:
            self._begin_warden(node)
            while told is None and time.monotonic() < until:
                time.sleep(SOON)
                told = self._ask_warden(node)
        if told is None:
            raise NodeLost(node, "no warden could be started in its allocation")
        if not told.get("ready"):
            raise NodeLost(node, f"its agent did not come up: {told.get('why', 'no word from it')}")

    def _admit(self, node: str, confirm: Confirm) -> None:
        """See that the node takes orders of this flow; wardens know nothing of flows."""
        try:
            self.command(node, "admit", confirm)
        except OSError as error:
            raise NodeLost(node, f"no agent may be started there: {error.strerror or error}") from error

    def _step(self, node: str, *words: str) -> list[str]:
        allocation = self._allocation_of(node)
        if allocation is None:
            raise NodeLost(node, "it is in no allocation of this job")
        program = [python_of(self._spec), "-m", "holdfast.cluster.slurm.step_launcher", "--directory", directory_of(self._spec)]
        return step(allocation, node, *program, *words)

    def _ask_warden(self, node: str) -> dict[str, Any] | None:
        """Return what the agent or its warden says; None where there is no warden."""
        command = self._step(node, "--start", node, "--cluster", self.name)
        try:
            done = subprocess.run(
                command, env=handed_on(), stdin=subprocess.DEVNULL, capture_output=True, timeout=START_SECONDS, cwd="/", check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeLost(node, f"no step could be run there: {error}") from error
        if done.returncode == NONE:
            return None
        try:
            return decode(done.stdout.splitlines()[-1])
        except (BadLine, IndexError):
            why = " ".join(done.stderr.decode("utf-8", "replace").split())[-300:]
            raise NodeLost(node, f"no step could be run there: {why or f'status {done.returncode}'}") from None

    def _begin_warden(self, node: str) -> None:
        """Begin a warden in a step that outlives this process, if not what it runs on: for an allocation that is not ours."""
        self._wardens.append(
            subprocess.Popen(
                self._step(node, "--idle", str(IDLE)),
                env=handed_on(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        )

    def node_settings(self, node: str, job: str) -> dict[str, Any]:
        """Return what of a job's plan is this node's own. Logs go where the job's are: the nodes of a Slurm cluster share homes."""
        return {name: value for name, value in super().node_settings(node, job).items() if name != "log_directory"}

    def logs(self, node: str, job: str) -> Logs:  # noqa: ARG002 (as above)
        """Return the logs of the ranks of *job*, wherever they ran."""
        return logs_here(job)

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of the agent's, from byte *at* on or the last ones."""
        if name == log_files.AGENT:
            return self._log_of_agent(node, job, at, most)
        return log_files.piece(job_directory(job) / "logs", name, at, most)

    def _log_of_agent(self, node: str, job: str, at: int | None, most: int) -> bytes:
        """Return a piece of what agents of *node* wrote on its own disk; when its allocation is over, only where that is shared."""
        if self._allocation_of(node) is not None:
            return super().log(node, job, log_files.AGENT, at, most)
        folder = Path(directory_of(self._spec)).expanduser().absolute() / "nodes" / node
        if folder.is_dir() and folder.stat().st_uid == os.geteuid():  # /tmp is everybody's
            return log_files.piece(folder, log_files.AGENT, at, most)
        raise NodeLost(node, f"it is in no allocation of this job any more: what its agents wrote is there, in {folder.parent}")

    # -- nodes --------------------------------------------------------------------------------------------------------

    def answers(self, node: str) -> bool:
        """Tell whether *node* answers now, by a step of its own."""
        return self.allocator.is_allocated(node) and super().answers(node)

    def any_other_reachable(self, but: Collection[str]) -> bool:  # noqa: ARG002 (nodes that are not ours say nothing)
        """Tell whether Slurm's controller answers now: it is there to say what becomes of nodes."""
        return self.allocator.answers()

    def survey(self, seconds: float | None = None) -> list[NodeView]:  # noqa: ARG002 (as the interface has it)
        """Look at all nodes that we have; of the others say what Slurm says. Steps take their time to begin; Slurm knows the dead."""
        names, ours = self.names(), self.allocator.nodes()
        with ThreadPoolExecutor(min(HANDS, max(1, len(ours))), thread_name_prefix="survey") as hands:
            views = dict(zip(ours, hands.map(lambda node: self._view(node, REACH_SECONDS), ours), strict=True))
        return [self._placed(views[name]) if name in views else self._elsewhere(name) for name in names]

    def _placed(self, view: NodeView) -> NodeView:
        return replace(view, allocation=self._allocation_of(view.name))

    def _elsewhere(self, node: str) -> NodeView:
        state = self.allocator.states.get(node)
        said = "" if state is None else f"Slurm has it {state.describe()}"
        return NodeView(name=node, status="away", why=said)

    def close(self) -> None:
        """Let go of all connections. Agents, and the allocations that they are in, go on."""
        super().close()
        for warden in self._wardens:
            warden.poll()


def told_of(cluster: SlurmCluster, job: str, name: str) -> str:
    """Return how the allocations of a job (its id, and what it is called) stand, in words."""
    seen = Allocations(cluster, job, name)
    try:
        seen.look()
    except HoldfastError as error:
        return str(error)
    return "\n".join(one.describe() for one in seen.present) or "it has no allocation"
