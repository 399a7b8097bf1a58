"""`holdfast nodes hold`, `release`, `readmit` and `retire`, and `holdfast drain`: a person's request about a node."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from holdfast.cli.arguments import coming_time, operator, seconds_in
from holdfast.cli.commands.nodes import view_nodes
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, echo, echo_json, hint
from holdfast.cluster import names_of
from holdfast.errors import NodeNotChanged, UnknownNode
from holdfast.history import cordons
from holdfast.history.cordons import CordonTable
from holdfast.history.lease import holder_of
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.report.wording import NOTHING
from holdfast.spec import Cluster, LocalCluster, load_cluster
from holdfast.stored_job import recorded_cluster
from policies.cordons import Answer, CordonChanged, Node, OperatorRequest, Owner, QuarantineLimits
from policies.quarantine import cancel_drain, drain, hold, readmit, release, retire

Verb = Callable[[Node, OperatorRequest], Answer]


def hold_node(node: str, *, reason: str, lasts: str | None, cluster_file: Path | None, as_json: bool) -> int:
    """Cordon a node, for the duration *lasts* or until it is released."""
    seconds = None if lasts is None else seconds_in(lasts, "--for")

    def verb(present: Node, request: OperatorRequest) -> Answer:
        return hold(present, request, until=None if seconds is None else request.at + seconds)

    return _change(verb, node, reason, cluster_file, as_json=as_json)


def release_node(node: str, *, reason: str, number: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Lift a person's cordon; if *number* is given, only that one."""
    return _change(lambda present, request: release(present, request, number), node, reason, cluster_file, as_json=as_json)


def readmit_node(node: str, *, reason: str, number: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Return a node to service without a burn-in."""
    return _change(lambda present, request: readmit(present, request, number), node, reason, cluster_file, as_json=as_json)


def retire_node(node: str, *, reason: str, cluster_file: Path | None, as_json: bool) -> int:
    """Decommission a node."""
    return _change(retire, node, reason, cluster_file, as_json=as_json)


def _change(verb: Verb, node: str, reason: str, cluster_file: Path | None, *, as_json: bool) -> int:
    """Carry out a request about a node, and show the node afterwards; raise an `OperatorError` where that is impossible."""
    cluster = load_cluster(cluster_file) if cluster_file else LocalCluster()
    with closing(History.open()) as history:
        done = _carry_out(history, cluster, node, reason, verb)
    _show_change(cluster, done, as_json=as_json)
    if cluster.kind == "slurm":
        from holdfast.cluster.slurm.drains import follow  # noqa: PLC0415 (most clusters are not Slurm's)

        for text in follow(cluster, done.node):
            hint(text)
    return 0


def drain_node(  # noqa: PLR0913 (as many as the command has options)
    node: str,
    *,
    by: str | None,
    within: str | None,
    reason: str,
    cancel: bool,
    cluster_file: Path | None,
    job: str | None,
    as_json: bool,
) -> int:
    """Have jobs leave a node *by* a time or *within* a duration, and show what follows for the job on it.

    Raise an `OperatorError` where that is impossible.
    """
    if cancel and (by is not None or within is not None):
        raise click.UsageError("`--cancel` cancels the drain: leave `--by` and `--in` out, or leave `--cancel` out to change the time")
    leave_by = _leave_by(by, within, time.time())

    def verb(present: Node, request: OperatorRequest) -> Answer:
        return cancel_drain(present, request) if cancel else drain(present, request, leave_by=leave_by)

    with closing(History.open()) as history:
        if cluster_file is not None and job is not None:
            raise click.UsageError("name the cluster once: with `--cluster` or with `--job`")
        if job is not None:
            cluster = recorded_cluster(find_job(history, job))
        else:
            cluster = load_cluster(cluster_file) if cluster_file else LocalCluster()
        done = _carry_out(history, cluster, node, reason, verb)
        _show_drain(history, cluster, done, leave_by, as_json=as_json)
    return 0


def _carry_out(history: History, cluster: Cluster, node: str, reason: str, verb: Verb) -> CordonChanged:
    """Record what *verb* makes of a node; refuse a name that neither the cluster nor the history has."""
    now = time.time()
    table = CordonTable(cluster=cluster.name, names=names_of(cluster), rules=cluster.quarantine.rules)
    request = OperatorRequest(owner=Owner(name=operator(), person=True), reason=reason, at=now)
    if node not in table.names and node not in cordons.nodes(history, table, now=now):  # a node that left the cluster may still be cordoned
        raise UnknownNode(node, table.cluster, tuple(difflib.get_close_matches(node, table.names, n=3) or list(table.names)[:5]))

    def answered(present: Node, _: QuarantineLimits) -> Answer:
        return verb(present, request)

    answer = cordons.apply(history, table, node, answered, now=now)
    if not isinstance(answer, CordonChanged):
        raise NodeNotChanged(node, cluster.name, answer.why)
    return answer


def _leave_by(by: str | None, within: str | None, now: float) -> float | None:
    if by is not None and within is not None:
        raise click.UsageError("name the time once: with `--by` or with `--in`")
    if within is not None:
        return now + seconds_in(within, "--in")
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


def _show_change(cluster: Cluster, done: CordonChanged, *, as_json: bool) -> None:
    node, until = done.node, next((one.until for one in done.node.holds if one.number == done.hold), None)
    before, moved = _moved(done)
    if as_json:
        facts = {"cluster": cluster.name, "node": node.name, "before": before, "state": node.state, "hold": done.hold}
        echo_json({**facts, "owner": done.owner.name, "reason": done.reason, "until": until})
        return
    ends = f", until {clock(until)}" if until is not None else ""
    echo(f"{node.name}: {moved} (hold {done.hold}, by {done.owner.name}{ends})")
    job = next((view.job for view in view_nodes(cluster) if view.name == node.name), None) if node.is_isolated else None
    if job and job != NOTHING:
        hint(f"Job '{job}' trains on {node.name} and continues there. `holdfast drain {node.name}` migrates it.")


def _show_drain(history: History, cluster: Cluster, done: CordonChanged, leave_by: float | None, *, as_json: bool) -> None:
    node, drains = done.node, done.node.drain is not None
    before, moved = _moved(done)
    job = next((view.job for view in view_nodes(cluster) if view.name == node.name), None)
    with history.session() as session:
        row = session.get(Job, job) if job else None
    name = row.name if row is not None else job
    if as_json:
        facts = {"cluster": cluster.name, "node": node.name, "before": before, "state": node.state, "hold": done.hold}
        echo_json({**facts, "owner": done.owner.name, "reason": done.reason, "drains": drains, "by": leave_by, "job": name})
        return
    if not drains:
        echo(f"{node.name}: {moved} (its drain is cancelled, by {done.owner.name})")
        return
    until = "as soon as that interrupts nothing" if leave_by is None else f"by {clock(leave_by)}"
    echo(f"{node.name}: {moved} (hold {done.hold}, by {done.owner.name}); jobs leave it {until}")
    if name and row is not None and holder_of(history, row.id) is None:
        hint(f"Job '{name}', which trains there, has no controller: the same `holdfast run` reattaches, and migrates it then.")
    elif name:
        hint(f"Job '{name}' trains there: `holdfast status {name} --follow` shows how it leaves.")
