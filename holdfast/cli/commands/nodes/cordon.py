"""`holdfast node cordon`, `uncordon`, `return`, `decommission` and `drain`: a person's requests about nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from holdfast.cli.arguments import cluster_in, coming_time, known_nodes, operator
from holdfast.cli.commands.nodes.listing import jobs_on, view_nodes
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, echo, echo_json, hint
from holdfast.cluster import names_of
from holdfast.errors import NodeNotChanged
from holdfast.history import cordons
from holdfast.history.cordons import CordonTable
from holdfast.history.lease import holder_of
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.policies.nodes import quarantine
from holdfast.policies.nodes.cordons import Answer, CordonChanged, Node, OperatorRequest, Owner, QuarantineLimits
from holdfast.spec import Cluster
from holdfast.stored_job import recorded_cluster

Verb = Callable[[Node, OperatorRequest], Answer]


def cordon(nodes: Sequence[str], *, reason: str, seconds: float | None, cluster_file: Path | None, as_json: bool) -> int:
    """Cordon nodes, for a duration or until a person lifts it."""

    def verb(present: Node, request: OperatorRequest) -> Answer:
        return quarantine.cordon(present, request, until=None if seconds is None else request.at + seconds)

    return _change(verb, nodes, reason, cluster_file, as_json=as_json)


def uncordon(nodes: Sequence[str], *, reason: str, number: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Lift the cordons of people; if *number* is given, only that one."""
    return _change(lambda node, request: quarantine.uncordon(node, request, number), nodes, reason, cluster_file, as_json=as_json)


