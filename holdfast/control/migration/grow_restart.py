"""Grow by a restart: restart all ranks on more nodes, in a job that a restart had made smaller."""

from __future__ import annotations

import time

from holdfast.control.checkpoints.final_checkpoint import save_final_checkpoint
from holdfast.control.recovery.restart import begin_generation, start_workers, stop_ranks, wait_until_stopped
from holdfast.control.supervisor.controller import JobController, poll, see_begun
from holdfast.detectors.evidence import RecoveryTimeout
from holdfast.errors import NodeError, WorldError
from holdfast.policies.nodes.placement import place
from holdfast.policies.recovery.case import RecoveryAction
from holdfast.policies.states import Event, Transition


def grow_by_restart(run: JobController) -> Transition:
    """Add the nodes that are free again; until the ranks are stopped a failure leaves training as it is."""
    begin, limit = time.monotonic(), run.policy.timeouts.of(RecoveryAction.SHRINK_RESTART, run.generations.pace())
    generations, nodes = run.generations, run.scale_up.nodes()
    added = _bring_up(run, nodes)
    turn = poll(run)
    if turn is not None and turn.event is not Event.MOVE_ASKED:
        return turn
    if not added:
        run.scale_up.failed()
        why = f"no agent could be started on {', '.join(nodes)}" if nodes else "there is no room any more"
        return Transition(Event.MOVE_FAILED, why)
    run.scale_up.succeeded()
    reason = f"there was room on {', '.join(added)} again"
    try:
        failed = _stop(run)
        if not failed:
            begin_generation(run, place((*generations.members, *added), run.generations.ranks_per_node), reason=reason)
    except (NodeError, WorldError) as error:
        failed = str(error)
    if failed:
        return Transition(Event.FAULTED, failed)
    start_workers(run)
    turn = see_begun(run, seconds=begin + limit - time.monotonic())
    seconds = time.monotonic() - begin
    if turn is None:
        reached = {view.rank: view.reached() for view in generations.state.ranks.values()}
        overrun = RecoveryTimeout(at=time.time(), action=RecoveryAction.SHRINK_RESTART, seconds=seconds, limit=limit, reached=reached)
        generations.state.overrun = overrun
        return Transition(Event.FAULTED, f"a start on more nodes brought no step within {limit:.0f} s")
    if turn.event is Event.STARTED:
        where = ", ".join(generations.members)
        turn = Transition(Event.MOVED, f"{reason}: {len(generations.state.ranks)} ranks on {where}, in {seconds:.1f} s")
    return turn


def _bring_up(run: JobController, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Start agents on *nodes*; return those that have one."""
    before = set(run.agents.alive())
    run.nodes.bring_up([node for node in nodes if node not in before])
    alive = set(run.agents.alive())
    return tuple(node for node in nodes if node in alive)


def _stop(run: JobController) -> str:
    """Stop all ranks, and save a checkpoint of what they hold in memory, as it is read at any width; return why that failed."""
    members = list(run.generations.members)
    if rejected := stop_ranks(run, members):
        return rejected
    if stuck := wait_until_stopped(run, set(members)):
        return f"workers on {', '.join(sorted(stuck))} cannot be ended"
    save_final_checkpoint(run)
    return ""
