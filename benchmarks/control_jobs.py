"""Jobs with faults injected into their control plane: on nodes that are folders of this machine, or on hosts that are reached over SSH."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from benchmarks.chaos_run import TRAINING
from benchmarks.measuring import ROOT
from holdfast.cluster import open_cluster
from holdfast.cluster.local import LocalNodes
from holdfast.errors import HistoryError
from holdfast.history import History, holder_of, models, queries
from holdfast.host.process import mark_of
from holdfast.memstore import store_folders
from holdfast.spec import cluster_of
from holdfast.testing.chaos import Chaos
from holdfast.testing.orphans import leftovers
from tests.hosts.host import Host
from tests.hosts.job import DIRECTORY
from tests.hosts.rack import Rack

PLAN: Final = {"nnodes": 2, "nproc_per_node": 1, "spare_nodes": 1}
NODES: Final = 3
STEPS: Final = 300
REST: Final = "0.04"
OURS: Final = ("holdfast", "train_troubled")
"""Words in the commands of all processes of a job."""


class Job:
    """One job on nodes of its own, which are groups of processes of this machine."""

    def __init__(self, place: Path, history: History, cluster: dict[str, Any] | None = None, **fields: Any) -> None:  # noqa: ANN401 (fields of a job)
        place.mkdir(parents=True)
        self.place, self.name, self.history, self.ranks = place, place.name, history, PLAN["nnodes"]
        cluster = {"name": self.name, **(cluster or {"kind": "local", "nodes": NODES, "directory": str(place / "nodes")})}
        self.nodes = cast("LocalNodes", open_cluster(cluster_of(cluster)))  # agents elsewhere can be asked alike
        self.chaos = Chaos(self.nodes, history, self.name)
        args = [*TRAINING, "--rest", REST, "--result", str(place / "result.json"), "--steps", str(STEPS)]
        job = {"name": self.name, "script": str(self.script()), "args": args, "workdir": str(place)}
        checkpoint = {"directory": str(place / "checkpoints"), "interval": 20}
        self.described = {"job": {**job, **PLAN, "checkpoint": checkpoint, **fields}, "cluster": cluster}

    def script(self) -> Path:
        """Return what the ranks run."""
        return ROOT / "benchmarks" / "train_troubled.py"

    @property
    def row(self) -> models.Job:
        """Return the job's row."""
        return queries.newest_job(self.history, self.name)

    def state(self) -> str:
        """Return the job's state; empty before it has one, and while it is unknown."""
        with suppress(HistoryError):
            rows = queries.jobs(self.history, self.name, limit=1)
            move = queries.state_of(self.history, rows[0].id) if rows else None
            return move.after if move else ""
        return ""

    def lease_holder(self) -> models.Lease | None:
        """Return the lease of the controller."""
        with suppress(HistoryError):
            rows = queries.jobs(self.history, self.name, limit=1)
            return holder_of(self.history, rows[0].id) if rows else None
        return None

    def step(self) -> int:
        """Return the newest step on record."""
        with suppress(HistoryError):
            return self.chaos.step()
        return 0

    def reattached(self) -> list[float]:
        """Return when flows have reattached to the job."""
        return [one.at for one in queries.job_events(self.history, self.row.id) if one.text.startswith("a new flow reattached")]

    def left(self) -> list[str]:
        """Return what is left of it: processes, and what nodes keep in memory."""
        return leftovers(self.place) + [
            str(one) for node in self.nodes.names() for one in store_folders.memstores_of(mark_of(self.nodes.folder(node)))
        ]

    def close(self) -> None:
        """End what still runs."""
        for node in self.nodes.names():
            self.nodes.clear(node)


class HostsJob(Job):
    """One job on the hosts of a rack, all of which have Holdfast, one after another job."""

    def __init__(self, place: Path, history: History, rack: Rack, **fields: Any) -> None:  # noqa: ANN401 (fields of a job)
        self.rack = rack
        super().__init__(place, history, rack.cluster(directory=DIRECTORY), **fields)
        self.described["job"]["env"] = {"OMP_NUM_THREADS": "1"}

    def script(self) -> Path:
        """Lay the script where all hosts see it, with what it imports beside Holdfast, and return it."""
        (self.place / "benchmarks").mkdir()
        shutil.copy(ROOT / "benchmarks" / "troubles.py", self.place / "benchmarks" / "troubles.py")
        return Path(shutil.copy(super().script(), self.place))

    def kill_rank(self, dice: random.Random) -> bool:
        """Kill some rank, as its agent says where it is; return whether there was one."""
        ranks = self.chaos.ranks()
        if not ranks:
            return False
        drawn = ranks[dice.choice(sorted(ranks))]
        return self._killed(self.rack.named(drawn.node), drawn.pid)

    def kill_agent(self, dice: random.Random) -> bool:
        """End the agent of some host by SIGKILL, whose ranks go with it; return whether there was one."""
        up = [view for view in self.nodes.survey() if view.pid is not None]
        if not up:
            return False
        drawn = dice.choice(up)
        return self._killed(self.rack.named(drawn.name), cast("int", drawn.pid))

    def kill_sshd(self, dice: random.Random) -> Callable[[], None]:
        """End the SSH server of some host with all that hangs on its connections; return what brings it back."""
        server = dice.choice(self.rack.hosts).server
        server.stop()
        return server.start

    def left(self) -> list[str]:
        """Return what is left on the hosts: processes, and what they keep in memory. Nobody is connected to them any more."""
        self.nodes.close()
        files = [f"{host.name}: {one}" for host in self.rack for one in host.run("find", "/dev/shm", "-mindepth", "2").splitlines()]  # noqa: S108
        return [f"{host.name}: {pid} {command}" for host, pid, command in self._processes()] + files

    def close(self) -> None:
        """Have nothing of it run on the hosts, and their SSH servers serve."""
        self.nodes.close()
        for _, pid, _ in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in self.rack:
            if host.server.process is None:
                host.server.start()

    def _processes(self) -> list[tuple[Host, int, str]]:
        return [
            (host, pid, command)
            for host in self.rack
            for pid, command in host.processes().items()
            if any(word in command for word in OURS) and "sshd" not in command
        ]

    def _killed(self, host: Host, pid: int) -> bool:
        with suppress(LookupError, OSError):
            os.kill(host.pid_here(pid), signal.SIGKILL)
            return True
        return False
