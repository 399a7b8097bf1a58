"""The final checkpoint: when a job stops before its end, write what its nodes keep in memory to disk, completely or not at all."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.control.agents.pool import failures
from holdfast.errors import WorldError
from holdfast.protocol import Message
from holdfast.runtime.checkpoint import manifest

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController

KILL_SECONDS: Final = 5.0
"""How long killed workers may take to exit: what a rank still copies is no complete snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshots:
    """A complete snapshot in the memory of a node."""

    node: str
    name: str
    rank: int
    world: int
    step: int
    lineage: int


def newest_complete(stored: Iterable[NodeSnapshots], world: int, homes: Mapping[int, str]) -> list[NodeSnapshots]:
    """Return one snapshot for each rank of *world*, of the newest step of which all ranks have one; empty when there is none.

    Of several snapshots of a rank, that of its own node (*homes*, by rank) is taken. A later lineage is newer: training was rolled back.
    """
    moments: dict[tuple[int, int], dict[int, NodeSnapshots]] = {}
    for one in stored:
        if one.world == world:
            by_rank = moments.setdefault((one.lineage, one.step), {})
            if one.rank not in by_rank or homes.get(one.rank) == one.node:
                by_rank[one.rank] = one
    complete = [moment for moment, by_rank in moments.items() if len(by_rank) == world]
    return [one for _, one in sorted(moments[max(complete)].items())] if complete else []


def save_final_checkpoint(run: JobController) -> None:
    """Write the newest step that is complete in the nodes' memory to disk, if the disk has none as new; record the result."""
    limit, members = run.spec.timeouts.final_checkpoint.total_seconds(), run.generations.members
    nodes = [node for node in run.agents.alive() if node in run.agents.memory]
    if not limit or not nodes or not members:
        return
    end = time.monotonic() + limit
    _stop_workers(run)
    stored = [
        NodeSnapshots(node=node, **{name: one[name] for name in ("name", "rank", "world", "step", "lineage")})
        for node, answer in run.agents.send_command(nodes, "stored").items()
        if not isinstance(answer, WorldError)
        for one in answer["snapshots"]
    ]
    homes = {rank: node for node, ranks in run.generations.state.membership.items() for rank in ranks}
    chosen = newest_complete(stored, len(homes), homes)
    on_disk = newest_on_disk(run)
    if not chosen or chosen[0].step <= on_disk:
        if stored and not chosen:
            run.log.record_event(f"no step is complete in the nodes' memory: the newest checkpoint is that of step {on_disk}")
        return
    step = chosen[0].step
    problems = _write(run, chosen)
    while not problems and newest_on_disk(run) < step and time.monotonic() < end:
        run.pump(0.05)
    if newest_on_disk(run) >= step:
        run.log.record_event(f"step {step} was saved out of the nodes' memory before they were released")
        return
    why = "; ".join(problems) or f"it took longer than {limit:g} s (`timeouts.final_checkpoint`)"
    run.log.record_event(f"step {step} in the nodes' memory is not saved: {why}. The newest checkpoint is that of step {on_disk}")


def newest_on_disk(run: JobController) -> int:
    """Return the step of the newest checkpoint that looks complete; 0 without any."""
    return next(manifest.complete_steps(run.spec.checkpoints), 0)


def _stop_workers(run: JobController) -> None:
    nodes = set(run.generations.members) & set(run.agents.alive())
    run.agents.send_command(nodes, "stop", generation=run.generations.number, signal=int(signal.SIGKILL), grace=0.0)
    end = time.monotonic() + KILL_SECONDS
    while not run.generations.state.all_ended(nodes & set(run.agents.alive())) and time.monotonic() < end:
        run.pump(0.02)


def _write(run: JobController, chosen: list[NodeSnapshots]) -> list[str]:
    """Have the nodes write the snapshots; return why some refused."""
    by_node: dict[str, list[Message]] = {}
    for one in chosen:
        by_node.setdefault(one.node, []).append({"name": one.name, "rank": one.rank, "step": one.step, "lineage": one.lineage})
    facts: dict[str, Any] = {
        "generation": run.generations.number,
        "world": chosen[0].world,
        "directory": str(run.spec.checkpoints),
        "keep": run.spec.checkpoint.keep,
    }
    answers = run.agents.each(by_node, lambda node: run.agents.client(node).send_command("flush", snapshots=by_node[node], **facts))
    return [str(error) for error in failures(answers).values()]
