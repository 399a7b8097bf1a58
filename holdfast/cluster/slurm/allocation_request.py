"""What Slurm is asked for: an allocation of so many nodes, with a warden on each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.cluster.slurm.commands import asked
from holdfast.cluster.slurm.transport import directory_of, handed_on, python_of
from holdfast.paths import job_directory
from holdfast.spec import SlurmCluster

MARK: Final = "holdfast:"
"""What the comment of an allocation of ours begins with; the id of the job follows."""
IDLE: Final = 300.0
"""Seconds without an agent after which the wardens of an allocation end it: nobody steers the job any more."""
NUMBER: Final = "%j"
"""What stands for the number of a Slurm job that has none yet."""
HOLDER: Final = Path(__file__).with_name("holder.sh")


@dataclass(frozen=True, slots=True)
class SbatchRequest:
    """Whom an allocation is for."""

    cluster: SlurmCluster
    job: str
    name: str
    directory: Path
    """Where its scripts run."""

    def words(self, count: int, out: Collection[str] = ()) -> list[str]:
        """Return the sbatch command for *count* nodes without those that are *out*, but for its script."""
        cluster = self.cluster
        words = [f"--job-name={label_of(self.name)}", f"--comment={MARK}{self.job}", f"--nodes={count}", "--ntasks-per-node=1"]
        words += ["--no-kill", "--requeue", "--open-mode=append", "--output=/dev/null", "--chdir=/"]
        words += [] if cluster.share else ["--exclusive", "--mem=0"]
        words += [] if cluster.minutes is None else [f"--time={cluster.minutes}"]
        excluded = ",".join(dict.fromkeys([*cluster.excluded, *sorted(out)]))
        fields = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos, "constraint": cluster.constraint}
        more: dict[str, object] = {"gpus-per-node": cluster.gpus, "gres": cluster.gres, "exclude": excluded or None}
        words += [f"--{name}={value}" for name, value in (fields | more).items() if value is not None]
        return ["sbatch", "--parsable", *words, *cluster.options]


def submit(request: SbatchRequest, count: int, out: Collection[str]) -> str:
    """Ask for *count* nodes, and return the number of the Slurm job."""
    cluster, logs = request.cluster, logs_of(request.name, request.directory)
    logs[0].parent.mkdir(parents=True, exist_ok=True)
    warden = [python_of(cluster), "-m", "holdfast.cluster.slurm.step_launcher", "--directory", directory_of(cluster), "--idle", str(IDLE)]
    return asked(*request.words(count, out), str(HOLDER), *map(str, logs), *warden, extra=handed_on()).strip().partition(";")[0]


def label_of(job: str) -> str:
    """Return what the allocations of *job* are called in Slurm's lists."""
    return f"holdfast-{job}"


def logs_of(job: str, directory: Path, number: str = NUMBER) -> tuple[Path, Path]:
    """Return where Slurm job *number* prints what its wardens have to say: the first of these whose folder its first node sees.

    Beside the job's other logs, unless HOLDFAST_HOME is this host's own; else where the job works, as Slurm does by default.
    """
    name = f"slurm-{number}.log"
    return job_directory(job) / "logs" / name, directory / name
