"""The log of the flow run: incidents stand there at WARNING, with a link to all that is known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect.logging import get_run_logger

from holdfast.control.state.incidents import IncidentInWork
from holdfast.prefect.links import incident_key, ui_link
from holdfast.prefect_client.task_titles import of_action, of_fault
from holdfast.report.wording import duration, plural

Tell = Callable[[str, dict[str, Any]], None]


class FlowLog:
    """Passes a run's news on, and logs those that a reader of the flow run has to know."""

    def __init__(self, job: str, further: Tell) -> None:
        self._job, self._further = job, further
        self._log = get_run_logger()

    def tell(self, event: str, facts: dict[str, Any]) -> None:
        """Log an incident that was decided on, or is over; pass everything on."""
        incident: IncidentInWork | None = facts.get("incident")
        if event == "decided" and incident is not None:
            self._decided(incident)
        if event == "incident" and incident is not None:
            self._over(incident)
        self._further(event, facts)

    def _decided(self, incident: IncidentInWork) -> None:
        decision, diagnosis = incident.decision, incident.diagnosis
        if decision is None or diagnosis is None:
            return
        root, more = diagnosis.root, len(incident.faults) - 1
        others = f" and {plural(more, 'further fault')}" if more > 0 else ""
        what = f"{of_fault(root)}{others}. Decision: {of_action(decision)}, because {decision.reason}"
        self._log.warning("Incident %d: %s", incident.row.number, what)

    def _over(self, incident: IncidentInWork) -> None:
        row = incident.row
        ends = {"recovered": "training again", "passed": "it passed by itself", "gave-up": "the job failed", "stopped": "the job was ended"}
        words = ends.get(row.outcome or "", row.outcome or "closed")
        if row.outcome == "recovered":
            lost = "" if row.steps_lost is None else f", {plural(row.steps_lost, 'step')} lost"
            again = "all processes started again" if row.until_started else words
            words = f"{again} after {duration(row.downtime_s)}{lost}"
        link = ui_link("artifact", incident_key(self._job, row.number))
        self._log.warning("Incident %d over: %s%s", row.number, words, f". Details: {link}" if link else "")
