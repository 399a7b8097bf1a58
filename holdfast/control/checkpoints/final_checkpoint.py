"""A job's last word: when it ends before its goal, what its nodes still hold in memory is put on disk, as a whole or not at all."""

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
"""How long killed workers may take to be gone: what a rank still copies is no snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshots:
    """A whole snapshot in the memory of a node."""

    node: str
    name: str
    rank: int
    world: int
    step: int
    lineage: int


def newest_complete(held: Iterable[NodeSnapshots], world: int, homes: Mapping[int, str]) -> list[NodeSnapshots]:
    """Return the snapshots of the newest step of which all ranks of *world* have one, a snapshot for each rank; nothing if there is none.

    Of several of one rank that of its own node (*homes*, by rank) is taken. A later lineage goes before an earlier one: training went back.
    """
    moments: dict[tuple[int, int], dict[int, NodeSnapshots]] = {}
    for one in held:
        if one.world == world:
            found = moments.setdefault((one.lineage, one.step), {})
            if one.rank not in found or homes.get(one.rank) == one.node:
                found[one.rank] = one
    whole = [moment for moment, found in moments.items() if len(found) == world]
    return [found for _, found in sorted(moments[max(whole)].items())] if whole else []


def save_final_checkpoint(run: JobController) -> None:
    """Have the newest step that is whole in the nodes' memory put on disk, if the disk has none as new; say what came of it."""
    limit = run.spec.limits.last_save.total_seconds()
    nodes = [node for node in run.agents.alive() if node in run.agents.memory]
    if not limit or not nodes or not run.generations.members:
        return
    until = time.monotonic() + limit
    _end_workers(run)
    answers = run.agents.send_command(nodes, "stored")
    held = [
        NodeSnapshots(node=node, **{name: one[name] for name in ("name", "rank", "world", "step", "lineage")})
        for node, answer in answers.items()
        if not isinstance(answer, WorldError)
        for one in answer["snapshots"]
    ]
    homes = {rank: node for node, ranks in run.generations.state.membership.items() for rank in ranks}
    chosen = newest_complete(held, len(homes), homes)
    on_disk = newest_on_disk(run)
    if not chosen or chosen[0].step <= on_disk:
        if held and not chosen:
            run.log.record_event(f"what the nodes hold in memory is of no step whole: the newest checkpoint is that of step {on_disk}")
        return
    step = chosen[0].step
    problems = _order(run, chosen)
    while not problems and newest_on_disk(run) < step and time.monotonic() < until:
        run.pump(0.05)
    if newest_on_disk(run) >= step:
        run.log.record_event(f"step {step} was saved out of the nodes' memory before they were let go")
        return
    why = "; ".join(problems) or f"it took longer than {limit:g} s (`limits.last_save`)"
    run.log.record_event(
        f"step {step}, which the nodes held in memory, is not saved: {why}. The newest checkpoint is that of step {on_disk}"
    )


def newest_on_disk(run: JobController) -> int:
    """Return the step of the newest checkpoint that looks whole; 0 without any."""
    return next(manifest.complete_steps(run.spec.checkpoints), 0)


def _end_workers(run: JobController) -> None:
    nodes = set(run.generations.members) & set(run.agents.alive())
    run.agents.send_command(nodes, "stop", generation=run.generations.number, signal=int(signal.SIGKILL), grace=0.0)
    until = time.monotonic() + KILL_SECONDS
    while not run.generations.state.all_ended(nodes & set(run.agents.alive())) and time.monotonic() < until:
        run.pump(0.02)


def _order(run: JobController, chosen: list[NodeSnapshots]) -> list[str]:
    """Give the orders; return why some were not taken."""
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
