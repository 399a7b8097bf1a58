"""Run Slurm's commands, each with a deadline and without a shell: submit an allocation, and find ours in the queue."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.cluster.slurm.parsing import FORMAT, Allocation, allocations
from holdfast.errors import NoSlurm, SlurmRefused, SlurmUnavailable
from holdfast.host.own_variables import without_added
from holdfast.paths import job_directory
from holdfast.security.redaction import is_secret
from holdfast.source_tree import source_tree_env
from holdfast.spec import SlurmCluster

COMMAND_SECONDS: Final = 20.0
"""How long a command may take: a busy controller answers after seconds."""
TRANSIENT: Final = re.compile(
    r"unable to contact|socket timed out|temporarily unable|connection (refused|reset|timed out)|communication|zero bytes|"
    r"try again|backup controller|job violates accounting/qos policy|qosmax|assocgrp|protocol authentication|address already in use",
    re.IGNORECASE,
)
"""Errors of Slurm's commands that pass by themselves: an unreachable controller, a limit that is reached now."""
LOCAL_VARIABLES: Final = ("SLURM_", "SLURMD_", "PREFECT_", "SSH_", "HOLDFAST_HISTORY", "HOLDFAST_PREFECT_")
"""Prefixes of variables that say where this process runs, or which servers it uses: wrong on another machine."""
COMMENT: Final = "holdfast:"
"""The comment of our allocations is this, followed by the id of the job."""
IDLE_SECONDS: Final = 300.0
"""Time without an agent after which the step launchers end their allocation: no controller runs the job any more."""
JOB_ID: Final = "%j"
"""Stands in a file name for the id of a Slurm job that has none yet."""
SCRIPT: Final = Path(__file__).with_name("allocation.sh")
QUEUE: Final = ("squeue", "--noheader", f"--format={FORMAT}")


def environment() -> dict[str, str]:
    """Return the environment for Slurm's commands, which pass it on to the nodes: ours without local variables and secrets.

    Slurm stores a job's environment in its own files.
    """
    ours = without_added(os.environ).items()
    found = {name: value for name, value in ours if not name.startswith(LOCAL_VARIABLES) and not is_secret(name)}
    if (conf := os.environ.get("SLURM_CONF")) is not None:
        found["SLURM_CONF"] = conf
    return found


def node_environment() -> dict[str, str]:
    """Return the environment for programs on nodes; they import Holdfast from our source tree, if we do: nodes share homes."""
    found = environment()
    return found | source_tree_env(found)


def run_command(*argv: str, extra: Mapping[str, str] | None = None) -> str:
    """Return the output of one of Slurm's commands; raise `SlurmUnavailable` for an error that may pass, `SlurmRefused` for another."""
    program = shutil.which(argv[0])
    if program is None:
        raise NoSlurm(argv[0])
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            env={**environment(), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", **(extra or {})},  # times in seconds since 1970: no time zone
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            cwd="/",  # scontrol writes scripts into its working directory where it can
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(argv[0], f"no answer within {COMMAND_SECONDS:g} s") from None
    except OSError as error:
        raise SlurmUnavailable(argv[0], str(error)) from error
    if done.returncode == 0:
        return done.stdout
    why = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
    raise (SlurmUnavailable if TRANSIENT.search(why) else SlurmRefused)(argv[0], why[:500])


def user() -> str:
    """Return the name of the user who runs this."""
    return pwd.getpwuid(os.geteuid()).pw_name


def directory_of(cluster: SlurmCluster) -> str:
    """Return Holdfast's folder on each node."""
    return cluster.directory or f"/tmp/holdfast-{user()}"  # noqa: S108 (the step launcher refuses it unless it is ours)


def launcher_command(cluster: SlurmCluster, *options: str) -> list[str]:
    """Return the command of the step launcher on a node."""
    program = [cluster.python or sys.executable, "-m", "holdfast.cluster.slurm.step_launcher"]
    return [*program, "--directory", directory_of(cluster), *options]


@dataclass(frozen=True, slots=True)
class SbatchRequest:
    """An allocation to submit for a job."""

    cluster: SlurmCluster
    job: str
    name: str
    directory: Path
    """The working directory of the job's scripts."""

    def command(self, count: int, excluded: Collection[str] = ()) -> list[str]:
        """Return the sbatch command for *count* nodes, none of them *excluded*, up to its script."""
        cluster = self.cluster
        options = [f"--job-name={label_of(self.name)}", f"--comment={COMMENT}{self.job}", f"--nodes={count}", "--ntasks-per-node=1"]
        options += ["--no-kill", "--requeue", "--open-mode=append", "--output=/dev/null", "--chdir=/"]
        options += ["--exclusive", "--mem=0"] if cluster.exclusive else []
        options += [] if cluster.minutes is None else [f"--time={cluster.minutes}"]
        fields: dict[str, object] = {
            "partition": cluster.partition,
            "account": cluster.account,
            "qos": cluster.qos,
            "constraint": cluster.constraint,
            "gpus-per-node": cluster.gpus,
            "gres": cluster.gres,
            "exclude": ",".join(dict.fromkeys([*cluster.excluded, *sorted(excluded)])) or None,
        }
        options += [f"--{name}={value}" for name, value in fields.items() if value is not None]
        return ["sbatch", "--parsable", *options, *cluster.options]

    def submit(self, count: int, excluded: Collection[str]) -> str:
        """Submit the allocation, with a step launcher on each node; return the id of the Slurm job."""
        logs = logs_of(self.name, self.directory)
        logs[0].parent.mkdir(parents=True, exist_ok=True)
        launcher = launcher_command(self.cluster, "--idle", str(IDLE_SECONDS))
        argv = [*self.command(count, excluded), str(SCRIPT), *map(str, logs), *launcher]
        return run_command(*argv, extra=node_environment()).strip().partition(";")[0]


def label_of(job: str) -> str:
    """Return the name of the allocations of *job* in Slurm's lists."""
    return f"holdfast-{job}"


def logs_of(job: str, directory: Path, job_id: str = JOB_ID) -> tuple[Path, Path]:
    """Return where the step launchers of Slurm job *job_id* log: the first of these whose folder exists on its first node.

    That is next to the job's other logs, unless HOLDFAST_HOME is this host's own; else in the job's directory, as Slurm does by default.
    """
    name = f"slurm-{job_id}.log"
    return job_directory(job) / "logs" / name, directory / name


def in_queue(job: str, name: str, outer: str | None) -> list[Allocation]:
    """Return the allocations of *job* (its id), called *name*, or all of this user's without them; and the one with the id *outer*."""
    named = [f"--name={label_of(name)}"] if name else []
    ours = allocations(run_command(*QUEUE, f"--user={user()}", *named))
    found = [one for one in ours if (one.comment == f"{COMMENT}{job}" if job else one.comment.startswith(COMMENT))]
    if outer is not None:
        with suppress(SlurmRefused):  # it has ended
            found += [one for one in allocations(run_command(*QUEUE, f"--jobs={outer}")) if one.id == outer]
    return found
