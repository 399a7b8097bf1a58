"""The incidents of one job: the one in work (its faults, its decisions, where its seconds went) and the recoveries before it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from holdfast.control.checkpoints.snapshot_stats import regroup_facts, restart_facts, snapshot_age
from holdfast.control.state.generation import GenerationState
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import Diagnosis, PastFailure
from holdfast.history import Recorder, models
from holdfast.policies import uptime
from holdfast.policies.recovery.case import IN_PROCESS, Case, PastRecovery
from holdfast.policies.recovery.escalation import Decision, RecoveryAction

PHASES: Final = (
    "detect",
    "diagnose",
    "isolate",
    "failed attempt",
    "wait",
    "reschedule",
    "communication",
    "load",
    "warm-up",
    "rollback",
)


@dataclass(slots=True, kw_only=True)
class IncidentInWork:
    """One incident from its first fault to the first new step."""

    row: models.Incident
    lap_at: float
    """When the phase that runs now began."""
    state: GenerationState
    """The state of the generation in which the fault came, with the steps that a rollback loses."""
    faults: list[Fault] = field(default_factory=list)
    fault_rows: list[models.FaultRecord] = field(default_factory=list)
    decisions: list[models.DecisionRecord] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    diagnosis_row: models.IncidentDiagnosis | None = None
    """The row of the newest diagnosis, with its candidates."""
    decision: Decision | None = None
    case: Case | None = None
    """What the newest decision was made from, with what the rules noted."""
    tried: list[RecoveryAction] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Members that cannot hold ranks any more."""
    silent_since: dict[str, float] = field(default_factory=dict)
    """Those of them that were checked again, and when their agents were last known to run (wall clock)."""
    seconds: dict[str, float] = field(default_factory=dict)
    action_at: float = 0.0
    """When the action in work began."""
    replacement_attempts: int = 0
    """How often ranks were replaced in their processes, or an attempt at that began."""
    approved: set[str] = field(default_factory=set)
    """Nodes that may be isolated although too few remain: a person approved that, or nobody answered in time."""
    blocked_reason: str = ""
    """Why no rank can be replaced in this incident any more."""

    def note_commands(self, recorder: Recorder) -> None:
        """Record when the commands of an action had been answered: of the first action, and of every attempt."""
        now, facts = time.time(), self.row.facts or {}
        action = self.decision.action if self.decision is not None else ""
        self.row.facts = {**facts, "orders": [*facts.get("orders", ()), {"action": action, "at": now}]}
        if self.row.commands_sent_at is None:
            self.row.commands_sent_at = now
        recorder.amend(models.Incident, self.row.id, commands_sent_at=self.row.commands_sent_at, facts=self.row.facts)

    def lap(self, phase: str, now: float) -> None:
        """Count the time since the last lap to *phase*."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, now - self.lap_at)
        self.lap_at = max(self.lap_at, now)

    def phases(self) -> list[tuple[str, float]]:
        """Return the phases that took place, in their order."""
        return [(name, self.seconds[name]) for name in PHASES if name in self.seconds]

    def rows(self) -> list[models.Phase]:
        """Return the phases as rows of the history."""
        return [
            models.Phase(job_id=self.row.job_id, incident_id=self.row.id, position=position, name=name, seconds=seconds)
            for position, (name, seconds) in enumerate(self.phases())
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAttempt:
    """One recovery that was decided: when, which action, because of which node, and the job's newest step at that time."""

    at: float
    action: RecoveryAction
    node: str | None
    best: int
    incident: str
    """Id of the incident that it answers."""
    kind: str = ""
    """Catalogue kind of the root cause, where it is on record."""
    step: int | None = None
    """The step at which the fault came."""
    generation: int = 0
    """The generation that it replaces."""
    progressed: bool = False
    """That generation made progress, in a job without steps."""


