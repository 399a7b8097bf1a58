"""`holdfast drain`: a person's word that a node is taken away, and that jobs are to leave it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from holdfast.cli.actor import signature
from holdfast.cli.commands.nodes import views_of
from holdfast.cli.commands.nodes_cordon import refuse_a_stranger, seconds_in
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, hint, say, say_json
from holdfast.cli.time_arguments import coming
from holdfast.cluster import names_of
from holdfast.errors import NodeNotChanged
from holdfast.history import History
from holdfast.history.cordons import CordonTable
from holdfast.history.cordons import apply as apply_cordon
from holdfast.history.lease import holder_of
from holdfast.history.models import Job
from holdfast.spec import Cluster, LocalCluster, load_cluster
from holdfast.stored_job import recorded_cluster
from policies.cordons import Answer, CordonChanged, Node, OperatorRequest, Owner, QuarantineLimits
from policies.quarantine import cancel_drain, drain


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """What a person wants of a node."""

    node: str
    reason: str
    by: str | None = None
    """When it has to be empty."""
    within: str | None = None
    """The same as a duration from now."""
    cancel: bool = False


def drain_node(wish: DrainRequest, cluster_file: Path | None, job: str | None, *, as_json: bool) -> int:
    """Carry out the word, and tell what follows for the job on the node; raise an `OperatorError` where it cannot be."""
    now = time.time()
    leave_by = _leave_by(wish, now)
    history = History.open()
    try:
        cluster = _cluster(history, cluster_file, job)
        place = CordonTable(cluster=cluster.name, names=names_of(cluster), rules=cluster.quarantine.rules)
        word = OperatorRequest(owner=Owner(name=signature(), person=True), reason=wish.reason, at=now)
        refuse_a_stranger(history, place, wish.node, now)
        answer = apply_cordon(history, place, wish.node, partial(_said, wish, word, leave_by), now=now)
        if not isinstance(answer, CordonChanged):
            raise NodeNotChanged(wish.node, cluster.name, answer.why)
        _tell(history, cluster, answer, leave_by, as_json=as_json)
    finally:
        history.close()
    return 0


def _said(wish: DrainRequest, word: OperatorRequest, leave_by: float | None, node: Node, _: QuarantineLimits) -> Answer:
    return cancel_drain(node, word) if wish.cancel else drain(node, word, leave_by=leave_by)


def _leave_by(wish: DrainRequest, now: float) -> float | None:
    if wish.cancel and (wish.by is not None or wish.within is not None):
        raise click.UsageError(
            "`--cancel` takes the whole wish back: leave `--by` and `--in` out, or leave `--cancel` out to change the time"
        )
    if wish.by is not None and wish.within is not None:
        raise click.UsageError("name the time once: by `--by` or by `--in`")
    if wish.within is not None:
        return now + seconds_in(wish.within, "--in")
    if wish.by is None:
        return None
    at = coming(wish.by)
    if at is None:
        cure = "Write a time of day or a date and a time, e.g. `18:00` or `2026-12-01 18:00`"
        raise click.BadParameter(f"'{wish.by[:80]}' is no time. {cure}.", param_hint="'--by'")
    if at <= now:
        raise click.BadParameter(
            f"'{wish.by}' is over. Name a time to come, or leave it out: jobs leave as soon as they can.", param_hint="'--by'"
        )
    return at


def _cluster(history: History, cluster_file: Path | None, job: str | None) -> Cluster:
    if cluster_file is not None and job is not None:
        raise click.UsageError("name the cluster once: by `--cluster` or by `--job`")
    if job is not None:
        return recorded_cluster(find_job(history, job))
    return load_cluster(cluster_file) if cluster_file else LocalCluster()


def _tell(history: History, cluster: Cluster, done: CordonChanged, leave_by: float | None, *, as_json: bool) -> None:
    node, asked = done.node, done.node.drain
    before = done.moves[0].before if done.moves else node.state
    job = next((view.job for view in views_of(cluster) if view.name == node.name), None)
    with history.session() as session:
        row = session.get(Job, job) if job else None
    name = row.name if row is not None else job
    if as_json:
        facts = {"cluster": cluster.name, "node": node.name, "before": before, "state": node.state, "hold": done.hold}
        say_json({**facts, "owner": done.owner.name, "reason": done.reason, "drains": asked is not None, "by": leave_by, "job": name})
        return
    moved = f"{before} -> {node.state}" if done.moves else f"{node.state}, as before"
    if asked is None:
        say(f"{node.name}: {moved} (its drain is cancelled, by {done.owner.name})")
        return
    until = "as soon as that interrupts nobody" if leave_by is None else f"by {clock(leave_by)}"
    say(f"{node.name}: {moved} (hold {done.hold}, by {done.owner.name}); jobs leave it {until}")
    if name and row is not None and holder_of(history, row.id) is None:
        hint(f"No flow steers job '{name}', which trains there: the same `holdfast run` adopts it, and moves it then.")
    elif name:
        hint(f"Job '{name}' trains there: `holdfast status {name} --follow` shows how it leaves.")