def return_to_service(nodes: Sequence[str], *, reason: str, number: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Return nodes to service without a burn-in."""
    return _change(lambda node, request: quarantine.return_to_service(node, request, number), nodes, reason, cluster_file, as_json=as_json)


def decommission(nodes: Sequence[str], *, reason: str, cluster_file: Path | None, as_json: bool) -> int:
    """Take nodes out of service for good."""
    return _change(quarantine.decommission, nodes, reason, cluster_file, as_json=as_json)


def _change(verb: Verb, nodes: Sequence[str], reason: str, cluster_file: Path | None, *, as_json: bool) -> int:
    """Carry out a request about nodes, and show them afterwards; raise an `OperatorError` for the first one that it is impossible for."""
    cluster = cluster_in(cluster_file)
    with closing(History.open()) as history:
        done, refused = _carry_out(history, cluster, nodes, reason, verb)
        isolated = not as_json and any(one.node.is_isolated for one in done)
        jobs = jobs_on(history, view_nodes(cluster)) if isolated else {}
    if as_json:
        echo_json({"cluster": cluster.name, "nodes": [_change_record(one) for one in done]})
    else:
        for one in done:
            _show_change(one, jobs.get(one.node.name))
    if cluster.kind == "slurm":
        from holdfast.cluster.slurm.drains import follow  # noqa: PLC0415 (most clusters are not Slurm's)

        for text in (text for one in done for text in follow(cluster, one.node)):
            hint(text)
    if refused:
        raise _refusal(refused)
    return 0


def drain(  # noqa: PLR0913 (as many as the command has options)
    nodes: Sequence[str],
    *,
    by: str | None,
    within: float | None,
    reason: str,
    cancel: bool,
    cluster_file: Path | None,
    default_cluster: Path | None,
    job: str | None,
    as_json: bool,
) -> int:
    """Have jobs leave nodes *by* a time or *within* seconds, and show what follows for the jobs on them.

    Raise an `OperatorError` where that is impossible.
    """
    if cancel and (by is not None or within is not None):
        raise click.UsageError("`--cancel` cancels the drain: leave `--by` and `--in` out, or leave `--cancel` out to change the time")
    if cluster_file is not None and job is not None:
        raise click.UsageError("name the cluster once: with `--cluster` or with `--job`")
    leave_by = _leave_by(by, within, time.time())

    def verb(present: Node, request: OperatorRequest) -> Answer:
        return quarantine.cancel_drain(present, request) if cancel else quarantine.drain(present, request, leave_by=leave_by)

    with closing(History.open()) as history:
        cluster = cluster_in(cluster_file or default_cluster) if job is None else recorded_cluster(find_job(history, job))
        done, refused = _carry_out(history, cluster, nodes, reason, verb)
        jobs = jobs_on(history, view_nodes(cluster)) if done else {}
        if as_json:
            echo_json({"cluster": cluster.name, "nodes": [_drain_record(one, jobs.get(one.node.name), leave_by) for one in done]})
        else:
            for one in done:
                _show_drain(history, one, jobs.get(one.node.name), leave_by)
    if refused:
        raise _refusal(refused)
    return 0


def _carry_out(
    history: History, cluster: Cluster, nodes: Sequence[str], reason: str, verb: Verb
) -> tuple[list[CordonChanged], list[NodeNotChanged]]:
    """Record what *verb* makes of each node; return the changes and the refusals.

    Raise `UnknownNode`, before anything changes, for a name that neither the cluster nor the history has.
    """
    now = time.time()
    table = CordonTable(cluster=cluster.name, names=names_of(cluster), rules=cluster.quarantine.rules)
    request = OperatorRequest(owner=Owner(name=operator(), person=True), reason=reason, at=now)
    also = cordons.nodes(history, table, now=now)  # a node that left the cluster may still be cordoned
    done, refused = list[CordonChanged](), list[NodeNotChanged]()

    def answered(present: Node, _: QuarantineLimits) -> Answer:
        return verb(present, request)

    for node in known_nodes(nodes, table.cluster, list(table.names), also):
        answer = cordons.apply(history, table, node, answered, now=now)
        if isinstance(answer, CordonChanged):
            done.append(answer)
        else:
            refused.append(NodeNotChanged(node, cluster.name, answer.why))
    return done, refused


def _refusal(refused: Sequence[NodeNotChanged]) -> NodeNotChanged:
    """Return one error for all nodes that were not changed."""
    why = "; ".join(dict.fromkeys(one.why for one in refused))
    return NodeNotChanged(", ".join(one.node for one in refused), refused[0].cluster, why)


def _leave_by(by: str | None, within: float | None, now: float) -> float | None:
    if by is not None and within is not None:
        raise click.UsageError("name the time once: with `--by` or with `--in`")
    if within is not None:
        return now + within
    if by is None:
        return None
    at = coming_time(by)
    if at is None:
        cure = "Write a time of day or a date and a time, e.g. `18:00` or `2026-12-01 18:00`"
        raise click.BadParameter(f"'{by[:80]}' is not a time. {cure}.", param_hint="'--by'")
    if at <= now:
        cure = "Name a future time, or leave it out: jobs leave as soon as they can"
        raise click.BadParameter(f"'{by}' is in the past. {cure}.", param_hint="'--by'")
    return at


def _moved(done: CordonChanged) -> tuple[str, str]:
    """Return the state of the node before, and the change as text."""
    before = str(done.transitions[0].before if done.transitions else done.node.state)
    return before, f"{before} -> {done.node.state}" if done.transitions else f"{done.node.state}, as before"


def _change_record(done: CordonChanged) -> dict[str, Any]:
    """Return a change for programs."""
    until = next((one.until for one in done.node.cordons if one.number == done.cordon), None)
    return {
        "node": done.node.name,
        "before": _moved(done)[0],
        "state": done.node.state,
        "cordon": done.cordon,
        "owner": done.owner.name,
        "reason": done.reason,
        "until": until,
    }


def _show_change(done: CordonChanged, job: Job | None) -> None:
    """Show a change of a node, and the job on it."""
    node, until = done.node, next((one.until for one in done.node.cordons if one.number == done.cordon), None)
    ends = f", until {clock(until)}" if until is not None else ""
    echo(f"{node.name}: {_moved(done)[1]} (cordon {done.cordon}, by {done.owner.name}{ends})")
    if job is not None and node.is_isolated:
        hint(f"Job '{job.name}' trains on {node.name} and continues there. `holdfast node drain {node.name}` migrates it.")


def _drain_record(done: CordonChanged, job: Job | None, leave_by: float | None) -> dict[str, Any]:
    """Return a change of a node's drain for programs, with the job on the node."""
    facts = _change_record(done)
    del facts["until"]
    return {**facts, "drains": done.node.drain is not None, "by": leave_by, "job": job.name if job is not None else None}


def _show_drain(history: History, done: CordonChanged, job: Job | None, leave_by: float | None) -> None:
    node, owner, moved = done.node.name, done.owner.name, _moved(done)[1]
    if done.node.drain is None:
        echo(f"{node}: {moved} (its drain is cancelled, by {owner})")
        return
    until = "as soon as that interrupts nothing" if leave_by is None else f"by {clock(leave_by)}"
    echo(f"{node}: {moved} (cordon {done.cordon}, by {owner}); jobs leave it {until}")
    if job is None:
        return
    if holder_of(history, job.id) is None:
        hint(f"Job '{job.name}', which trains there, has no controller: the same `holdfast run` reattaches, and migrates it then.")
    else:
        hint(f"Job '{job.name}' trains there: `holdfast status {job.name} --follow` shows how it leaves.")
