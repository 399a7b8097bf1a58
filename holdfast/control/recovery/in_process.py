"""Recover in the living processes: end a generation without ending its workers, and begin the next one with those that live."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from detectors.evidence import ReplaceRanksFailure
from holdfast.control.agents.pool import failures
from holdfast.control.config.worker_env import membership_by_node, roles_environment
from holdfast.control.nodes.release import release_nodes, release_unreachable
from holdfast.control.state.incidents import IncidentInWork
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import CommandRejected, NodeError
from holdfast.report.wording import ranks as in_ranges
from holdfast.report.wording import some
from policies.escalation import Decision, Placement
from policies.placement import Membership, membership_after
from policies.states import Event, Transition


def isolate(run: JobController, incident: IncidentInWork, decision: Decision) -> Transition:
    """Wake the ranks that live from whatever they wait for, and kill those that are unhealthy; wait for neither."""
    unhealthy, alive = sorted({seat.rank for seat in decision.seats} | set(decision.vacate)), set(run.agents.alive())
    nodes = [node for node in run.generations.members if node in alive and node in run.generations.sent_to]
    mine = {node: set(run.generations.state.membership[node]) for node in nodes}
    send_commands = {
        node: {"generation": run.generations.sent_to[node], "lost": unhealthy, "kill": [rank for rank in unhealthy if rank in mine[node]]}
        for node in nodes
    }
    answers = run.agents.send_commands(send_commands, "abandon")
    incident.note_order(run.recorder)
    incident.replacement_attempts += 1
    release_nodes(run, decision.drop, lost=incident.lost, reason=decision.reason)
    for node in run.generations.members:
        if node not in send_commands and node not in decision.drop and set(run.generations.state.membership[node]) <= set(unhealthy):
            release_unreachable(run, incident, node)
    incident.lap("isolate", time.time())
    wrong = failures(answers)
    if wrong:
        return _failed(run, {node: str(error) for node, error in wrong.items() if isinstance(error, CommandRejected)}, wrong)
    out = (
        f"{'rank' if len(unhealthy) == 1 else 'ranks'} {in_ranges(unhealthy)} of generation {run.generations.number} stopped"
        if unhealthy
        else "no rank stopped"
    )
    world = len(run.generations.state.ranks)
    return Transition(Event.ISOLATED, f"{out}; {world - len(unhealthy)} of {world} ranks keep their processes and wait")


def _failed(run: JobController, refused: dict[str, str], all_wrong: dict[str, Any]) -> Transition:
    """Turn what agents refused into evidence; one that is gone is noticed as that."""
    _note(run, refused)
    return Transition(Event.FAULTED, "; ".join(str(error) for error in all_wrong.values()))


def _note(run: JobController, refused: dict[str, str]) -> None:
    """Take note of what agents refused, after all that they had told before: mostly that a rank has ended which was to be kept."""
    if refused:
        run.pump(0.0)
    now = time.time()
    run.generations.state.evidence.extend(ReplaceRanksFailure(node=node, at=now, why=why) for node, why in refused.items())


def reschedule(run: JobController, decision: Decision) -> Transition:
    """Begin the next generation: who lives stays, the unhealthy ranks go where the decision says."""
    unhealthy = frozenset(seat.rank for seat in decision.seats)
    membership = membership_after(run.generations.state.membership, decision.seats, decision.vacate)
    try:
        store, serve = store_without(run, unhealthy.union(decision.vacate), membership)
    except NodeError as error:
        return _failed(run, {error.node: str(error)} if isinstance(error, CommandRejected) else {}, {error.node: error})
    number = run.generations.newest + 1
    every = run.checkpoints.choose_interval(f"generation {number}", len(membership))
    rank_table = replace(
        run.generations.rank_table.after(number, membership, unhealthy), store=store, serve=serve, since=run.generations.number, every=every
    )
    run.generations.enter(number, membership, rank_table=rank_table, reason=decision.reason)
    kept = f"{len(rank_table.kept)} of {len(run.generations.state.ranks)} ranks keep their processes"
    return Transition(Event.PLACED, f"generation {number} on {some(membership)}; {kept}")


def store_without(run: JobController, leaving: frozenset[int], membership: Membership) -> tuple[tuple[str, int], int]:
    """Return the place of the store and the rank that hosts it: the present ones, or those of the lowest rank that stays."""
    if run.generations.rank_table.serve not in leaving:
        return run.generations.rank_table.store, run.generations.rank_table.serve
    ranks = {rank: node for node, held in membership.items() for rank in held}
    serve = min(ranks.keys() - leaving, default=min(ranks))
    port = int(run.agents.client(ranks[serve]).send_command("port")["port"])
    return (run.agents.source.address(ranks[serve]), port), serve


def start(run: JobController, decision: Decision, _seconds: float) -> None:
    """Give every node the next generation at once; one that refuses is evidence."""
    by_rank = {seat.rank: seat for seat in decision.seats}
    facts = facts_of(run, run.generations.rank_table)
    send_commands = {
        node: [worker_of(run, node, rank, by_rank.get(rank)) for rank in ranks] for node, ranks in run.generations.state.membership.items()
    }
    told = membership_by_node(run.generations.state.membership)
    memory = run.checkpoints.replicas.servers(run.generations.state.membership, send_commands)
    given = {
        node: {"generation": run.generations.number, **told[node], "facts": {**facts, "memory": memory[node]}, "workers": workers}
        for node, workers in send_commands.items()
    }
    answers = run.agents.send_commands(given, "regroup")
    wrong = failures(answers)
    for node, workers in send_commands.items():
        standbys = [worker["standby"] for worker in workers if worker["from"] == "standby"]
        if node in wrong:
            run.nodes.hot_spares.drop(standbys)
            run.generations.state.note_missing(worker["rank"] for worker in workers if worker["from"] != "kept")
        else:
            run.generations.sent_to[node] = run.generations.number
            run.nodes.hot_spares.take(standbys)
    _note(run, {node: str(error) for node, error in wrong.items()})


def facts_of(run: JobController, rank_table: RankTable) -> dict[str, Any]:
    """Return what every process must know of the generation of *rank_table*, those that live on included, whatever their node."""
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


def worker_of(run: JobController, node: str, rank: int, seat: Placement | None) -> dict[str, Any]:
    """Return what the agent of *node*, where *rank* is to live, is told of it."""
    if seat is None:
        return {"rank": rank, "from": "kept", "standby": None, "environment": {}}
    environment = run.generations.seat_environment(rank, node)
    if seat.standby is not None:
        return {"rank": rank, "from": "standby", "standby": seat.standby, "environment": environment}
    environment |= {"HOLDFAST_FRESH": "1", **roles_environment(run.generations.roles, run.generations.recordings)}
    return {"rank": rank, "from": "fresh", "standby": None, "environment": environment}
