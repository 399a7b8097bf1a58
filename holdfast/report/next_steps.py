"""What a person can do next about a job: a sentence and the command that does it, most urgent first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.accounting.bill import Bill
from holdfast.accounting.ledger import ROLLBACK, TimeCategory
from holdfast.history.models import Job, NodeStatusChange
from holdfast.plurals import plural
from holdfast.report.case import IncidentCase
from holdfast.report.text import incident_text, wording

MOST_NODES: Final = 4
"""Nodes that are named one by one."""
_NOTABLE: Final = 0.02
"""Share of the time from which a loss is worth a step."""
_COMPARED: Final = 3
"""Incidents from which it is worth comparing policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """Why something should be done, and the *arguments* of the command that does it, quoted for a shell, or a line for the script."""

    text: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """Return the command as one line."""
        return " ".join(self.arguments)


def next_steps(job: Job, bill: Bill, cases: Sequence[IncidentCase], statuses: Mapping[str, NodeStatusChange]) -> list[NextStep]:
    """Return the steps for *job*; *statuses* are the newest ones of its cluster's nodes, whichever job recorded them."""
    name = job.name
    return list(dict.fromkeys([*_about_state(name, bill, cases), *_about_nodes(job, bill, statuses), *_about_losses(job, bill, cases)]))


def _about_state(job: str, bill: Bill, cases: Sequence[IncidentCase]) -> Iterator[NextStep]:
    state = next((one.job for one in bill.jobs), None)
    newest = cases[-1].incident if cases else None
    if state is not None and state.state == "FAILED":
        if newest is not None and newest.outcome == "failed":
            fix = incident_text.fix(newest.kind)
            yield NextStep(text=fix[:1].upper() + fix[1:], arguments=_arguments("incidents", "show", str(newest.number), "--job", job))
        yield NextStep(text="Run the job again: it resumes from its newest checkpoint", arguments=_arguments("run", f"{job}.yaml"))
    elif state is not None and not state.ended and not state.has_controller:
        yield NextStep(
            text="No controller runs this job: run it again to reattach to its ranks", arguments=_arguments("run", f"{job}.yaml")
        )
    elif newest is not None and newest.closed_at is None:
        text = f"Incident {newest.number} is open: follow its recovery"
        yield NextStep(text=text, arguments=_arguments("status", job))


def _about_nodes(job: Job, bill: Bill, statuses: Mapping[str, NodeStatusChange]) -> Iterator[NextStep]:
    cluster = str(job.cluster.get("name", ""))
    where = [] if cluster in {"", "local"} else ["--cluster", f"{cluster}.yaml"]
    bad = [one for one in bill.bad_nodes if one.to_quarantine]
    for one in bad[:MOST_NODES]:
        incidents = plural(one.incidents, "incident")
        text = f"{one.node}: {incidents} attributed to it, mostly {one.worst}. Keep new jobs off it, then test it with a burn-in"
        yield NextStep(
            text=text,
            arguments=_arguments("node", "cordon", one.node, "--reason", f"{incidents} in {job.name}, mostly {one.worst}", *where),
        )
        yield NextStep(text=f"{one.node}: find out which part is faulty", arguments=_arguments("node", "burn-in", one.node, *where))
    of_job = {node: one for node, one in statuses.items() if one.job_id == job.id and node not in {known.node for known in bad}}
    lost, excluded = (sorted(node for node, one in of_job.items() if one.status == status) for status in ("lost", "excluded"))
    for node in lost[:MOST_NODES]:
        text = f"{node} is lost. Once it is repaired and answers, test it before jobs use it again"
        yield NextStep(text=text, arguments=_arguments("node", "burn-in", node, *where))
    for node in excluded[: MOST_NODES - len(lost[:MOST_NODES])]:
        why = incident_text.brief(of_job[node].reason)
        text = f"{node} was released from this job{f' ({why})' if why else ''}. See whether other jobs may use it"
        yield NextStep(text=text, arguments=_arguments("node", "ls", node, *where))
    if (more := len(lost) + len(excluded) - MOST_NODES) > 0:
        text = f"{plural(more, 'more node')} of this job {'is' if more == 1 else 'are'} lost or released"
        yield NextStep(text=text, arguments=_arguments("node", "ls", *where))


def _about_losses(job: Job, bill: Bill, cases: Sequence[IncidentCase]) -> Iterator[NextStep]:
    total = bill.total_hours
    if total and bill.costs.steps_lost is None:
        text = "The script reports no steps, so ETTR and lost steps are not known. Call this once per step in the script"
        yield NextStep(text=text, arguments=("holdfast.heartbeat(step, loss)",))
    again, saves = bill.phases.get(ROLLBACK, 0.0), bill.hours(TimeCategory.CHECKPOINTS)
    if total and max(again, saves) > _NOTABLE * total:
        what = "were spent on steps computed a second time" if again >= saves else "were spent on checkpoints that stop training"
        text = f"{wording.share(max(again, saves) / total)} of the time {what}. See which checkpoint interval costs least"
        yield NextStep(text=text, arguments=_arguments("checkpoint", "advise", job.name))
    if len(cases) >= _COMPARED:
        other = "aggressive" if job.spec.get("policy") != "aggressive" else "patient"
        text = f"{plural(len(cases), 'incident')}: see what another policy would have decided"
        yield NextStep(text=text, arguments=_arguments("policy", "replay", other, "--job", job.name))


def logs_command(job: str, case: IncidentCase) -> str:
    """Return the command that shows the logs of the rank, or of the node, that an incident is about."""
    root = next((one for one in case.faults if one.root), None)
    if root is not None and root.rank is not None:
        return _command("logs", job, "--rank", str(root.rank), "-n", "200")
    node = root.node if root is not None else None
    return _command("logs", job, *(["--node", node] if node else []), "-n", "200")


def _command(*words: str) -> str:
    return " ".join(_arguments(*words))


def _arguments(*words: str) -> tuple[str, ...]:
    return tuple(map(shlex.quote, ("holdfast", *words)))
