"""In-process recovery: end a generation without ending its workers, and begin the next one with those that still run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.control.agents.pool import failures
from holdfast.control.config.worker_env import membership_by_node, roles_environment
from holdfast.control.recovery.restart import release_nodes
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.detectors.evidence import ReplaceRanksFailure
from holdfast.errors import CommandRejected, NodeError, WorldError
from holdfast.plurals import named_ranks
from holdfast.policies.nodes.placement import Membership, membership_after
from holdfast.policies.recovery.escalation import Decision, Placement
from holdfast.policies.states import Event, Transition
from holdfast.report.text.wording import listing


def isolate(run: JobController, incident: IncidentInWork, decision: Decision) -> Transition:
    """Abort what the running ranks wait for, and kill the unhealthy ones; wait for neither."""
    generations, membership = run.generations, run.generations.state.membership
    unhealthy, alive = sorted({seat.rank for seat in decision.seats} | set(decision.vacate)), set(run.agents.alive())
    facts = {
        node: {
            "generation": generations.sent_to[node],
            "lost": unhealthy,
            "kill": [rank for rank in unhealthy if rank in membership[node]],
        }
        for node in generations.members
        if node in alive and node in generations.sent_to
    }
    answers = run.agents.send_commands(facts, "abandon")
    incident.note_commands(run.recorder)
    incident.replacement_attempts += 1
    release_nodes(run, decision.drop, lost=incident.lost, reason=decision.reason)
    for node in generations.members:
        if node not in facts and node not in decision.drop and set(membership[node]) <= set(unhealthy):  # all its ranks leave it
            incident.lost.add(node)
            generations.sent_to.pop(node, None)
            run.log.record_node_status(node, "lost", "its agent is unreachable, so the ranks that leave it are ended later")
            run.agents.drop_async(node)
    incident.lap("isolate", time.time())
    if failed := failures(answers):
        return _faulted(run, failed)
    world = len(generations.state.ranks)
    stopped = f"{named_ranks(unhealthy)} of generation {generations.number} stopped" if unhealthy else "no rank stopped"
    return Transition(Event.ISOLATED, f"{stopped}; {world - len(unhealthy)} of {world} ranks keep their processes and wait")


def _faulted(run: JobController, failed: Mapping[str, WorldError]) -> Transition:
    """Add the rejections to the evidence; a lost agent is found as such."""
    _note_rejected(run, {node: error for node, error in failed.items() if isinstance(error, CommandRejected)})
    return Transition(Event.FAULTED, "; ".join(str(error) for error in failed.values()))


def _note_rejected(run: JobController, rejected: Mapping[str, WorldError]) -> None:
    """Add what agents rejected to the evidence, after their earlier events: mostly a rank that was to be kept has exited."""
    if rejected:
        run.pump(0.0)
    now = time.time()
    run.generations.state.evidence.extend(ReplaceRanksFailure(node=node, at=now, why=str(error)) for node, error in rejected.items())


def reschedule(run: JobController, decision: Decision) -> Transition:
    """Begin the next generation: running ranks are kept, the unhealthy ones go where the decision says."""
    generations = run.generations
    unhealthy = frozenset(seat.rank for seat in decision.seats)
    membership = membership_after(generations.state.membership, decision.seats, decision.vacate)
    try:
        store, serve = store_without(run, unhealthy.union(decision.vacate), membership)
    except NodeError as error:
        return _faulted(run, {error.node: error})
    number = generations.newest + 1
    every = run.checkpoints.choose_interval(f"generation {number}", len(membership))
    local_ranks = run.nodes.local_ranks_of_spares({seat.rank: seat.hot_spare for seat in decision.seats})
    rank_table = generations.rank_table.after(number, membership, unhealthy, local_ranks)
    rank_table = replace(rank_table, store=store, serve=serve, since=generations.number, every=every)
    generations.enter(number, membership, rank_table=rank_table, reason=decision.reason)
    kept = f"{len(rank_table.kept)} of {len(generations.state.ranks)} ranks keep their processes"
    return Transition(Event.PLACED, f"generation {number} on {listing(membership)}; {kept}")


def store_without(run: JobController, leaving: frozenset[int], membership: Membership) -> tuple[tuple[str, int], int]:
    """Return the address of the store and the rank that hosts it: the current ones, or those of the lowest rank that stays."""
    rank_table = run.generations.rank_table
    if rank_table.serve not in leaving:
        return rank_table.store, rank_table.serve
    nodes = {rank: node for node, ranks in membership.items() for rank in ranks}
    serve = min(nodes.keys() - leaving, default=min(nodes))
    port = int(run.agents.client(nodes[serve]).send_command("port")["port"])
    return (run.agents.source.address(nodes[serve]), port), serve


def start(run: JobController, decision: Decision, _seconds: float) -> None:
    """Send every node the next generation at once; a rejection is evidence."""
    generations, membership, hot_spares = run.generations, run.generations.state.membership, run.nodes.hot_spares
    seats = {seat.rank: seat for seat in decision.seats}
    shared = shared_facts(run, generations.rank_table)
    workers = {node: [worker_facts(run, node, rank, seats.get(rank)) for rank in ranks] for node, ranks in membership.items()}
    known = membership_by_node(membership)
    memory = run.checkpoints.replicas.servers(membership, workers)
    facts = {
        node: {"generation": generations.number, **known[node], "facts": {**shared, "memory": memory[node]}, "workers": own}
        for node, own in workers.items()
    }
    failed = failures(run.agents.send_commands(facts, "regroup"))
    for node, own in workers.items():
        numbers = [worker["hot_spare"] for worker in own if worker["from"] == "hot-spare"]
        if node in failed:
            hot_spares.drop(numbers)
            generations.state.note_missing(worker["rank"] for worker in own if worker["from"] != "kept")
        else:
            generations.sent_to[node] = generations.number
            hot_spares.take(numbers)
    _note_rejected(run, failed)


def shared_facts(run: JobController, rank_table: RankTable) -> dict[str, Any]:
    """Return what every process of *rank_table*'s generation must know, including the kept ones, on whichever node."""
    return {
        "world": len(rank_table.incarnations),
        "incarnations": rank_table.spans(),
        "store": list(rank_table.store),
        "serve": rank_table.serve,
        "token": run.token,
        "changed": rank_table.changed,
        "since": rank_table.since,
        "every": rank_table.every,
    }


def worker_facts(run: JobController, node: str, rank: int, seat: Placement | None) -> dict[str, Any]:
    """Return what the agent of *node* must know about *rank*, which runs there; without a *seat* its process is kept."""
    if seat is None:
        return {"rank": rank, "from": "kept", "hot_spare": None, "environment": {}}
    environment = run.generations.seat_environment(rank, node)
    if seat.hot_spare is not None:
        return {"rank": rank, "from": "hot-spare", "hot_spare": seat.hot_spare, "environment": environment}
    environment |= {"HOLDFAST_FRESH": "1", **roles_environment(run.generations.roles, run.generations.recordings)}
    return {"rank": rank, "from": "fresh", "hot_spare": None, "environment": environment}
