"""Reschedule: agree on the next membership."""

from __future__ import annotations

import time

from detectors.evidence import StartTrouble
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import NodeTrouble
from holdfast.report.wording import some
from policies.case import IN_PROCESS, RecoveryAction
from policies.placement import Membership, filled_up, members_after, place
from policies.states import Event
from tasks import takeover, titles
from tasks.turn import Transition, step


@step("reschedule", titles.reschedule)
def reschedule(run: JobController) -> Transition:
    """Give every rank a node."""
    assert run.incident is not None
    decision = run.incident.decision
    assert decision is not None
    if decision.action in IN_PROCESS:
        return takeover.reschedule(run, decision)
    after = members_after(run.regular(), decision)
    for why, nodes in run.preflight.news(decision.add).items():
        run.remark(f"{', '.join(nodes)}: {why}. There is no better node, so the job runs there")
    if decision.action is RecoveryAction.WAIT_FOR_CAPACITY and len(after) < decision.need:
        return Transition(Event.SHORT, "; ".join([f"{len(after)} of {decision.need} node(s) are there", *run.eligibility.left_out()]))
    world = 0
    if decision.action not in (
        RecoveryAction.SHRINK,
        RecoveryAction.WAIT_FOR_CAPACITY,
    ):  # after take-overs fewer nodes may hold all ranks than are meant to
        world, after = len(run.board.ranks), filled_up(after, run.spares(), run.width)
    try:
        membership = place(after, run.spec.nodes.ranks, world)
        agree(run, membership, reason=decision.reason, before=decision.before, skip=decision.skip)
    except NodeTrouble as error:
        run.board.evidence.append(StartTrouble(node=error.node, at=time.time(), why=str(error)))
        return Transition(Event.FAULTED, str(error))
    return Transition(Event.PLACED, f"generation {run.generation} on {some(after)}")


def agree(run: JobController, membership: Membership, *, reason: str, before: int = 0, skip: tuple[int, ...] = ()) -> None:
    """Begin the next generation with *membership*: rank 0's node gives a port, everybody learns where everybody is.

    It goes on from a state of fewer steps than *before*, where that is given, and does the steps *skip* with later batches.
    """
    first = next(iter(membership))
    port = int(run.fleet.channel(first).order("port")["port"])
    number = run.newest + 1
    every = run.choose_every(f"generation {number}", len(membership))
    rank_table = RankTable.fresh(number, membership, (run.fleet.source.address(first), port), every=every)
    run.copies = ()  # the processes are new: they tell of it again
    run.enter_generation(number, membership, rank_table=rank_table.going_back(run.rank_table, before, skip), reason=reason)
