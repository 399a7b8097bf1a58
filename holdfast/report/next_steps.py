"""What a person can do next about a job: a sentence and the command that does it, most urgent first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from detectors.catalogue import CATALOGUE, RecommendedAction
from holdfast.accounting.bill import Bill
from holdfast.accounting.ledger import ROLLBACK, TimeCategory
from holdfast.history.models import Job, NodeStatusChange
from holdfast.report import wording
from holdfast.report.case import IncidentCase

MOST_NODES: Final = 4
"""Nodes that are named one by one."""
_NOTABLE: Final = 0.02
"""Share of the time from which a loss is worth a step."""
_OUT: Final = frozenset({"lost", "excluded"})
_COMPARED: Final = 3
"""Incidents from which it is worth comparing policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """Why something should be done, and the *command* that does it."""

    text: str
    command: str


def next_steps(job: Job, bill: Bill, cases: Sequence[IncidentCase], statuses: Mapping[str, NodeStatusChange]) -> list[NextStep]:
    """Return the steps for *job*; *statuses* are the newest ones of its nodes."""
    name = job.name
    return list(dict.fromkeys([*_about_state(name, bill, cases), *_about_nodes(job, bill, statuses), *_about_losses(job, bill, cases)]))


def _about_state(job: str, bill: Bill, cases: Sequence[IncidentCase]) -> Iterator[NextStep]:
    state = next((one.job for one in bill.jobs), None)
    newest = cases[-1].incident if cases else None
    if state is not None and state.state == "FAILED":
        if newest is not None and newest.outcome == "failed":
            entry = CATALOGUE.get(newest.kind)
            is_user_error = entry is not None and entry.recommended_action is RecommendedAction.USER_ERROR
            cure = "Fix the script: the traceback is in the incident" if is_user_error else entry.action if entry is not None else ""
            yield NextStep(
                text=cure or "See why no recovery was possible", command=_command("incidents", "show", str(newest.number), "--job", job)
            )
        yield NextStep(text="Run the job again: it resumes from its newest checkpoint", command=_command("run", f"{job}.yaml"))
    elif state is not None and not state.ended and not state.has_controller:
        yield NextStep(text="No controller runs this job: run it again to reattach to its ranks", command=_command("run", f"{job}.yaml"))
    elif newest is not None and newest.closed_at is None:
        text = f"Incident {newest.number} is open: follow its recovery"
        yield NextStep(text=text, command=_command("status", job))


def _about_nodes(job: Job, bill: Bill, statuses: Mapping[str, NodeStatusChange]) -> Iterator[NextStep]:
    cluster = str(job.cluster.get("name", ""))
    where = [] if cluster in {"", "local"} else ["--cluster", f"{cluster}.yaml"]
    bad = [one for one in bill.bad_nodes if one.to_quarantine]
    for one in bad[:MOST_NODES]:
        incidents = wording.plural(one.incidents, "incident")
        text = f"{one.node}: {incidents} attributed to it, mostly {one.worst}. Keep new jobs off it, then test it with a burn-in"
        yield NextStep(
            text=text, command=_command("node", "cordon", one.node, "--reason", f"{incidents} in {job.name}, mostly {one.worst}", *where)
        )
        yield NextStep(text=f"{one.node}: find out which part is faulty", command=_command("node", "burn-in", one.node, *where))
    out = sorted(node for node, change in statuses.items() if change.status in _OUT and node not in {one.node for one in bad})
    for node in out[:MOST_NODES]:
        text = f"{node} is {statuses[node].status}. Once it is repaired and answers, test it before jobs use it again"
        yield NextStep(text=text, command=_command("node", "burn-in", node, *where))
    if len(out) > MOST_NODES:
        yield NextStep(text=f"{wording.count(len(out) - MOST_NODES)} more nodes are out of service", command=_command("node", "ls", *where))


def _about_losses(job: Job, bill: Bill, cases: Sequence[IncidentCase]) -> Iterator[NextStep]:
    total = bill.total_hours
    if total and bill.costs.steps_lost is None:
        text = "The script reports no steps, so ETTR and lost steps are unknown. Call `holdfast.heartbeat(step, loss)` once per step"
        yield NextStep(text=text, command=_command("faults", "show", "job-hang"))
    again, saves = bill.phases.get(ROLLBACK, 0.0), bill.hours(TimeCategory.CHECKPOINTS)
    if total and max(again, saves) > _NOTABLE * total:
        what = "were spent on steps computed a second time" if again >= saves else "were spent on checkpoints that stop training"
        text = f"{wording.share(max(again, saves) / total)} of the time {what}. See which checkpoint interval costs least"
        yield NextStep(text=text, command=_command("checkpoint", "advise", job.name))
    if len(cases) >= _COMPARED:
        other = "aggressive" if job.spec.get("policy") != "aggressive" else "patient"
        text = f"{wording.plural(len(cases), 'incident')}: see what another policy would have decided"
        yield NextStep(text=text, command=_command("policy", "replay", other, "--job", job.name))


def logs_command(job: str, case: IncidentCase) -> str:
    """Return the command that shows the logs of the rank, or of the node, that an incident is about."""
    root = next((one for one in case.faults if one.root), None)
    if root is not None and root.rank is not None:
        return _command("logs", job, "--rank", str(root.rank), "-n", "200")
    node = root.node if root is not None else None
    return _command("logs", job, *(["--node", node] if node else []), "-n", "200")


def _command(*words: str) -> str:
    return shlex.join(["holdfast", *words])
