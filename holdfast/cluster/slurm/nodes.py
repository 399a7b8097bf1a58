"""Reach the nodes that Slurm has allocated to a job: through steps of their allocations, with agents that live as long as these."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from holdfast.agent.workers import log_files
from holdfast.cluster.interface import Confirm, Logs, NodeView
from holdfast.cluster.local import logs_here
from holdfast.cluster.remote import CONNECT_SECONDS, MAX_THREADS, RemoteCluster, RemoteNodes
from holdfast.cluster.slurm.allocations import Allocations
from holdfast.cluster.slurm.commands import IDLE_SECONDS, directory_of, launcher_command, node_environment
from holdfast.cluster.slurm.parsing import SlurmNodeState
from holdfast.cluster.slurm.step_launcher import NO_LAUNCHER
from holdfast.cluster.slurm.transport import SlurmTransport, step
from holdfast.errors import HoldfastError, NodeLost
from holdfast.paths import job_directory
from holdfast.protocol import BadLine, decode
from holdfast.spec import SlurmCluster

START_SECONDS: Final = 40.0
"""Time for an agent to listen: a step has to start, and perhaps a step launcher before it."""
RETRY_SECONDS: Final = 0.25
"""Time between two requests to a step launcher that is starting."""
_LAUNCHERS: Final[list[subprocess.Popen[bytes]]] = []
"""Step launchers that this process started and that still run: they outlive the object that started them, and are reaped when they end."""


class SlurmNodes(RemoteNodes):
    """The nodes of a job's allocations. Slurm's other nodes are only listed, with their state in Slurm."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.allocator = Allocations(cluster)
        self._spec = cluster
        transport = SlurmTransport(cluster, self._allocation_of, self._state_of)
        super().__init__(RemoteCluster(cluster.name, directory_of(cluster), cluster.interface, cluster.failure_domains), transport)
        self._domains = dict(cluster.failure_domains)

    def _allocation_of(self, node: str) -> str | None:
        found = self.allocator.by_node.get(node)
        return None if found is None else found.id

    def _state_of(self, node: str) -> SlurmNodeState | None:
        return self.allocator.states.get(node)

    def names(self) -> list[str]:
        """Return the names of the cluster's nodes, in Slurm's order."""
        if not self.allocator.states and not self.allocator.is_followed:
            self.allocator.poll()
        return list(dict.fromkeys([*self.allocator.states, *self.allocator.by_node]))

    # -- agents -------------------------------------------------------------------------------------------------------

    def start_agent(self, node: str, confirm: Confirm | None = None) -> None:
        """Have the node's step launcher start an agent; start a launcher first where none came with the allocation."""
        if confirm is not None:  # step launchers know nothing of controllers: the node's proxy checks the token
            try:
                self.fenced_command(node, "admit", confirm)
            except OSError as error:
                raise NodeLost(node, f"no agent may be started there: {error.strerror or error}") from error
        until = time.monotonic() + START_SECONDS
        answer = self._request_agent(node)
        if answer is None:
            self._start_launcher(node)
            while answer is None and time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                answer = self._request_agent(node)
        if answer is None:
            raise NodeLost(node, "could not start the Holdfast step launcher in its allocation")
        if not answer.get("ready"):
            raise NodeLost(node, f"its agent did not start: {answer.get('why', 'no reason is known')}")

    def _launcher_step(self, node: str, *options: str) -> list[str]:
        allocation = self._allocation_of(node)
        if allocation is None:
            raise NodeLost(node, "it is in no allocation of this job")
        return step(allocation, node, *launcher_command(self._spec, *options))

    def _request_agent(self, node: str) -> dict[str, Any] | None:
        """Return the answer of the agent or of its step launcher; None where there is no launcher."""
        command = self._launcher_step(node, "--start", node, "--cluster", self.name)
        try:
            done = subprocess.run(
                command, env=node_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=START_SECONDS, cwd="/", check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeLost(node, f"no step could be run there: {error}") from error
        if done.returncode == NO_LAUNCHER:
            return None
        try:
            return decode(done.stdout.splitlines()[-1])
        except (BadLine, IndexError):
            why = " ".join(done.stderr.decode("utf-8", "replace").split())[-300:]
            raise NodeLost(node, f"no step could be run there: {why or f'status {done.returncode}'}") from None

    def _start_launcher(self, node: str) -> None:
        """Start a step launcher that outlives this process, but not this host: for an allocation that is not ours."""
        _LAUNCHERS[:] = [one for one in _LAUNCHERS if one.poll() is None]
        _LAUNCHERS.append(
            subprocess.Popen(
                self._launcher_step(node, "--idle", str(IDLE_SECONDS)),
                env=node_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        )

    def node_settings(self, node: str, job: str) -> dict[str, Any]:
        """Return what of a job's plan is this node's own. Logs go to the job's folder: the nodes of a Slurm cluster share homes."""
        return {name: value for name, value in super().node_settings(node, job).items() if name != "log_directory"}

    def logs(self, node: str, job: str) -> Logs:  # noqa: ARG002 (as above)
        """Return the logs of the ranks of *job*, wherever they ran."""
        return logs_here(job)

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return up to *most* bytes of such a log, or of the agent's: from byte *at*, or the last ones.

        The agent's is on the node's own disk: once the allocation has ended, it is readable only where that is shared.
        """
        if name != log_files.AGENT:
            return log_files.read_part(job_directory(job) / "logs", name, at, most)
        if self._allocation_of(node) is not None:
            return super().log(node, job, name, at, most)
        folder = Path(directory_of(self._spec)).expanduser().absolute() / "nodes" / node
        if folder.is_dir() and folder.stat().st_uid == os.geteuid():  # everybody can write to /tmp
            return log_files.read_part(folder, name, at, most)
        raise NodeLost(node, f"it is in no allocation of this job any more: its agent's log is on that node, in {folder.parent}")

    # -- nodes --------------------------------------------------------------------------------------------------------

    def is_reachable(self, node: str) -> bool:
        """Return whether *node* is allocated and reachable now, by its own step."""
        return self.allocator.is_allocated(node) and super().is_reachable(node)

    def any_other_reachable(self, but: Collection[str]) -> bool:  # noqa: ARG002 (nodes of other jobs say nothing)
        """Return whether Slurm's controller is reachable now: it knows what happens to nodes."""
        return self.allocator.is_slurm_reachable()

    def survey(self, seconds: float | None = None) -> list[NodeView]:  # noqa: ARG002 (a step takes its time to start)
        """Look at all nodes that are allocated; of the others return the state in Slurm."""
        names, ours = self.names(), list(self.allocator.by_node)
        with ThreadPoolExecutor(min(MAX_THREADS, max(1, len(ours))), thread_name_prefix="survey") as pool:
            views = dict(zip(ours, pool.map(lambda node: self._view(node, CONNECT_SECONDS), ours), strict=True))
        found = []
        for name in names:
            if name in views:
                found.append(replace(views[name], allocation=self._allocation_of(name)))
            else:
                state = self._state_of(name)
                found.append(NodeView(name=name, status="away", why="" if state is None else f"in Slurm it is {state.describe()}"))
        return found

    def close(self) -> None:
        """Close all connections. Agents, and the allocations that they are in, go on."""
        super().close()
        _LAUNCHERS[:] = [one for one in _LAUNCHERS if one.poll() is None]


def describe_allocations(cluster: SlurmCluster, job: str, name: str) -> str:
    """Return the states of the allocations of *job* (its id), called *name*, as text."""
    found = Allocations(cluster, job, name)
    try:
        found.poll()
    except HoldfastError as error:
        return str(error)
    return "\n".join(one.describe() for one in found.present) or "it has no allocation"
