"""Restart: stop every rank, agree on who holds which ranks, and start all processes again."""

from __future__ import annotations

import signal
import time
from typing import Final

from holdfast.control.agents.pool import failures
from holdfast.control.checkpoints.final_checkpoint import save_final_checkpoint
from holdfast.control.config.worker_env import membership_by_node, rank_environments
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.detectors.evidence import StartFailure
from holdfast.detectors.nodes.node import NODE_LEAVING
from holdfast.errors import NodeError
from holdfast.plurals import plural
from holdfast.policies.nodes.node_faults import find_node_faults
from holdfast.policies.nodes.placement import Membership, members_after, place, with_spares
from holdfast.policies.recovery.case import Decision, RecoveryAction
from holdfast.policies.states import Event, Transition
from holdfast.report.text.wording import listing

STOP_SECONDS: Final = 10.0
"""How long killed workers may take to exit; one that hangs in the kernel for longer makes its node unfit."""
WIDTH_MAY_CHANGE: Final = (RecoveryAction.SHRINK_RESTART, RecoveryAction.WAIT_FOR_CAPACITY)
"""Actions after which there may be fewer ranks: snapshots in memory fit one number of ranks, a checkpoint is read at any."""
START_SECONDS: Final = 30.0
"""How long an agent may take to answer the command to start workers, where the action's timeout allows as much."""


def isolate(run: JobController, incident: IncidentInWork, decision: Decision) -> Transition:
    """Stop all ranks at once, fence lost nodes, and release those that the decision drops."""
    members, alive = run.generations.members, set(run.agents.alive())
    staying = [node for node in members if node in alive]
    rejected = stop_ranks(run, staying)
    incident.note_commands(run.recorder)
    if rejected:
        return Transition(Event.FAULTED, rejected)
    stuck = wait_until_stopped(run, set(staying))
    if stuck:
        incident.lost |= stuck
        return Transition(Event.FAULTED, f"workers on {', '.join(sorted(stuck))} cannot be ended")
    if incident.row.kind == NODE_LEAVING.id or decision.action in WIDTH_MAY_CHANGE:
        save_final_checkpoint(run)  # a node that still answers takes nothing along that could have been saved
    dropped_too = [node for node in members if node in incident.lost and node not in decision.drop]  # lost since the decision
    release_nodes(run, (*decision.drop, *dropped_too), lost=incident.lost, reason=decision.reason)
    incident.lap("isolate", time.time())
    return Transition(Event.ISOLATED, f"all ranks of generation {run.generations.number} have stopped")


def stop_ranks(run: JobController, nodes: list[str]) -> str:
    """Have the agents of *nodes* kill the ranks of this generation; return why some refused."""
    kill = int(signal.SIGKILL)
    answers = run.agents.send_command(nodes, "stop", generation=run.generations.number, signal=kill, grace=0.0)
    return "; ".join(str(error) for error in failures(answers).values())


def wait_until_stopped(run: JobController, nodes: set[str]) -> set[str]:
    """Wait until no worker runs on *nodes*; return those where one still does, or whose agent was lost meanwhile."""
    state, end = run.generations.state, time.monotonic() + STOP_SECONDS
    while not state.all_ended(nodes) and run.handled_until < end:
        run.pump(0.02)
        if not nodes.isdisjoint(run.agents.disconnected()):
            break
    return nodes - state.stopped_nodes


def release_nodes(run: JobController, nodes: tuple[str, ...], *, lost: set[str], reason: str) -> None:
    """End what the job runs on *nodes*; those that caused the incident are withheld from other jobs too."""
    if run.incidents.current is not None and run.incidents.current.case is not None:
        run.nodes.eligibility.record_faults(find_node_faults(run.incidents.current.case, nodes))
    run.agents.each(nodes, run.agents.drop)
    for node in nodes:
        run.generations.sent_to.pop(node, None)
        run.log.record_node_status(node, "lost" if node in lost else "excluded", reason)


def reschedule(run: JobController, decision: Decision) -> Transition:
    """Give every rank a node."""
    generations, nodes = run.generations, run.nodes
    lost = run.incidents.current.lost if run.incidents.current is not None else ()
    after = members_after(generations.nodes_needed(frozenset(lost)), decision)
    for why, unfit in nodes.preflight.news(decision.add).items():
        run.log.record_event(f"{', '.join(unfit)}: {why}. There is no better node, so the job runs there")
    if decision.action is RecoveryAction.WAIT_FOR_CAPACITY and len(after) < decision.need:
        there = plural(len(after), f"node of {decision.need} is there", f"nodes of {decision.need} are there")
        return Transition(Event.SHORT, "; ".join([there, *nodes.eligibility.left_out()]))
    world = 0
    if decision.action not in WIDTH_MAY_CHANGE:  # after in-process recoveries fewer nodes may hold all ranks than are meant to
        world, after = len(generations.state.ranks), with_spares(after, nodes.spares(), generations.width)
    try:
        membership = place(after, run.generations.ranks_per_node, world)
        begin_generation(run, membership, reason=decision.reason, before=decision.before, skip=decision.skip)
    except NodeError as error:
        generations.state.evidence.append(StartFailure(node=error.node, at=time.time(), why=str(error)))
        return Transition(Event.FAULTED, str(error))
    return Transition(Event.PLACED, f"generation {generations.number} on {listing(after)}")


def begin_generation(run: JobController, membership: Membership, *, reason: str, before: int = 0, skip: tuple[int, ...] = ()) -> None:
    """Begin the next generation with *membership*; its store is on rank 0's node.

    It resumes from a state of fewer steps than *before*, where that is given, and trains the steps *skip* with later batches.
    """
    generations, first = run.generations, next(iter(membership))
    port = int(run.agents.client(first).send_command("port")["port"])
    number = generations.newest + 1
    every = run.checkpoints.choose_interval(f"generation {number}", len(membership))
    rank_table = RankTable.fresh(number, membership, (run.agents.source.address(first), port), every=every)
    generations.copies = ()  # the new processes report theirs
    generations.enter(number, membership, rank_table=rank_table.rolled_back(generations.rank_table, before, skip), reason=reason)


def start(run: JobController, _decision: Decision, seconds: float) -> None:
    """Start the workers of the new generation, which have *seconds* for their first step."""
    start_workers(run, seconds=min(START_SECONDS, seconds))


def start_workers(run: JobController, *, seconds: float = START_SECONDS) -> None:
    """Have every node start its workers, all at once; a node that does not confirm it within *seconds* is evidence."""
    generations, membership = run.generations, run.generations.state.membership
    environments = rank_environments(membership, generation=generations.number, rank_table=generations.rank_table, job=run.job.name)
    memory = run.checkpoints.replicas.environments(environments, environments)
    for node, workers in environments.items():
        for worker in workers:
            worker["environment"] |= memory[node]
    known = membership_by_node(membership)
    facts = {node: {"generation": generations.number, "workers": environments[node], **known[node]} for node in generations.members}
    answers = run.agents.send_commands(facts, "start", seconds=seconds)
    generations.sent_to |= dict.fromkeys(answers.keys() - failures(answers).keys(), generations.number)
    for node, error in failures(answers).items():
        generations.state.evidence.append(StartFailure(node=node, at=time.time(), why=str(error)))
