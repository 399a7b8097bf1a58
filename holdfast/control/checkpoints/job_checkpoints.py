"""The state of one job that survives its processes: replicas of its snapshots, and how often it saves to disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from holdfast.control.agents.pool import AgentPool
from holdfast.control.checkpoints.interval import CheckpointInterval
from holdfast.control.checkpoints.replicas import Replicas
from holdfast.control.checkpoints.snapshot_stats import SnapshotStats
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.history import models
from holdfast.history.statistics import STEPS
from holdfast.plurals import plural
from holdfast.policies.states import State


@dataclass(slots=True, kw_only=True)
class JobCheckpoints:
    """Keeps the replicas, and chooses the checkpoint interval where the job leaves that to Holdfast."""

    log: JobLog
    agents: AgentPool
    generations: Generations
    incidents: Incidents
    machine: JobStateMachine
    replicas: Replicas
    snapshots: SnapshotStats
    interval: CheckpointInterval | None = None
    """How often to save, where Holdfast chooses it."""
    _changed_in: int = 0
    """The generation whose interval changed while it trained."""

    def choose_interval(self, since: str, nodes: int) -> int | None:
        """Choose after how many steps to save on so many *nodes*; record a change, with *since* when it holds and its reason."""
        if self.interval is None:
            return None
        generations = self.generations
        present, steps = generations.rank_table.every, [seconds for _, seconds in islice(reversed(generations.state.durations), STEPS)]
        choice = self.interval.choose(present, nodes=nodes, incidents=self.incidents.decided(), steps=steps)
        if choice is not None and choice.every != present:
            before = f" (before: {present:,})" if present else ""
            self.log.record_event(f"from {since} on a checkpoint every {plural(choice.every, 'step')}{before}: {choice.reason}")
        return None if choice is None else choice.every

    def note_saved(self, seconds: float, overlapped: float | None) -> None:
        """Take into account that a checkpoint took *seconds*, and send rank 0 the interval that follows, for its next save.

        Sent again after each save once it has changed, as a command may be lost. Nothing depends on whether the ranks have received it:
        they change to it together, and the next generation starts with it.
        """
        if self.interval is None:
            return
        self.interval.note_saved(seconds, overlapped)
        generations = self.generations
        if self.machine.state is not State.RUNNING or self.incidents.current is not None or generations.migration is not None:
            return
        every = self.choose_interval("the next save", len(generations.members))
        if every is None:
            return
        if every != generations.rank_table.every:
            generations.rank_table, self._changed_in = replace(generations.rank_table, every=every), generations.number
            generations.record_facts()
        if self._changed_in == generations.number:
            self.agents.send_command_async(generations.state.first.node, "checkpoint-interval", generation=generations.number, steps=every)

    def note_recovered(self, incident: models.Incident) -> None:
        """Take an incident that was recovered into account."""
        if self.interval is not None:
            self.interval.note_recovered(incident)
