"""Restart: stop every rank, agree on who holds which ranks, and start all processes anew."""

from __future__ import annotations

import signal
import time
from typing import Final

from detectors.evidence import StartFailure
from detectors.node import NODE_LEAVING
from holdfast.control.agents.pool import failures
from holdfast.control.checkpoints.final_checkpoint import save_final_checkpoint
from holdfast.control.config.worker_env import membership_by_node, rank_environments
from holdfast.control.nodes.release import release_nodes
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import NodeError
from holdfast.report.wording import some
from policies.case import Decision, RecoveryAction
from policies.placement import Membership, members_after, place, with_spares
from policies.states import Event, Transition

STOP_SECONDS: Final = 10.0
"""How long killed workers may take to be gone; one that hangs in the kernel for longer makes its node unfit."""

WIDTH_MAY_CHANGE: Final = (RecoveryAction.SHRINK, RecoveryAction.WAIT_FOR_CAPACITY)
"""Rungs after which there may be fewer ranks: what lies in memory is each rank's for one width, a checkpoint is read at any."""

START_SECONDS: Final = 30.0
"""How long an agent may take to answer the order to start workers, where the deadline of the action leaves it so long."""


def isolate(run: JobController, incident: IncidentInWork, decision: Decision) -> Transition:
    """Stop all ranks in one go, fence lost nodes, and let go of those that the decision drops."""
    alive = set(run.agents.alive())
    staying = [node for node in run.generations.members if node in alive]
    answers = run.agents.send_command(staying, "stop", generation=run.generations.number, signal=int(signal.SIGKILL), grace=0.0)
    incident.note_order(run.recorder)
    if failures(answers):
        return Transition(Event.FAULTED, "; ".join(str(error) for error in failures(answers).values()))
    stuck = wait_until_gone(run, set(staying))
    if stuck:
        incident.lost |= stuck
        return Transition(Event.FAULTED, f"workers on {', '.join(sorted(stuck))} cannot be ended")
    if incident.row.kind == NODE_LEAVING.id or decision.action in WIDTH_MAY_CHANGE:
        save_final_checkpoint(run)  # a node that is still there takes nothing along that could have been saved
    gone = [node for node in run.generations.members if node in incident.lost and node not in decision.drop]  # held less than others
    release_nodes(run, (*decision.drop, *gone), lost=incident.lost, reason=decision.reason)
    incident.lap("isolate", time.time())
    return Transition(Event.ISOLATED, f"all ranks of generation {run.generations.number} have stopped")


def wait_until_gone(run: JobController, nodes: set[str]) -> set[str]:
    """Wait until no worker is left on *nodes*; return those that still have one, or lost their agent meanwhile."""
    until = time.monotonic() + STOP_SECONDS
    while not run.generations.state.all_ended(nodes) and time.monotonic() < until:
        run.pump(0.02)
        if not nodes.isdisjoint(run.agents.gone()):
            break
    return nodes - run.generations.state.gone


def reschedule(run: JobController, decision: Decision) -> Transition:
    """Give every rank a node."""
    after = members_after(
        run.generations.nodes_needed(frozenset(run.incidents.current.lost if run.incidents.current is not None else ())), decision
    )
    for why, nodes in run.nodes.preflight.news(decision.add).items():
        run.log.record_event(f"{', '.join(nodes)}: {why}. There is no better node, so the job runs there")
    if decision.action is RecoveryAction.WAIT_FOR_CAPACITY and len(after) < decision.need:
        return Transition(Event.SHORT, "; ".join([f"{len(after)} of {decision.need} node(s) are there", *run.nodes.eligibility.left_out()]))
    world = 0
    if decision.action not in WIDTH_MAY_CHANGE:  # after take-overs fewer nodes may hold all ranks than are meant to
        world, after = len(run.generations.state.ranks), with_spares(after, run.nodes.spares(), run.generations.width)
    try:
        membership = place(after, run.spec.nodes.ranks, world)
        agree(run, membership, reason=decision.reason, before=decision.before, skip=decision.skip)
    except NodeError as error:
        run.generations.state.evidence.append(StartFailure(node=error.node, at=time.time(), why=str(error)))
        return Transition(Event.FAULTED, str(error))
    return Transition(Event.PLACED, f"generation {run.generations.number} on {some(after)}")


def agree(run: JobController, membership: Membership, *, reason: str, before: int = 0, skip: tuple[int, ...] = ()) -> None:
    """Begin the next generation with *membership*: rank 0's node gives a port, everybody learns where everybody is.

    It goes on from a state of fewer steps than *before*, where that is given, and does the steps *skip* with later batches.
    """
    first = next(iter(membership))
    port = int(run.agents.client(first).send_command("port")["port"])
    number = run.generations.newest + 1
    every = run.checkpoints.choose_interval(f"generation {number}", len(membership))
    rank_table = RankTable.fresh(number, membership, (run.agents.source.address(first), port), every=every)
    run.generations.copies = ()  # the processes are new: they tell of it again
    run.generations.enter(number, membership, rank_table=rank_table.going_back(run.generations.rank_table, before, skip), reason=reason)


def start(run: JobController, _decision: Decision, seconds: float) -> None:
    """Start the workers of the new generation, which have *seconds* for their first step."""
    start_workers(run, seconds=min(START_SECONDS, seconds))


def start_workers(run: JobController, *, seconds: float = START_SECONDS) -> None:
    """Order every node to start its workers, all at once; a node that does not say within *seconds* that it has is evidence."""
    environments = rank_environments(
        run.generations.state.membership, generation=run.generations.number, rank_table=run.generations.rank_table, job=run.job.name
    )
    memory = run.checkpoints.replicas.environments(environments, environments)
    for node, workers in environments.items():
        for worker in workers:
            worker["environment"] |= memory[node]
    told = membership_by_node(run.generations.state.membership)
    send_commands = {
        node: {"generation": run.generations.number, "workers": environments[node], **told[node]} for node in run.generations.members
    }
    answers = run.agents.send_commands(send_commands, "start", seconds=seconds)
    run.generations.sent_to |= dict.fromkeys(answers.keys() - failures(answers).keys(), run.generations.number)
    for node, error in failures(answers).items():
        run.generations.state.evidence.append(StartFailure(node=node, at=time.time(), why=str(error)))