class Incidents:
    """The incident in work, the one before it, and the recoveries that were tried so far."""

    def __init__(self, log: JobLog, generations: Generations) -> None:
        self._log, self._generations = log, generations
        self.current: IncidentInWork | None = None
        self.last: models.Incident | None = None
        """The newest incident that was closed."""
        self.last_decision: Decision | None = None
        """The newest decision on it."""
        self.count = 0
        self.attempts: list[RecoveryAttempt] = []
        self.failures_before: list[PastFailure] = []

    @property
    def current_id(self) -> str | None:
        """Return the row id of the incident in work."""
        return None if self.current is None else self.current.row.id

    def decided(self) -> frozenset[str]:
        """Return the incidents for which a recovery was decided, or will be in a moment."""
        present = {self.current.row.id} if self.current is not None else set()
        return frozenset({one.incident for one in self.attempts} | present)

    def close(self, outcome: str) -> models.Incident:
        """Record how the incident in work ended (phases, steps lost, downtime), and return its row."""
        incident, state = self.current, self._generations.state
        assert incident is not None
        row, now = incident.row, time.time()
        row.outcome, row.closed_at, row.generation_after = outcome, now, self._generations.number
        if outcome == "recovered":
            self._account(incident, now)
            grouped = regroup_facts(state.regrouped, state.covered) or restart_facts(state.ranks.values()) or {}
            row.facts = {**(row.facts or {}), **grouped} or None
            for rank, regrouped in sorted(state.regrouped.items()):
                for difference in regrouped.differs:
                    self._log.record_event(f"rank {rank}, which another process took over, differs from before: {difference}")
        age = snapshot_age(incident.state)
        if age is not None:
            row.facts = {**(row.facts or {}), "snapshot_age": age}
        for phase in incident.rows():
            self._log.recorder.add(phase)
        fields = ("action", "outcome", "closed_at", "generation_after", "resumed_step", "steps_lost", "downtime_s", "reason", "facts")
        self._log.recorder.amend(models.Incident, row.id, **{name: getattr(row, name) for name in fields})
        self._log.publish("incident", {"incident": incident})
        self.current, self.last, self.last_decision = None, row, incident.decision
        return row

    def _account(self, incident: IncidentInWork, now: float) -> None:
        """Split the time since the ranks stopped into T1 to T4, and price the rollback (T0) by the time that the lost steps had taken.

        What nobody reported has no phase: of a script that reports no steps only the start of its processes is known; of one that keeps
        its own state nobody knows how its time until the first new step was spent.
        """
        state = self._generations.state
        row, first = incident.row, state.first_step_at() or now
        started = max((rank.started or 0.0 for rank in state.ranks.values()), default=now)
        incident.lap("reschedule", started)
        group, load = state.slowest_mark("group"), state.slowest_mark("load")
        rest = max(0.0, first - incident.lap_at - group - load)
        if not state.any_stepped():
            row.facts = {**(row.facts or {}), models.DOWN_UNTIL: models.STARTED}
        elif not state.heartbeats:
            incident.seconds |= {"communication": group, "load": load, "warm-up": rest}
        row.downtime_s = first - row.fault_at
        row.resumed_step = state.resumed_from_step(incident.state)
        if row.resumed_step is not None and row.step_before is not None:
            row.steps_lost = max(0, row.step_before - row.resumed_step)
            incident.seconds["rollback"] = incident.state.seconds_of(row.resumed_step)

    def past(self, now: float) -> tuple[PastRecovery, ...]:
        """Return the earlier recoveries with the progress that each brought until the next one."""
        if not self.attempts:
            return ()
        managed = self._generations.managed
        nexts = [(one.progressed, one.best, one.incident) for one in self.attempts[1:]]
        nexts.append((self.progressed(now), self._generations.best, self.current_id or ""))
        return tuple(
            PastRecovery(
                at=one.at,
                action=one.action,
                node=one.node,
                made_progress=best > one.best if managed else progressed,
                interrupted=one.action in IN_PROCESS and one.incident == incident,
                kind=one.kind,
                step=one.step,
            )
            for one, (progressed, best, incident) in zip(self.attempts, nexts, strict=True)
        )

    def progressed(self, now: float) -> bool:
        """Return whether this generation made progress until *now* or its fault, in a job without steps; each decision counts once."""
        generations = self._generations
        begun = generations.state.first_step_at()
        if generations.managed or begun is None or (self.attempts and self.attempts[-1].generation >= generations.number):
            return False
        diagnosis = self.current.diagnosis if self.current is not None else None
        return uptime.counts_as_progress((now if diagnosis is None else diagnosis.root.at) - begun, generations.state.startup())
