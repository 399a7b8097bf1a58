"""Handlers of the agents' events: what is recorded of each, and which part of the controller gets it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from detectors.catalogue import CATALOGUE, Fault, RecommendedAction
from detectors.diagnosis import see
from detectors.evidence import CheckpointFailure, HangLimits, MemstoreFailure
from detectors.xids import UNUSABLE
from holdfast.control.agents.event_queue import EventQueue
from holdfast.control.agents.events import (
    AgentEvent,
    MemstoreFull,
    MemstoreUnavailable,
    NodeCounterIncreases,
    NodeFaultSeen,
    NodeGpuEventsLost,
    NodeGpuEventsRestored,
    NodeUnmonitored,
    NoticeUnknown,
    PreemptionCancelled,
    PreemptionNoticed,
    ReplayedEvents,
    ReplicaLost,
    ReplicaRestored,
    Resumed,
    Saved,
    StandbyExited,
    StandbyPrepared,
    StandbyReady,
    StandbyStarted,
    StandbySwitched,
    StandbyUnprepared,
    Steps,
    StorageErrorEvent,
    WorkerDeparted,
    WorkerExited,
    WorkerPrepared,
    WorkerRoles,
    WorkerStepped,
    WorkerSwitched,
    WorkerUnprepared,
)
from holdfast.control.checkpoints.job_checkpoints import JobCheckpoints
from holdfast.control.faults.event_budget import ROWS, ROWS_AT_ONCE, STEPS, STEPS_AT_ONCE, BoundedDict, NodeEventBudget
from holdfast.control.faults.job_faults import REMEMBERED, JobFaults, keep_newest
from holdfast.control.faults.node_faults import REPEATED, Announcements, NodeFaultDedup, machine_of, with_counter_increases
from holdfast.control.faults.stragglers import Stragglers
from holdfast.control.nodes.drains import PlannedDrains
from holdfast.control.nodes.job_nodes import JobNodes
from holdfast.control.state.generation import MALFORMED_EVENT
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.errors import HistoryError
from holdfast.history import History, models, queries
from holdfast.log import note
from holdfast.protocol import Message
from holdfast.report.wording import some, told
from policies.node_health import OF_USE

log = logging.getLogger("holdfast.control")

BEHIND: Final = "replica-behind"
GATHERED: Final = 3.0
"""Seconds from the first node whose replicas are behind to the remark on all of them."""


@dataclass(slots=True, kw_only=True)
class EventHandlers:
    """Handles the events of a job's agents. `holdfast.control.supervisor.event_table` says which method gets which event."""

    log: JobLog
    history: History
    cluster_kind: str
    limits: HangLimits
    events: EventQueue
    generations: Generations
    incidents: Incidents
    nodes: JobNodes
    checkpoints: JobCheckpoints
    faults: JobFaults
    stragglers: Stragglers
    drains: PlannedDrains
    node_faults: NodeFaultDedup = field(default_factory=NodeFaultDedup)
    _announced: Announcements = field(default_factory=Announcements)
    _recorded: int = 0
    _saved: int = 0
    _newest: int = 0
    """The step that was put on record last, by whichever generation."""
    _resumed: dict[int, int] = field(default_factory=dict)
    """Generation to the step that it resumed from, as an earlier controller recorded it."""
    _whole: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    """Complete checkpoints without a reported problem: path and step."""
    _troubles: BoundedDict[tuple[str, str], None] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    _rows: NodeEventBudget = field(init=False)
    _steps: NodeEventBudget = field(init=False)
    _behind: dict[str, str] = field(default_factory=dict)
    """Node to why its replicas are stale, until that is reported."""
    _behind_due: float = 0.0

    def __post_init__(self) -> None:
        self._rows = NodeEventBudget("faults, checkpoints and events", ROWS, ROWS_AT_ONCE, self.log.record_event)
        self._steps = NodeEventBudget("steps", STEPS, STEPS_AT_ONCE, self.log.record_event)

    def begin(self, *, recorded: int = 0, saved: int = 0) -> None:
        """Begin a generation of which the history has steps until *recorded* and checkpoints until *saved*."""
        self._recorded, self._saved = recorded, saved

    def remember(self, newest: int, resumed: dict[int, int]) -> None:
        """Learn what another flow put on record: the *newest* step, and the step that each generation went on from."""
        self._newest, self._resumed = newest, resumed

    def admits(self, node: str, event: AgentEvent, *, budgeted: bool) -> bool:
        """Tell whether *event* of *node*'s agent belongs to the present generation and, where it is *budgeted*, may still be recorded."""
        return event.generation in {None, self.generations.number} and (not budgeted or self._rows.allows(node))

    def note_old_steps(self, node: str, event: Steps) -> None:
        """Record steps of a generation that is over: a flow that adopts the job gets them again, and what is recorded stays as it is."""
        if event.generation < self.generations.number:
            self._record_steps(node, event)

    def on_past(self, node: str, event: ReplayedEvents) -> None:
        """Record the steps and checkpoints among them; what is known stays as it is, and nobody acts on it."""
        for one in event.events:
            try:
                self._take_past(node, one)
            except MALFORMED_EVENT as error:  # out of a file that anything may have happened to
                note(log, "past.damaged", node=node, why=repr(error))

    def _take_past(self, node: str, message: Message) -> None:
        name = message.get("event")
        if name == "steps" and (steps := Steps.of(message)).generation <= self.generations.number:
            self._record_steps(node, steps)
        elif name == "saved" and self.admits(node, saved := Saved.of(message), budgeted=True):
            self.on_saved(node, saved)

    def hear_out(self) -> None:
        """Take in what nodes that could be reached only at the end of the job have told of their past."""
        for node, event in self.events.drain(0.0):
            if event.get("event") == "past":
                with suppress(ValueError):
                    self.on_past(node, ReplayedEvents.of(event))

    def newest_complete(self) -> int:
        """Return the step of the newest checkpoint that this flow has heard of, or that the ranks went on from."""
        return max([*self._whole.values(), self.generations.state.resumed_step() or 0])

    def good_before(self, step: int) -> str:
        """Say what checkpoint there is from before *step*, as far as this flow has heard of any."""
        resumed = {
            view.resumed_from: view.resumed
            for view in self.generations.state.ranks.values()
            if view.resumed_from and view.resumed is not None
        }
        good = [saved for saved in (self._whole | resumed).values() if saved < step]
        return f"the newest checkpoint from before is that of step {max(good)}" if good else "no checkpoint from before is known"

    def on_steps(self, node: str, event: Steps) -> None:
        """Record the steps, and publish the newest one."""
        self.generations.managed = True
        self._record_steps(node, event)
        step, _, seconds, loss = event.steps[-1]
        self.log.publish("progress", {"step": step, "until": self.generations.state.until(), "loss": loss, "seconds": seconds})

    def _record_steps(self, node: str, event: Steps) -> None:
        generation = event.generation
        for step, at, seconds, loss in event.steps:
            if self._is_new(generation, step) and self._steps.allows(node):
                row = models.StepRecord(job_id=self.log.job.id, generation=generation, step=step, at=at, seconds=seconds, loss=loss)
                self.log.recorder.add(row)
                self._newest = step if generation == self.generations.number else self._newest
        if generation == self.generations.number:
            self._recorded = max(self._recorded, event.steps[-1][0])

    def _is_new(self, generation: int, step: int) -> bool:
        """Tell whether *step* is not only told again: a process that takes a place tells the step that all go on from.

        The one before may not have lived to do so. If it has, its word stays: the newcomer has the loss of another rank.
        """
        if generation < self.generations.number:  # heard again by a flow that adopted the job
            return step > self._resumed.get(generation, 0)
        resumed = self.generations.state.resumed_step()
        return step > self._recorded and (resumed is None or step > min(resumed, self._newest))

    def on_resumed(self, _node: str, _event: Resumed) -> None:
        """Note that the script's state is managed."""
        self.generations.managed = True

    def on_worker_stepped(self, _node: str, _event: WorkerStepped) -> None:
        """Close the incident in work once all ranks have stepped."""
        if self.generations.state.all_stepped():
            self.generations.record_first_step()

    def on_worker_roles(self, _node: str, event: WorkerRoles) -> None:
        """Remember the job's roles, for standbys and for the flows to come."""
        if event.roles:
            self.generations.roles, self.generations.recordings = tuple(tuple(ranks) for ranks in event.roles), event.recordings
            self.generations.copies = tuple(tuple(ranks) for ranks in event.copies or ())
            self.generations.record_facts()

    def on_prepared(self, _node: str, event: WorkerPrepared | StandbyPrepared) -> None:
        """Note who is ready for the planned generation."""
        if self.generations.migration is not None:
            self.generations.migration.note_prepared(event.who, event.for_generation)

    def on_unprepared(self, _node: str, event: WorkerUnprepared | StandbyUnprepared) -> None:
        """Note who cannot get ready for the planned generation, and why."""
        if self.generations.migration is not None:
            self.generations.migration.note_refused(event.who, event.for_generation, event.why)

    def on_switched(self, _node: str, event: WorkerSwitched | StandbySwitched) -> None:
        """Note who has gone on into the planned generation."""
        if self.generations.migration is not None:
            self.generations.migration.note_switched(event.who, event.for_generation, event.seconds)

    def on_worker_departed(self, _node: str, event: WorkerDeparted) -> None:
        """Note whose rank is with another process."""
        if self.generations.migration is not None:
            self.generations.migration.left.add(event.rank)

    def on_standby_started(self, _node: str, event: StandbyStarted) -> None:
        """Note that its number is taken."""
        self.nodes.hot_spares.note_started(event.id)

    def on_standby_ready(self, _node: str, event: StandbyReady) -> None:
        """Note that it can take a rank."""
        self.nodes.hot_spares.note_ready(event)

    def on_standby_exited(self, _node: str, event: StandbyExited) -> None:
        """Have another one take its place."""
        self.nodes.hot_spares.note_exited(event)

    def on_preemption_notice(self, node: str, event: PreemptionNoticed) -> None:
        """Take in that a node is about to go: its ranks move away while there is time."""
        seconds = event.seconds
        if event.at + seconds < time.time():  # of long ago, heard by a flow that adopts the job: the node has outlived it
            return
        self.nodes.agents.leaving.add(node)
        if self.nodes.eligibility.notice(node, at=event.at, by=event.at + seconds, why=event.why):
            self.log.record_event(f"{node} was told to go, and will be gone in {seconds:.0f} s")
            self.drains.poll(time.time())
        self._see_departure(node)

    def on_worker_exited(self, node: str, _event: WorkerExited) -> None:
        """See whether the rank went with its node."""
        self._see_departure(node)

    def _see_departure(self, node: str) -> None:
        """See whether a rank got the signal that told its node to go, as a batch system sends it to all there is: either is heard first."""
        if node in self.generations.state.terminated and self.nodes.eligibility.has_preemption_notice(node):
            self.drains.rank_terminated_with_node(node)

    def on_preemption_cancelled(self, node: str, _event: PreemptionCancelled) -> None:
        """Take in that a notice was taken back."""
        self.nodes.forget_notice(node)
        self.log.record_event(f"{node} stays: the notice that it would go was taken back")

    def on_notice_unknown(self, node: str, event: NoticeUnknown) -> None:
        """Remark on it."""
        self.log.record_event(f"whether {node} will be taken away cannot be seen: {event.why}")

    def on_saved(self, _node: str, event: Saved) -> None:
        """Record the checkpoint; how long it took sets how often the job saves."""
        if event.step <= self._saved:
            return
        self._saved = self._whole[event.path] = event.step
        facts, beside = event.model_dump(include={"at", "step", "path", "seconds", "size"}), event.beside or None
        self.log.recorder.add(models.Checkpoint(job_id=self.log.job.id, generation=self.generations.number, beside=beside, **facts))
        self.checkpoints.note_saved(event.seconds, beside)

    def on_storage_error(self, node: str, event: StorageErrorEvent) -> None:
        """Record a checkpoint's trouble at once; training goes on through it, so the flow need not turn."""
        if (event.kind, event.path) in self._troubles:
            return
        self._troubles[event.kind, event.path] = None
        self._whole.pop(event.path, None)
        facts = event.model_dump(include={"at", "step", "path"})
        self.log.recorder.add(
            models.Checkpoint(job_id=self.log.job.id, generation=self.generations.number, problem=event.kind, reason=event.why, **facts)
        )
        evidence = CheckpointFailure(node=node, **event.model_dump(include={"rank", "at", "kind", "path", "why", "step"}))
        for fault in see([evidence], self.limits):
            keep_newest(self.generations.state.problems, fault)
            self.faults.record(fault, incident=None)
            if fault.kind == BEHIND:
                self._behind[node] = event.why
            else:
                self.log.record_event(told(fault.entry.title, fault.quote, fault.entry.action))

    def poll(self, now: float) -> None:
        """Tell in one remark on which nodes replicas are behind, a moment after the first: what slows all down slows them at once."""
        if not self._behind:
            return
        self._behind_due = self._behind_due or now + GATHERED
        if now >= self._behind_due:
            why = next(iter(self._behind.values())).partition(": ")[0]  # what follows says no more than the title
            entry, words = CATALOGUE[BEHIND], f"{some(sorted(self._behind))}: {why}"
            self._behind, self._behind_due = {}, 0.0
            self.log.record_event(told(entry.title, words, entry.action))

    def on_memory_trouble(self, node: str, event: MemstoreUnavailable | MemstoreFull | ReplicaLost) -> None:
        """Record a trouble with the state in memory that is new."""
        self.report_memory(*self.checkpoints.replicas.note_problem(node, event))

    def on_replica_restored(self, node: str, event: ReplicaRestored) -> None:
        """Record that replicas are kept again."""
        self.report_memory(None, self.checkpoints.replicas.note_restored(node, event))

    def report_memory(self, evidence: MemstoreFailure | None, words: str) -> None:
        """Record a trouble with the state in memory; training goes on through it."""
        for fault in see([evidence], self.limits) if evidence is not None else ():
            self.faults.record(fault, incident=None)
            words = words and told(fault.entry.title, words, fault.entry.action)
        if words:
            self.log.record_event(words)

    def on_node_fault(self, node: str, event: NodeFaultSeen) -> None:
        """Record what is wrong with a node at once. By itself it is no incident: nobody acts on a node while steps advance through it.

        The exception is a GPU that does no more work while a rank computes on it: two signs, and the rank cannot come to its next step.
        """
        fault = self.node_faults.take(node, event)
        if fault is None:
            return
        ranks = [view for view in map(self.generations.state.ranks.get, event.on) if view and view.node == node and not view.ended]
        if fault.kind in UNUSABLE and ranks:
            fault = replace(fault, rank=ranks[0].rank, step=ranks[0].known_step())
            keep_newest(self.generations.state.unusable, fault)
        self.faults.add_node_fault(fault)
        machine = machine_of(node, self.cluster_kind)
        is_new = self.faults.recommended_actions.of(fault) is not RecommendedAction.RECORD and self._announced.is_new(
            fault, machine, time.monotonic()
        )
        if is_new and not (fault.kind in OF_USE and self._was_told_to_others(fault)):
            where = machine or f"{some(sorted({node, *self.generations.members}))} (one machine)"
            self.log.record_event(f"{where}: {told(fault.entry.title, fault.quote, fault.entry.action)}")
        self.stragglers.note(fault)

    def _was_told_to_others(self, fault: Fault) -> bool:
        """Tell whether another job has just met the same on this machine: who starts jobs on a busy one is told once, and not by each."""
        if machine_of(fault.node or "", self.cluster_kind):
            return False
        try:
            return queries.fault_in_other_jobs(self.history, self.log.cluster, fault.kind, since=fault.at - REPEATED, but=self.log.job.id)
        except HistoryError:
            return False

    def on_node_counter_increases(self, node: str, event: NodeCounterIncreases) -> None:
        """Keep what grew on a node with the incident that it belongs to; that may have been answered before the node could be looked at."""
        row = self.incidents.current.row if self.incidents.current is not None else self.incidents.last
        if row is not None and row.generation_before == event.over and event.counter_increases:
            row.facts = with_counter_increases(row.facts, node, event)
            self.log.recorder.amend(models.Incident, row.id, facts=row.facts)

    def on_node_unmonitored(self, node: str, event: NodeUnmonitored) -> None:
        """Remark on it."""
        self.log.record_event(f"{node} is not watched for faults any more: {event.why}")

    def on_node_gpu_events_lost(self, node: str, event: NodeGpuEventsLost) -> None:
        """Remark on it."""
        rest = "Until another one has listened for a while, the kernel's log and a look once a minute tell what GPUs do"
        self.log.record_event(f"{node} is blind to errors as its GPUs' driver tells them: {event.why}. {rest}")

    def on_node_gpu_events_restored(self, node: str, _event: NodeGpuEventsRestored) -> None:
        """Remark on it."""
        self.log.record_event(f"{node} hears its GPUs' driver again")
