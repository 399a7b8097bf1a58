"""Grow by a restart: start all ranks again on more nodes, in a job that a restart had made smaller."""

from __future__ import annotations

import signal
import time

from detectors.evidence import RecoveryTimeout
from holdfast.control.agents.pool import failures
from holdfast.control.checkpoints.final_checkpoint import save_final_checkpoint
from holdfast.control.recovery.restart import agree, start_workers, wait_until_gone
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.watch import poll, see_begun
from holdfast.errors import NodeError, WorldError
from policies.case import RecoveryAction
from policies.placement import place
from policies.states import Event, Transition


def grow_by_restart(run: JobController) -> Transition:
    """Take in the nodes that are free again; until the ranks are stopped whatever is in the way leaves training as it is."""
    begin, limit = time.monotonic(), run.policy.deadlines.of(RecoveryAction.SHRINK)
    nodes = run.scale_up.nodes()
    come = _brought_up(run, nodes)
    turn = poll(run)
    if turn is not None and turn.event is not Event.MOVE_ASKED:
        return turn
    if not come:
        run.scale_up.failed()
        return Transition(
            Event.MOVE_FAILED, f"no agent could be brought up on {', '.join(nodes)}" if nodes else "there is no room any more"
        )
    run.scale_up.succeeded()
    reason = f"there was room on {', '.join(come)} again"
    if stuck := _placed_anew(run, come, reason):
        return Transition(Event.FAULTED, stuck)
    start_workers(run)
    turn = see_begun(run, seconds=begin + limit - time.monotonic()) or _overrun(run, time.monotonic() - begin, limit)
    if turn.event is Event.STARTED:
        where = ", ".join(run.generations.members)
        turn = Transition(
            Event.MOVED, f"{reason}: {len(run.generations.state.ranks)} ranks on {where}, in {time.monotonic() - begin:.1f} s"
        )
    return turn


def _placed_anew(run: JobController, come: tuple[str, ...], reason: str) -> str:
    """End the present generation and agree on one with the nodes that have *come* too; return what is in the way."""
    try:
        stuck = _stopped(run)
        if not stuck:
            agree(run, place((*run.generations.members, *come), run.spec.nodes.ranks), reason=reason)
    except (NodeError, WorldError) as error:
        return str(error)
    return stuck


def _overrun(run: JobController, seconds: float, limit: float) -> Transition:
    """Take note that no step has come: the ladder answers that."""
    reached = {view.rank: view.reached() for view in run.generations.state.ranks.values()}
    run.generations.state.overrun = RecoveryTimeout(
        at=time.time(), action=RecoveryAction.SHRINK, seconds=seconds, limit=limit, reached=reached
    )
    return Transition(Event.FAULTED, f"a start on more nodes brought no step within {limit:.0f} s")


def _brought_up(run: JobController, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Have agents on *nodes*; return those that have one."""
    alive = set(run.agents.alive())
    missing = [node for node in nodes if node not in alive]
    for node, answer in run.agents.each(missing, run.agents.bring_up).items():
        if not isinstance(answer, WorldError):
            run.log.record_node_status(node, "healthy", "its agent is up")
    alive = set(run.agents.alive())
    return tuple(node for node in nodes if node in alive)


def _stopped(run: JobController) -> str:
    """End all ranks, and put what they hold in memory on disk, where it can be read at any width; return what is in the way."""
    answers = run.agents.send_command(
        run.generations.members, "stop", generation=run.generations.number, signal=int(signal.SIGKILL), grace=0.0
    )
    if failures(answers):
        return "; ".join(str(error) for error in failures(answers).values())
    stuck = wait_until_gone(run, set(run.generations.members))
    if stuck:
        return f"workers on {', '.join(sorted(stuck))} cannot be ended"
    save_final_checkpoint(run)
    return ""
