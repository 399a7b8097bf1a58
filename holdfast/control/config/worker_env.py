"""What agents get to run a job: the fields of the ``prepare`` command, and the environment of each rank."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.paths import job_directory, make_private
from holdfast.protocol import HEARTBEAT_INTERVAL
from holdfast.runtime.process.fork_server import USUAL_IMPORTS
from holdfast.source_tree import source_tree_env
from holdfast.spec import Cluster, TrainingJob

if TYPE_CHECKING:
    from holdfast.control.state.rank_table import RankTable
    from holdfast.history import Job

TORCHRUN_SETS: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}
"""Variables that torchrun sets for each rank unless they are set; with several ranks a node also `OMP_NUM_THREADS`."""
MAX_HEARTBEATS: Final = 4096
"""Heartbeats of all agents in a second: a controller handles as many in less than half of a core's time."""


def log_directory(job: Job) -> Path:
    """Return the folder with one log per rank, the same for every controller of the job."""
    return Path(job.directory) / "logs"


def prepare_fields(spec: TrainingJob, cluster: Cluster, job: Job) -> dict[str, Any]:
    """Return the fields of the ``prepare`` command: the same for every generation and node, apart from ``NodeBackend.node_settings``."""
    warm, remote = spec.command is None, cluster.kind != "local"
    argv = list(spec.command or [])
    if spec.script is not None:  # as typed, like torchrun; nobody else expands a home folder
        argv = [str(spec.inside(spec.script)) if spec.script.startswith("~") else spec.script, *spec.args]
    if spec.module is not None:
        argv = ["-m", spec.module, *spec.args]
    fields = {
        "job": job.id,
        "name": job.name,
        "lease": spec.timeouts.lease.total_seconds(),
        "warm": warm,
        "python": spec.python or ("" if remote else sys.executable),
        "preload": list(USUAL_IMPORTS) if warm and _wants_torch(spec, remote=remote) else [],
        "argv": argv,
        "directory": str(spec.inside(".")),
        "environment": {**({} if remote else source_tree_env(os.environ)), **_environment(spec, job)},
        "defaults": TORCHRUN_SETS,
        "log_directory": str(log_directory(job)),
        "watch": spec.checks.nodes,
        "beat": beat_of(spec.max_nodes),
        "notice": cluster.preemption_notice.for_agents(),
        "memory": {"limit": spec.checkpoint.memory.max_memory} if spec.checkpoint.memory.interval else None,
    }
    if isinstance(spec.nproc_per_node, int):
        set_ranks(fields, spec, spec.nproc_per_node)
    return fields


def set_ranks(plan: dict[str, Any], spec: TrainingJob, ranks: int) -> None:
    """Set in *plan*, the fields of the ``prepare`` command, what depends on the number of *ranks* on each node."""
    plan["defaults"] = {**TORCHRUN_SETS, **({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})}
    plan["environment"] = {**plan["environment"], "HOLDFAST_WIDTH": str(spec.max_nodes * ranks)}


def beat_of(nodes: int) -> float:
    """Return the seconds between two heartbeats of each agent: the more nodes, the longer, so that their sum is bounded."""
    return max(HEARTBEAT_INTERVAL, nodes / MAX_HEARTBEATS)


def _wants_torch(spec: TrainingJob, *, remote: bool) -> bool:
    """Return whether the script or module imports torch, itself or through Holdfast; a guess where it cannot be read here."""
    try:
        text = _source(spec).read_bytes()
    except OSError:
        return remote or spec.module is not None  # an installed module
    return re.search(rb"^\s*(?:import|from)\s+(?:torch|holdfast)\b", text, re.MULTILINE) is not None


def _source(spec: TrainingJob) -> Path:
    """Return the file of the script; that of the module if it lies in the working directory."""
    if spec.module is None:
        return spec.inside(spec.script or "")
    place = spec.inside(spec.module.replace(".", "/"))
    return place / "__main__.py" if place.is_dir() else place.with_name(f"{place.name}.py")


def _environment(spec: TrainingJob, job: Job) -> dict[str, str]:
    memory = spec.checkpoint.memory
    environment = {
        "PYTHONUNBUFFERED": "1",  # what a killed worker printed is evidence
        "HOLDFAST_JOB": job.name,
        "HOLDFAST_TOKEN": token_of(job),
        "HOLDFAST_GROUPS": spec.groups,
        "HOLDFAST_CHECKPOINT_DIR": str(spec.checkpoints),
        "HOLDFAST_SAVE_EVERY": str(spec.checkpoint.first),
        "HOLDFAST_KEEP": str(spec.checkpoint.keep),
        "HOLDFAST_CHECK_EVERY": str(spec.checks.replicas),
        "HOLDFAST_MEMORY_EVERY": str(memory.interval),
        "HOLDFAST_MEMORY_OVERHEAD": str(memory.max_overhead),
        "HOLDFAST_MEMORY_POLICY": memory.when_late,
        "HOLDFAST_MEMORY_PAUSE": str(memory.max_pause.total_seconds()),
    }
    if spec.checkpoint.bandwidth is not None:
        environment["HOLDFAST_SAVE_BANDWIDTH"] = str(spec.checkpoint.bandwidth)
    return {**environment, **spec.env}


