"""`holdfast status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.accounting.losses import losses
from holdfast.cli.job_view import JobView, find_job, live_jobs, look, placed
from holdfast.cli.output import clock, heading, hint, say_facts, say_json, say_rows
from holdfast.history.health_samples import health_by_node
from holdfast.history.lease import HEARTBEAT_TIMEOUT, standby_heartbeats
from holdfast.history.models import StandbyHeartbeat
from holdfast.history.store import History
from holdfast.report import cost_table, memory
from holdfast.report.wording import NOTHING, count, duration, rank_count, share
from holdfast.stored_job import recorded_cluster
from policies.states import State

WARNINGS: Final = 3
"""Newest warnings that are shown; `--json` has them all."""


def status(reference: str | None, *, as_json: bool) -> int:
    """Show what runs now, or one job in detail."""
    history = History.open(create=False)
    try:
        if reference is None:
            _all(history, as_json=as_json)
        else:
            _one(history, look(history, find_job(history, reference)), as_json=as_json)
    finally:
        history.close()
    return 0


def progress_of(outlook: JobView) -> str:
    """Say how far the job is: ``1,234 of 10,000``."""
    if outlook.step is None:
        return NOTHING
    return count(outlook.step.step) + (f" of {count(outlook.until)}" if outlook.until else "")


def loss_of(outlook: JobView) -> str:
    """Say the newest loss."""
    loss = outlook.step.loss if outlook.step else None
    return NOTHING if loss is None else f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.3e}"  # noqa: PLR2004 (where digits stop to help)


def rate_of(outlook: JobView) -> str:
    """Say how fast the job goes, in the unit that gives a number above one."""
    rate = outlook.rate
    if rate is None or rate <= 0:
        return NOTHING
    return f"{rate:.2f} steps/s" if rate >= 1 else f"{duration(1 / rate)} a step"


def _all(history: History, *, as_json: bool) -> None:
    outlooks = [look(history, job) for job in live_jobs(history)]
    if as_json:
        say_json([outlook.as_record() for outlook in outlooks])
    elif not outlooks:
        hint("No job runs. `holdfast history` lists those that have ended.")
    else:
        head = ("JOB", "STATE", "STEP", "LOSS", "RATE", "ETA", "NODES", "INCIDENTS", "FLOW")
        say_rows(head, [_row(outlook) for outlook in outlooks], coloured=1)


def _row(outlook: JobView) -> list[str]:
    flow = f"pid {outlook.holder.pid}" if outlook.holder else "none"
    return [
        outlook.job.name,
        outlook.state,
        progress_of(outlook),
        loss_of(outlook),
        rate_of(outlook),
        duration(outlook.eta),
        str(len(outlook.members)),
        str(len(outlook.incidents)),
        flow,
    ]


def _one(history: History, outlook: JobView, *, as_json: bool) -> None:
    present = [] if outlook.ended else standby_heartbeats(history, outlook.job)
    if as_json:
        told = {"losses": losses(history, outlook.job, now=outlook.at).as_record()}
        say_json({**outlook.as_record(), **told, "standbys": [one.model_dump(exclude={"job"}) for one in present]})
        return
    since = outlook.move.at if outlook.move else outlook.job.at
    heading(f"{outlook.job.name}  {outlook.state} since {clock(since)}: {outlook.reason}")
    say_facts([*_facts(outlook), *_troubles(history, outlook), *_health(history, outlook), *_places(outlook), *_standbys(outlook, present)])


def _facts(outlook: JobView) -> list[tuple[str, str]]:
    facts = []
    if outlook.step:
        of = share(outlook.step.step / outlook.until) if outlook.until else ""
        eta = f"ETA {duration(outlook.eta)}" if outlook.eta is not None else ""
        facts += [("step", "   ".join(part for part in (progress_of(outlook), of, eta) if part))]
        facts += [("loss", loss_of(outlook)), ("rate", rate_of(outlook))]
    elif outlook.no_steps:
        facts += [("step", outlook.no_steps)]
    if outlook.generation:
        size = rank_count(outlook.generation.world_size, outlook.generation.facts)
        facts += [("generation", f"{outlook.generation.number}: {size} on {placed(outlook.members)}")]
    cluster = recorded_cluster(outlook.job)
    if cluster.kind == "slurm" and not outlook.ended:
        from holdfast.cluster.slurm.nodes import describe_allocations  # noqa: PLC0415 (most clusters are not Slurm's)

        facts += [("slurm", describe_allocations(cluster, outlook.job.id, outlook.job.name))]
    facts += [("memory", words) for words in _memory(outlook)]
    if saved := outlook.checkpoint:
        facts += [("checkpoint", f"step {count(saved.step)}, {duration(max(0.0, outlook.at - saved.at))} ago, {saved.path}")]
    return facts


def _memory(outlook: JobView) -> list[str]:
    """Say what there is in memory, and what that costs; or why there is nothing."""
    row = outlook.snapshots
    if row is None or row.step is None:
        return [outlook.no_snapshots] if outlook.no_snapshots else []
    newest = memory.last(row) if outlook.ended else memory.newest(row, outlook.memory_fault, outlook.job.spec, outlook.at)
    return [f"{newest}\nsnapshots {memory.overhead([row])}"]


def _troubles(history: History, outlook: JobView) -> list[tuple[str, str]]:
    facts = [("warning", f"{one.kind} on {one.subject}: {one.evidence['quote']}") for one in outlook.warnings[-WARNINGS:]]
    if now := outlook.incident:
        answer = f", answer: {now.action}" if now.action else ""
        facts += [("open", f"incident {now.number} since {duration(outlook.at - now.fault_at)}: {now.kind} on {now.subject}{answer}")]
    if outlook.incidents:
        facts += [("incidents", f"{len(outlook.incidents)}; `holdfast history {outlook.job.name}` lists them")]
    if outlook.generation is not None:
        facts += cost_table.figures(losses(history, outlook.job, now=outlook.at))
    return facts


def _health(history: History, outlook: JobView) -> list[tuple[str, str]]:
    """Say which of the job's nodes are thought to be unhealthy or silent by who looks at them from outside."""
    if outlook.ended:
        return []
    told = health_by_node(history, str(outlook.job.cluster.get("name")))
    bad = [told[node] for node in outlook.members if node in told and told[node].is_bad and told[node].is_fresh(outlook.at)]
    return [("health", f"{one.node} {one.status} since {clock(one.since)}: {'; '.join(one.evidence[:2])}") for one in bad]


