"""`holdfast status`: the state of one job."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import click

from holdfast.accounting.losses import losses
from holdfast.cli.commands.watch.events import show_events
from holdfast.cli.job_view import JobView, find_job, ranks_by_node, reference_to, view_job
from holdfast.cli.output import clock, echo_facts, echo_json, heading
from holdfast.history.lease import HEARTBEAT_TIMEOUT, standby_heartbeats
from holdfast.history.models import StandbyHeartbeat
from holdfast.history.store import History
from holdfast.policies.states import State
from holdfast.report import cost_table, memory
from holdfast.report.text.wording import count, duration, on_target, rank_count, share
from holdfast.stored_job import recorded_cluster

MAX_WARNINGS: Final = 3
"""Newest warnings that are shown; `--json` has them all."""


def status(job: str | None, *, follow: bool, events: bool, as_json: bool) -> int:
    """Show the state of a job or its events, or watch it."""
    if follow:
        if events:
            raise click.UsageError("`--follow` shows the events as they happen: leave out `--events`")
        from holdfast.cli.watch import follow as watch  # noqa: PLC0415 (a live picture, which others need not import)

        return watch(job, as_json=as_json)
    with closing(History.open(create=False)) as history:
        row = find_job(history, job)
        if events:
            show_events(history, row, as_json=as_json)
        else:
            _show(history, view_job(history, row), as_json=as_json)
    return 0


def _show(history: History, view: JobView, *, as_json: bool) -> None:
    standbys = [] if view.ended else standby_heartbeats(history, view.job)
    if as_json:
        more = {"losses": losses(history, view.job, now=view.at).as_record()}
        echo_json({**view.as_record(), **more, "standbys": [one.model_dump(exclude={"job"}) for one in standbys]})
        return
    since = view.move.at if view.move else view.job.at
    heading(f"{view.job.name}  {view.state} since {clock(since)}: {view.reason}")
    facts = [*_progress(view), *_saved(view), *_faults(history, view), *_nodes(view), *_controller(view)]
    echo_facts([*facts, *(("standby", f"{one.host} {_standby_status(one, view.at)}") for one in standbys)])


def _progress(view: JobView) -> list[tuple[str, str]]:
    facts = []
    if view.step:
        of = share(view.step.step / view.until) if view.until else ""
        eta = f"ETA {duration(view.eta)}" if view.eta is not None else view.as_of
        rate = "   ".join(part for part in (view.speed, view.throughput) if part)
        facts += [
            ("step", "   ".join(part for part in (view.progress, of, eta) if part)),
            ("loss", view.loss),
            ("rate", rate),
        ]
    elif view.complete_before is not None:
        facts += [("step", f"complete at step {count(view.complete_before)} before it started: no step was left")]
    elif view.no_steps:
        facts += [("step", view.no_steps)]
    if view.generation:
        size = rank_count(view.generation.world_size, view.generation.facts)
        facts += [("generation", f"{view.generation.number}: {size} on {ranks_by_node(view.members)}")]
    if (reserve := view.nodes.reserve) and not view.ended:
        facts += [("spares", reserve)]
    if view.integration and not view.ended:
        facts += [("integration", view.integration)]
    cluster = recorded_cluster(view.job)
    if cluster.kind == "slurm" and not view.ended:
        from holdfast.cluster.slurm.nodes import describe_allocations  # noqa: PLC0415 (most clusters are not Slurm's)

        facts += [("slurm", describe_allocations(cluster, view.job.id, view.job.name))]
    return facts


def _saved(view: JobView) -> list[tuple[str, str]]:
    """Return the in-memory snapshots and their cost, or why there are none; the newest checkpoint; what a failure would cost."""
    facts, row = [], view.snapshots
    if text := view.newest_snapshot:
        cost = f"\nsnapshots {memory.overhead([row])}" if row is not None and row.step is not None else ""
        facts += [("snapshot", f"{text}{cost}")]
    if saved := view.checkpoint:
        facts += [("checkpoint", f"step {count(saved.step)}, {duration(max(0.0, view.at - saved.at))} ago, {saved.path}")]
    if view.not_saved:
        facts += [("NOT SAVED", view.not_saved)]
    if view.risk:
        facts += [("at risk", view.risk)]
    return facts


def _faults(history: History, view: JobView) -> list[tuple[str, str]]:
    facts = [("warning", text) for text in view.warning_texts[-MAX_WARNINGS:]]
    if now := view.incident:
        action = f", action: {now.action}" if now.action else ""
        facts += [
            ("open", f"incident {now.number} since {duration(view.at - now.fault_at)}: {now.kind} on {on_target(now.target)}{action}")
        ]
    if view.incidents:
        facts += [("incidents", f"{len(view.incidents)}; `holdfast incidents {reference_to(history, view.job)}` lists them")]
    if view.generation is not None:
        facts += cost_table.figures(losses(history, view.job, now=view.at))
    return facts


def _nodes(view: JobView) -> list[tuple[str, str]]:
    """Return the nodes that need attention, as the live view shows them."""
    return [] if view.ended else [("nodes", text) for _, text in view.nodes.attention]


def _controller(view: JobView) -> list[tuple[str, str]]:
    holder = view.holder
    facts = []
    if holder:
        cut_off = "; it reaches no node of the job, and changes nothing" if holder.partitioned else ""
        facts += [("controller", f"pid {holder.pid} on {holder.host.partition('/')[0]}{cut_off}")]
    elif view.state == State.SUSPENDED:
        facts += [("controller", "none; the job is suspended: resume it in Prefect, or start it again")]
    elif not view.ended:
        facts += [("controller", "none; training continues under its agents. `holdfast run` with the same job file reattaches to it")]
    if view.flow_run_url:
        facts += [("flow run", view.flow_run_url)]
    facts += [("submitted", f"{clock(view.job.at)}, {duration(view.elapsed)} {'in all' if view.ended else 'ago'}")]
    return [*facts, ("directory", view.job.directory), ("id", view.job.id)]


def _standby_status(one: StandbyHeartbeat, now: float) -> str:
    """Return whether a standby controller would take over, and why not."""
    age = now - one.at
    if one.problem:
        return f"{f'ended {duration(age)} ago' if age > HEARTBEAT_TIMEOUT else 'cannot take over'}: {one.problem}"
    return f"last reported {duration(age)} ago" if age > HEARTBEAT_TIMEOUT else "ready to take over"