def token_of(job: Job) -> str:
    """Return the secret with which the job's workers authenticate each other: made once, and kept in the job's folder.

    A controller that reattaches gets it from the agents, which may have it from a controller on another host.
    """
    return known_token(job) or keep_token(job, secrets.token_hex(16))


def keep_token(job: Job, token: str) -> str:
    """Keep the job's secret in its folder, readable by this user only; return it."""
    path = _token_file(job)
    make_private(path.parent)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{job.id} {token}")
    new.replace(path)
    return token


def known_token(job: Job) -> str | None:
    """Return the job's secret if it was made on this machine; make none."""
    with suppress(OSError, ValueError):
        owner, token = _token_file(job).read_text().split()
        if owner == job.id:
            return token
    return None


def _token_file(job: Job) -> Path:
    return job_directory(job.name) / "token"


def rank_environments(
    membership: dict[str, list[int]], *, generation: int, rank_table: RankTable, job: str
) -> dict[str, list[dict[str, Any]]]:
    """Return for each node the environments of its workers: the variables that ``torchrun`` sets.

    Global ranks are consecutive over the nodes in the order of *membership*.
    """
    world = sum(len(ranks) for ranks in membership.values())
    shared = _group_environment(rank_table, world=world, groups=len(membership), generation=generation, job=job)
    return {
        node: [
            {"rank": rank, "environment": {**shared, **_place(rank, local=local, local_world=len(ranks), group=group)}}
            for local, rank in enumerate(ranks)
        ]
        for group, (node, ranks) in enumerate(membership.items())
    }


def seat_environment(rank: int, rank_table: RankTable, *, generation: int, ranks_per_node: int, job: str) -> dict[str, str]:
    """Return the environment of a process that takes over *rank*.

    It must agree with the environments that the other ranks were started with: ranks per node, and the node's number.
    """
    world = rank_table.width
    shared = _group_environment(rank_table, world=world, groups=-(-world // ranks_per_node), generation=generation, job=job)
    return {**shared, **_place(rank, local=rank_table.places.get(rank, 0), local_world=ranks_per_node, group=rank // ranks_per_node)}


def _group_environment(rank_table: RankTable, *, world: int, groups: int, generation: int, job: str) -> dict[str, str]:
    host, port = rank_table.store
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "GROUP_WORLD_SIZE": str(groups),
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(2**31 - 1),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store, not its launcher
        "HOLDFAST_GENERATION": str(generation),
        **rank_table_environment(rank_table),
    }


def _place(rank: int, *, local: int, local_world: int, group: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(group),
    }


FULL_MEMBERSHIP: Final = 8
"""Nodes whose agents keep the whole membership, for a controller that finds the history without this generation."""


def membership_by_node(membership: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """Return for each node the membership that its agent gets: some get all ranks, the others only their own.

    All ranks to thousands of agents would be hundreds of megabytes in the middle of a recovery.
    """
    first = min((rank for ranks in membership.values() for rank in ranks), default=0)
    return {
        node: {"membership": membership if place < FULL_MEMBERSHIP else {node: ranks}, "first": first}
        for place, (node, ranks) in enumerate(membership.items())
    }


def rank_table_environment(rank_table: RankTable) -> dict[str, str]:
    """Return the checkpoint interval, if the controller chooses it, the invalidated states and the steps to skip."""
    every = {} if rank_table.every is None else {"HOLDFAST_SAVE_EVERY": str(rank_table.every)}
    off = (
        {"HOLDFAST_INVALIDATED": ",".join(f"{step}:{number}" for step, number in rank_table.invalidated)} if rank_table.invalidated else {}
    )
    skip = {"HOLDFAST_SKIP_STEPS": ",".join(map(str, rank_table.skip))} if rank_table.skip else {}
    return {**every, **off, **skip}


def roles_environment(roles: Sequence[Sequence[int]], recordings: str) -> dict[str, str]:
    """Return the job's roles, for a process that warms up without the others."""
    return {"HOLDFAST_ROLES": json.dumps([list(ranks) for ranks in roles]), **({"HOLDFAST_RECORDINGS": recordings} if recordings else {})}
