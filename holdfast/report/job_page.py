"""The job page of the Prefect UI as Markdown: state, recent incidents, and what a person should do. Pure: facts in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.history.models import ApprovalRequest
from holdfast.plurals import plural
from holdfast.policies.states import TERMINAL, State
from holdfast.report.case import IncidentCase
from holdfast.report.text import incident_text, wording
from holdfast.report.text.markdown import plain, table

MOST_INCIDENTS: Final = 10
"""Incidents that the page lists."""
MOST_NODES: Final = 64
"""Nodes that the page lists one by one."""
BAR: Final = 20
"""Characters of the progress bar."""


def no_link(_number: int) -> str:
    """Return no link for an incident."""
    return ""


@dataclass(kw_only=True)
class JobFacts:
    """What the page shows of a job."""

    job: str
    cluster: str = ""
    host: str = ""
    began: float = 0.0
    """When the job was submitted (seconds since 1970)."""
    state: str = State.LAUNCHING
    reason: str = ""
    step: int | None = None
    until: int | None = None
    loss: float | None = None
    step_time: float | None = None
    """Average seconds of the newest steps."""
    ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Node to its ranks."""
    spares: Sequence[str] = ()
    hot_spares: Mapping[str, int] = field(default_factory=dict)
    """Node to the number of its ready hot spares."""
    isolated: Mapping[str, str] = field(default_factory=dict)
    """Nodes out of service, and why."""
    approval: ApprovalRequest | None = None
    """The pending approval."""
    cases: list[IncidentCase] = field(default_factory=list)
    """The newest incidents, oldest first."""
    incidents: int = 0
    """Number of all incidents."""
    run_link: str = ""
    incident_link: Callable[[int], str] = no_link

    @property
    def over(self) -> bool:
        """Return whether the job has ended."""
        return self.state in TERMINAL

    @property
    def share(self) -> float:
        """Return the progress of the job: 0 to 1."""
        return min(1.0, self.step / self.until) if self.step is not None and self.until else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds to the last step; None if unknown."""
        if self.until is None or self.step is None or self.step_time is None or self.over:
            return None
        return max(0, self.until - self.step) * self.step_time


def job_page(facts: JobFacts, now: float) -> str:
    """Return the page as Markdown."""
    blocks = [
        f"# {plain(facts.job)}: {facts.state}",
        f"**Action:** {plain(to_do(facts))}.",
        _state(facts, now),
        "## Incidents",
        *_incidents(facts),
        "## Nodes",
        *_nodes(facts),
        "---",
        _links(facts),
        f"Updated {wording.moment(now)} by the controller on {plain(facts.host or 'an unknown host')}.",
    ]
    return "\n\n".join(blocks) + "\n"


def progress_text(facts: JobFacts) -> str:
    """Return step, loss and remaining time: ``step 120 of 400, loss 0.0083, about 10 min left``."""
    if facts.step is None:
        return "no step yet"
    parts = [f"step {facts.step:,} of {facts.until:,}" if facts.until else f"step {facts.step:,}"]
    parts += [f"loss {facts.loss:.4g}"] if facts.loss is not None else []
    left = facts.seconds_left
    parts += [f"about {wording.about(left)} left"] if left else []
    return ", ".join(parts)


def description(facts: JobFacts) -> str:
    """Return the page in one line, as lists of artifacts show it."""
    newest = f"; last incident: {incident_text.short(facts.cases[-1])}" if facts.cases else ""
    return f"{facts.state.lower()}, {progress_text(facts)}{newest}"


def to_do(facts: JobFacts) -> str:
    """Return what a person should do."""
    newest = facts.cases[-1] if facts.cases else None
    isolated = [f"{node} is out of service: {incident_text.brief(why, 300)}" for node, why in facts.isolated.items()]
    if facts.approval is not None:
        asked = f"answer approval {facts.approval.number}: {incident_text.brief(facts.approval.reason, 300)}"
        return f"{asked}. `holdfast node approve {facts.approval.number}`, or the paused flow run in the Prefect UI"
    if facts.state == State.FAILED:
        if newest is not None and newest.incident.outcome == "failed":
            return "; ".join([incident_text.to_do(newest, facts.job, {}), *isolated])
        return f"see why ({incident_text.brief(facts.reason, 300)}), then run the job again: it goes on from its newest checkpoint"
    by_state = {
        State.WAITING: "; ".join([f"the job waits: {incident_text.brief(facts.reason, 300)}", *isolated]),
        State.SUSPENDED: "resume the flow run in Prefect, or run the job again: the same job continues",
        State.CANCELLED: f"nothing; `holdfast run {facts.job}.yaml` goes on from the newest checkpoint",
    }
    return by_state.get(State(facts.state)) or "; ".join(isolated) or incident_text.NOTHING_TO_DO


def _state(facts: JobFacts, now: float) -> str:
    rows = [("State", f"{facts.state}: {plain(incident_text.brief(facts.reason, 300))}" if facts.reason else facts.state)]
    if facts.step is not None:
        step = wording.count(facts.step)
        if facts.until:
            filled = round(BAR * facts.share)
            bar = "█" * filled + "░" * (BAR - filled)
            step = f"{step} of {wording.count(facts.until)} {bar} {wording.share(facts.share)}"
        rows.append(("Step", step))
    if (left := facts.seconds_left) is not None:
        rows.append(("Time left", f"about {wording.about(left)}"))
    if facts.step_time is not None:
        rows.append(("Step time", wording.duration(facts.step_time)))
    if facts.loss is not None:
        rows.append(("Loss", f"{facts.loss:.4g}"))
    rows.append(("Nodes", _counts(facts)))
    if facts.began:
        rows.append(("Submitted", f"{wording.moment(facts.began)}, {wording.about(max(0.0, now - facts.began))} ago"))
    return table(("", plain(f"{facts.cluster}/{facts.job}" if facts.cluster else facts.job)), rows)


def _counts(facts: JobFacts) -> str:
    ranks = sum(len(of_node) for of_node in facts.ranks.values())
    counts = [f"{plural(len(facts.ranks), 'node')} with {plural(ranks, 'rank')}"]
    counts += [plural(len(facts.spares), "spare node")] if facts.spares else []
    hot = sum(facts.hot_spares.values())
    counts += [plural(hot, "hot spare")] if hot else []
    counts += [f"{len(facts.isolated)} out of service"] if facts.isolated else []
    return ", ".join(counts)


def _incidents(facts: JobFacts) -> Iterator[str]:
    if not facts.cases:
        yield "None."
        return
    lines = []
    for case in reversed(facts.cases[-MOST_INCIDENTS:]):
        number, link = case.incident.number, facts.incident_link(case.incident.number)
        name = f"[Incident {number}]({link})" if link else f"Incident {number}"
        lines.append(f"- {name}: {plain(incident_text.with_time(case))}")
    yield "\n".join(lines)
    if (more := facts.incidents - len(lines)) > 0:
        yield f"{plural(more, 'earlier incident')}: `holdfast incidents {facts.job}`"


def _nodes(facts: JobFacts) -> Iterator[str]:
    roles = [(node, f"rank {wording.ranks(ranks)}" if ranks else wording.NOTHING) for node, ranks in facts.ranks.items()]
    rows = []
    for node, role in [*roles, *((node, "spare node") for node in facts.spares)]:
        hot = facts.hot_spares.get(node, 0)
        rows.append((plain(node), role + (f", {plural(hot, 'hot spare')}" if hot else "")))
    rows += [(plain(node), f"out of service: {plain(incident_text.brief(why, 200))}") for node, why in facts.isolated.items()]
    if not rows:
        yield "None yet."
        return
    yield table(("Node", "What it does"), rows[:MOST_NODES])
    if (more := len(rows) - MOST_NODES) > 0:
        yield f"and {wording.count(more)} more: `holdfast status {facts.job}`"


def _links(facts: JobFacts) -> str:
    run = [f"[Flow run]({facts.run_link})"] if facts.run_link else []
    return " · ".join([*run, f"`holdfast report {facts.job}` draws losses, incidents and times", f"`holdfast status {facts.job}`"])
