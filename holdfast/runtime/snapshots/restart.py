"""All ranks are new processes: go on from the memory of nodes, if it has a step whole that is newer than the disk's."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.runtime.snapshots.restore import RestoreError, Restorer, SnapshotSource, tell
from holdfast.runtime.snapshots.restore_planner import NoPlan, RestorePlan, new_holdings, plan, shards_by_rank
from holdfast.runtime.state.training import Training
from holdfast.runtime.world import World


def from_memory(
    training: Training, memory: SnapshotSource, world: World, newest: int, give_light: Callable[[bytes], None]
) -> RestorePlan | None:
    """Bring all ranks to the newest step above *newest* that the memory of nodes has whole; return the plan, or nothing.

    Called by all ranks together. A snapshot that turns out to be spoiled is told of and left out, and the next one is tried.
    """
    while True:
        told = world.gather(memory.told(world.size))
        stored = memory.reached(told, world.size, lowest=world.rank == 0, gather=world.gather)
        found = plan(new_holdings(shards_by_rank(stored), [str(one["node"]) for one in told]), (), stored)
        if isinstance(found, NoPlan) or found.step <= newest:
            return None
        why = _attempt(training, memory, world, found, give_light)
        if not any(world.gather(why)):
            return found


def _attempt(training: Training, memory: SnapshotSource, world: World, found: RestorePlan, give_light: Callable[[bytes], None]) -> str:
    """Take this rank's state; return what went wrong, if anything."""
    mine = next(fetch for fetch in found.fetches if fetch.target == world.rank)
    try:
        Restorer(training, memory).take(mine, give_light)
    except RestoreError as spoiled:
        tell(spoiled)
        return str(spoiled)
    return ""