def _standbys(outlook: JobView, present: Sequence[StandbyHeartbeat]) -> list[tuple[str, str]]:
    """Say who would steer the job if its flow died, and who would not."""
    return [("standby", f"{one.host} {_standing(one, outlook.at)}") for one in present]


def _standing(one: StandbyHeartbeat, now: float) -> str:
    gone = now - one.at > HEARTBEAT_TIMEOUT
    if one.problem:
        return f"{f'ended {duration(now - one.at)} ago' if gone else 'cannot steer'}: {one.problem}"
    return f"was last heard of {duration(now - one.at)} ago" if gone else "ready to steer"


def _places(outlook: JobView) -> list[tuple[str, str]]:
    holder = outlook.holder
    facts = []
    if holder:
        hears = "; it hears no node of the job, and leaves it alone" if holder.partitioned else ""
        facts += [("flow", f"pid {holder.pid} on {holder.host.partition('/')[0]}{hears}")]
    elif outlook.state == State.SUSPENDED:
        facts += [("flow", "none; the job is suspended: resume it in Prefect, or start it again")]
    elif not outlook.ended:
        facts += [("flow", "none; training goes on under its agents. `holdfast run` with the same job file adopts it")]
    if outlook.flow_run_url:
        facts += [("flow run", outlook.flow_run_url)]
    facts += [("submitted", f"{clock(outlook.job.at)}, {duration(outlook.elapsed)} {'in all' if outlook.ended else 'ago'}")]
    return [*facts, ("directory", outlook.job.directory), ("id", outlook.job.id)]
