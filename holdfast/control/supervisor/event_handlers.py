"""Handlers of the agents' events: what is recorded of each, and which part of the controller gets it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.control.agents.events import (
    AgentEvent,
    HotSpareExited,
    HotSparePrepared,
    HotSpareReady,
    HotSpareStarted,
    HotSpareSwitched,
    HotSpareUnprepared,
    MemstoreFull,
    MemstoreUnavailable,
    NodeConditionsUnreadable,
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
    Steps,
    StorageErrorEvent,
    WorkerDeparted,
    WorkerExited,
    WorkerLevel,
    WorkerPrepared,
    WorkerRoles,
    WorkerStepped,
    WorkerSwitched,
    WorkerUnprepared,
)
from holdfast.control.agents.reactor import EventQueue
from holdfast.control.checkpoints.job_checkpoints import JobCheckpoints
from holdfast.control.faults.job_faults import REMEMBERED, JobFaults, keep_newest
from holdfast.control.faults.node_faults import (
    REPEATED,
    ROWS,
    ROWS_AT_ONCE,
    STEPS,
    STEPS_AT_ONCE,
    Announcements,
    BoundedDict,
    NodeEventBudget,
    NodeFaultDedup,
    machine_of,
    with_counter_increases,
)
from holdfast.control.faults.stragglers import Stragglers
from holdfast.control.nodes.drains import PlannedDrains
from holdfast.control.nodes.job_nodes import JobNodes
from holdfast.control.state.generation import MALFORMED_EVENT
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.detectors.catalogue import CATALOGUE, Fault, RecommendedAction
from holdfast.detectors.confirmation import UNUSED
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import CheckpointFailure, HangLimits, MemstoreFailure
from holdfast.detectors.log_lines.xids import UNUSABLE
from holdfast.errors import HistoryError
from holdfast.history import History, models, queries
from holdfast.log import note
from holdfast.policies.nodes.node_health import LOAD_KINDS
from holdfast.protocol import Message
from holdfast.report.text.wording import fault_line, listing

log = logging.getLogger("holdfast.control")

STALE_REPLICA: Final = "replica-lag"
GATHERED: Final = 3.0
"""Seconds from the first node with stale replicas until one event reports all of them."""
CONDITION_TIME: Final = 1.0
"""Seconds by which the time of a node condition may be too early: Kubernetes has whole ones."""


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
    """The step that was recorded last, of any generation."""
    _unknown: tuple[int, int] = 0, 0
    """The generation and step of the newest row whose loss only a lost process knew."""
    _resumed: dict[int, int] = field(default_factory=dict)
    """Generation to the step that it resumed from, as an earlier controller recorded it."""
    _complete: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    """Complete checkpoints without a reported problem: path and step."""
    _storage_errors: BoundedDict[tuple[str, str], None] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    _unreadable: BoundedDict[str, None] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    """Reasons why conditions of Kubernetes nodes cannot be read, as reported."""
    _rows: NodeEventBudget = field(init=False)
    _steps: NodeEventBudget = field(init=False)
    _stale: dict[str, str] = field(default_factory=dict)
    """Node to why its replicas are stale, until that is reported."""
    _stale_due: float = 0.0

    def __post_init__(self) -> None:
        self._rows = NodeEventBudget("faults, checkpoints and events", ROWS, ROWS_AT_ONCE, self.log.record_event)
        self._steps = NodeEventBudget("steps", STEPS, STEPS_AT_ONCE, self.log.record_event)

    def begin(self, *, recorded: int = 0, saved: int = 0) -> None:
        """Begin a generation of which the history has the steps up to *recorded* and the checkpoints up to *saved*."""
        self._recorded, self._saved = recorded, saved

    def remember(self, newest: int, resumed: dict[int, int], checkpoints: Iterable[models.Checkpoint] = ()) -> None:
        """Take over what another controller recorded: the *newest* step, the step that each generation resumed from, and *checkpoints*.

        Agents send again what that controller may not have written.
        """
        self._newest, self._resumed = newest, resumed
        for one in checkpoints:
            if one.problem:
                self._storage_errors[one.problem, one.path] = None

    def admits(self, node: str, event: AgentEvent, *, budgeted: bool) -> bool:
        """Return whether *event* of *node*'s agent belongs to the present generation and, where it is *budgeted*, may still be recorded."""
        return event.generation in {None, self.generations.number} and (not budgeted or self._rows.allows(node))

    def note_old_steps(self, node: str, event: Steps) -> None:
        """Record the steps of a former generation, which a controller that reattaches receives again; a recorded one stays as it is."""
        if event.generation < self.generations.number:
            self._record_steps(node, event)

    def on_replay(self, node: str, event: ReplayedEvents) -> None:
        """Record the steps and checkpoints among them; what is recorded already stays as it is, and nothing else follows."""
        for one in event.events:
            try:
                self._record_replayed(node, one)
            except MALFORMED_EVENT as error:  # they come from a file, which may be damaged
                note(log, "replay.damaged", node=node, why=repr(error))

    def _record_replayed(self, node: str, message: Message) -> None:
        name = message.get("event")
        if name == "steps" and (steps := Steps.of(message)).generation <= self.generations.number:
            self._record_steps(node, steps)
        elif name == "saved" and self.admits(node, saved := Saved.of(message), budgeted=True):
            self.on_saved(node, saved)

    def read_replayed(self) -> None:
        """Record the replayed events of nodes that were reachable only at the end of the job."""
        for node, event in self.events.drain(0.0):
            if event.get("event") == "replay":
                with suppress(ValueError):
                    self.on_replay(node, ReplayedEvents.of(event))

    def newest_complete(self) -> int:
        """Return the step of the newest checkpoint that was reported, or that the ranks resumed from."""
        return max([*self._complete.values(), self.generations.state.resumed_step() or 0])

    def good_before(self, step: int) -> str:
        """Describe the newest checkpoint from before *step* that was reported, or that the ranks resumed from."""
        resumed = {
            view.resumed_from: view.resumed
            for view in self.generations.state.ranks.values()
            if view.resumed_from and view.resumed is not None
        }
        good = [saved for saved in (self._complete | resumed).values() if saved < step]
        return f"the newest checkpoint from before is that of step {max(good)}" if good else "no checkpoint from before is known"

    def on_steps(self, node: str, event: Steps) -> None:
        """Record the steps, and publish the newest one."""
        self.generations.managed = True
        self._record_steps(node, event)
        step, _, seconds, loss, *_ = event.steps[-1]
        self.log.publish("progress", {"step": step, "until": self.generations.state.until(), "loss": loss, "seconds": seconds})

    def _record_steps(self, node: str, event: Steps) -> None:
        generation = event.generation
        for step, at, seconds, loss, samples, tokens in event.steps:
            if (generation + 1, step) == self._unknown:  # what the lost process reported arrives after its successor's report
                key = (self.log.job.id, generation + 1, step)
                self.log.recorder.amend(models.StepRecord, key, loss=loss, samples=samples, tokens=tokens)
            elif self._is_new(generation, step) and self._steps.allows(node):
                row = models.StepRecord(job_id=self.log.job.id, generation=generation, step=step, at=at, seconds=seconds, loss=loss)
                row.samples, row.tokens = samples, tokens
                self.log.recorder.add(row)
                self.generations.trained = True
                self._newest = step if generation == self.generations.number else self._newest
                if loss is None and step == self.generations.state.resumed_step():
                    self._unknown = generation, step
        if generation == self.generations.number:
            self._recorded = max(self._recorded, event.steps[-1][0])

    def _is_new(self, generation: int, step: int) -> bool:
        """Return whether *step* is a new one: a process that takes over rank 0 reports the step from which all resume once more.

        Its predecessor may have died before it reported that step. If it has reported it, that report stays: the new process does not know
        the loss.
        """
        if generation < self.generations.number:  # received again by a controller that reattached
            return step > self._resumed.get(generation, 0)
        resumed = self.generations.state.resumed_step()
        return step > self._recorded and (resumed is None or step > min(resumed, self._newest))

    def on_resumed(self, _node: str, _event: Resumed) -> None:
        """Note that the script's state is managed."""
        self.generations.managed = True

    def on_worker_stepped(self, _node: str, _event: WorkerStepped) -> None:
        """Record the first step of the generation once all ranks have stepped."""
        if self.generations.state.all_stepped():
            self.generations.record_first_step()

    def on_worker_level(self, _node: str, event: WorkerLevel) -> None:
        """Record which level of integration the script has reached, when that has changed."""
        if event.rank == min(self.generations.state.ranks) and event.text != self.generations.integration:
            self.generations.integration = event.text
            self.generations.record_facts()
            self.log.record_event(event.text)

    def on_worker_roles(self, _node: str, event: WorkerRoles) -> None:
        """Record the job's roles, for hot spares and for the next controller."""
        if event.roles:
            self.generations.roles, self.generations.recordings = tuple(tuple(ranks) for ranks in event.roles), event.recordings
            self.generations.copies = tuple(tuple(ranks) for ranks in event.copies or ())
            self.generations.record_facts()

    def on_prepared(self, _node: str, event: WorkerPrepared | HotSparePrepared) -> None:
        """Note which process is ready for the planned generation."""
        if self.generations.migration is not None:
            self.generations.migration.note_prepared(event.who, event.for_generation)

    def on_unprepared(self, _node: str, event: WorkerUnprepared | HotSpareUnprepared) -> None:
        """Note which process cannot get ready for the planned generation, and why."""
        if self.generations.migration is not None:
            self.generations.migration.note_refused(event.who, event.for_generation, event.why)

    def on_switched(self, _node: str, event: WorkerSwitched | HotSpareSwitched) -> None:
        """Note which process entered the planned generation."""
        if self.generations.migration is not None:
            self.generations.migration.note_switched(event.who, event.for_generation, event.seconds)

    def on_worker_departed(self, _node: str, event: WorkerDeparted) -> None:
        """Note that another process has this rank now."""
        if self.generations.migration is not None:
            self.generations.migration.departed.add(event.rank)

    def on_hot_spare_started(self, _node: str, event: HotSpareStarted) -> None:
        """Note that its number is taken."""
        self.nodes.hot_spares.note_started(event.id)

    def on_hot_spare_ready(self, _node: str, event: HotSpareReady) -> None:
        """Note that it can take a rank."""
        self.nodes.hot_spares.note_ready(event)

    def on_hot_spare_exited(self, _node: str, event: HotSpareExited) -> None:
        """Note that it is missing."""
        self.nodes.hot_spares.note_exited(event)

    def on_preemption_notice(self, node: str, event: PreemptionNoticed) -> None:
        """Have the ranks of a node that will be preempted move away while there is time."""
        seconds = event.seconds
        if event.at + seconds < time.time():  # an old notice that a controller receives as it reattaches: the node was not preempted
            return
        self.nodes.agents.leaving.add(node)
        if self.nodes.eligibility.notice(node, at=event.at, by=event.at + seconds, why=event.why):
            self.log.record_event(f"{node} got a preemption notice: it will be taken away in {seconds:.0f} s")
            self.drains.poll(time.time())
        self._check_terminated_with_node(node)

    def on_worker_exited(self, node: str, _event: WorkerExited) -> None:
        """Check whether the rank was terminated together with its node."""
        self._check_terminated_with_node(node)

    def _check_terminated_with_node(self, node: str) -> None:
        """Check whether a rank got the signal that announces a preemption to all processes of a node: it may arrive before the notice."""
        if node in self.generations.state.terminated and self.nodes.eligibility.has_preemption_notice(node):
            self.drains.rank_terminated_with_node(node)

    def on_preemption_cancelled(self, node: str, _event: PreemptionCancelled) -> None:
        """Forget a preemption notice that was cancelled."""
        self.nodes.forget_notice(node)
        self.log.record_event(f"{node} stays: its preemption notice was cancelled")

    def on_notice_unknown(self, node: str, event: NoticeUnknown) -> None:
        """Report it."""
        self.log.record_event(f"{node}: preemption notices cannot be read: {event.why}")

    def on_saved(self, _node: str, event: Saved) -> None:
        """Record the checkpoint; its duration sets the checkpoint interval."""
        if event.step <= self._saved:
            return
        self._saved = self._complete[event.path] = event.step
        facts, overlapped = event.model_dump(include={"at", "step", "path", "seconds", "size"}), event.overlapped or None
        self.log.recorder.add(
            models.Checkpoint(job_id=self.log.job.id, generation=self.generations.number, overlapped_s=overlapped, **facts)
        )
        self.checkpoints.note_saved(event.seconds, overlapped)

    def on_storage_error(self, node: str, event: StorageErrorEvent) -> None:
        """Record a problem with a checkpoint; training goes on, so no transition follows."""
        if (event.kind, event.path) in self._storage_errors:
            return
        self._storage_errors[event.kind, event.path] = None
        self._complete.pop(event.path, None)
        facts = event.model_dump(include={"at", "step", "path"})
        self.log.recorder.add(
            models.Checkpoint(job_id=self.log.job.id, generation=self.generations.number, problem=event.kind, reason=event.why, **facts)
        )
        evidence = CheckpointFailure(node=node, **event.model_dump(include={"rank", "at", "kind", "path", "why", "step"}))
        for fault in see([evidence], self.limits):
            keep_newest(self.generations.state.problems, fault)
            self.faults.record(fault, incident=None)
            if fault.kind == STALE_REPLICA:
                self._stale[node] = event.why
            else:
                self.log.record_event(fault_line(fault.entry.title, fault.quote, fault.entry.action))

    def poll(self, now: float) -> None:
        """Report all nodes with stale replicas in one event, a moment after the first: one cause makes many of them stale at once."""
        if not self._stale:
            return
        self._stale_due = self._stale_due or now + GATHERED
        if now >= self._stale_due:
            why = next(iter(self._stale.values())).partition(": ")[0]  # what follows repeats the title
            entry, text = CATALOGUE[STALE_REPLICA], f"{listing(sorted(self._stale))}: {why}"
            self._stale, self._stale_due = {}, 0.0
            self.log.record_event(fault_line(entry.title, text, entry.action))

    def on_memstore_problem(self, node: str, event: MemstoreUnavailable | MemstoreFull | ReplicaLost) -> None:
        """Record a new problem with the state in memory."""
        self.report_memory(*self.checkpoints.replicas.note_problem(node, event))

    def on_replica_restored(self, node: str, event: ReplicaRestored) -> None:
        """Record that replicas are kept again."""
        self.report_memory(None, self.checkpoints.replicas.note_restored(node, event))

    def report_memory(self, evidence: MemstoreFailure | None, text: str) -> None:
        """Record a problem with the state in memory, through which training goes on, or that it is over."""
        for fault in see([evidence], self.limits) if evidence is not None else ():
            self.faults.record(fault, incident=None)
            text = text and fault_line(fault.entry.title, text, fault.entry.action)
        if text:
            self.log.record_event(text)

    def on_node_fault(self, node: str, event: NodeFaultSeen) -> None:
        """Record a fault of a node. By itself it is no incident: no action is taken on a node while steps advance through it.

        The exception is a GPU that cannot work any more while a rank computes on it: the rank cannot finish its next step.
        """
        fault = self.node_faults.take(node, event)
        if fault is None:
            return
        views = [view for view in map(self.generations.state.ranks.get, event.on) if view and view.node == node and not view.ended]
        # A condition may be reported minutes late: a process that was started since then is no victim of it.
        ranks = [view for view in views if not fault.is_condition or view.started is None or fault.at > view.started - CONDITION_TIME]
        if fault.kind in UNUSABLE and fault.is_proven and ranks:
            fault = replace(fault, rank=ranks[0].rank, step=ranks[0].known_step())
            keep_newest(self.generations.state.unusable, fault)
        self.faults.add_node_fault(fault)
        machine = machine_of(node, self.cluster_kind)
        is_new = self.faults.recommended_actions.of(fault) is not RecommendedAction.RECORD and self._announced.is_new(
            fault, machine, time.monotonic()
        )
        if is_new and not (fault.kind in LOAD_KINDS and self._another_job_reported(fault)):
            where = machine or f"{listing(sorted({node, *self.generations.members}))} (one machine)"
            line = fault_line(fault.entry.title, fault.quote, fault.entry.action)
            if fault.is_ruled_out:
                line = f"{fault.entry.title}: {fault.quote}. Only shown: {fault.contradicted or UNUSED}"
            self.log.record_event(f"{where}: {line}")
        self.stragglers.note(fault)

    def _another_job_reported(self, fault: Fault) -> bool:
        """Return whether another job has just reported the same of this machine: a person who starts many jobs reads it once."""
        if machine_of(fault.node or "", self.cluster_kind):
            return False
        try:
            return queries.fault_in_other_jobs(self.history, self.log.cluster, fault.kind, since=fault.at - REPEATED, but=self.log.job.id)
        except HistoryError:
            return False

    def on_node_counter_increases(self, node: str, event: NodeCounterIncreases) -> None:
        """Add the counters that increased on a node to their incident, which may have been answered before the node was checked."""
        row = self.incidents.current.row if self.incidents.current is not None else self.incidents.last
        if row is not None and row.generation_before == event.over and event.counter_increases:
            row.facts = with_counter_increases(row.facts, node, event)
            self.log.recorder.amend(models.Incident, row.id, facts=row.facts)

    def on_node_unmonitored(self, node: str, event: NodeUnmonitored) -> None:
        """Report it."""
        self.log.record_event(f"{node} is not monitored for faults any more: {event.why}")

    def on_node_gpu_events_lost(self, node: str, event: NodeGpuEventsLost) -> None:
        """Report it."""
        rest = "Until they are back, the kernel log and a check once a minute find the GPUs' faults"
        self.log.record_event(f"{node}: events of the GPU driver are not received: {event.why}. {rest}")

    def on_node_gpu_events_restored(self, node: str, _event: NodeGpuEventsRestored) -> None:
        """Report it."""
        self.log.record_event(f"{node}: events of the GPU driver are received again")

    def on_node_conditions_unreadable(self, node: str, event: NodeConditionsUnreadable) -> None:
        """Report it, once for all nodes that have the same reason."""
        if event.why not in self._unreadable:
            self._unreadable[event.why] = None
            self.log.record_event(f"{node}: what Kubernetes has of its node is not all read (the job does not need them): {event.why}")
