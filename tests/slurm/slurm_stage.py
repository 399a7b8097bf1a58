"""A stage whose nodes Slurm lends: the same jobs, the same chaos, on steps of real allocations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.cluster.local import LocalNodes
from holdfast.history import queries
from tests.integration.stage import Play, Stage
from tests.slurm.slurm_server import SlurmServer


@dataclass(frozen=True, slots=True)
class NamedNodes(LocalNodes):
    """Folders of this machine that are called as a cluster calls its nodes."""

    called: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Return the names."""
        return list(self.called)


@dataclass
class SlurmStage(Stage):
    """A home, a history, and the jobs that play on nodes of *slurm*."""

    slurm: SlurmServer = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nodes = NamedNodes("slurm", self.home / "n" / "nodes", len(self.slurm.names), called=tuple(self.slurm.names))

    def described(self) -> dict[str, Any]:
        """Return the cluster as a file of it would."""
        return {"kind": "slurm", "name": "slurm", "directory": str(self.home / "n"), **self.cluster}

    def play(self, name: str, **fields: Any) -> Play:
        """Start a controller for the job; its checkpoints go to a folder that all nodes share."""
        return super().play(name, **{"checkpoint": {"directory": str(self.home / "checkpoints" / name)}, **fields})

    def allocations(self, name: str) -> list[str]:
        """Return the ids of the allocations that a job has or waits for."""
        return self.slurm.run("squeue", "--noheader", f"--name=holdfast-{name}", "--states=RUNNING,PENDING", "--format=%i").split()

    def take_node(self, name: str) -> None:
        """Remove a node, as a power cut would: what Slurm runs there, and what belongs to its folder."""
        self.slurm.kill_node(name)
        self.nodes.clear(name)


def job_events(play: Play) -> str:
    """Return all that was remarked of the job."""
    return "\n".join(one.text for one in queries.job_events(play.stage.history, play.job.id))
