"""Nodes that a batch system such as Slurm allocates to the job: how many it needs, their faults, and which have to be left in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.cluster.interface import AllocationRequest, Allocator, allocator_of
from holdfast.control.agents.pool import AgentPool
from holdfast.control.faults.job_faults import JobFaults
from holdfast.control.nodes.eligibility import NodeEligibility
from holdfast.control.state.generation import hang_limits
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.detectors.catalogue import RecommendedAction
from holdfast.detectors.diagnosis import see
from holdfast.errors import HoldfastError
from holdfast.policies.nodes.drains import Drain
from holdfast.policies.states import State
from holdfast.report.text.wording import fault_line, moment
from holdfast.spec import TrainingJob

MAX_LAUNCHES: Final = 3
"""Launches that may find too few nodes with an agent before the job fails."""
STOP_SECONDS: Final = 15.0
"""How long it may take to stop all ranks, in addition to the final checkpoint."""


@dataclass(slots=True, kw_only=True)
class AllocatedNodes:
    """Keeps as many nodes allocated as the job wants; where nodes are not allocated to jobs it does nothing."""

    log: JobLog
    spec: TrainingJob
    agents: AgentPool
    generations: Generations
    incidents: Incidents
    machine: JobStateMachine
    faults: JobFaults
    eligibility: NodeEligibility
    forget_notice: Callable[[str], None]
    _allocator: Allocator | None = field(init=False)
    _recorded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Node to the kinds of the scheduler's faults that were recorded of it."""
    _lost: dict[str, float] = field(default_factory=dict)
    """Nodes that were lost, and when, until they are back."""
    _launches: int = 0

    def __post_init__(self) -> None:
        self._allocator = allocator_of(self.agents.source)

    def begin(self) -> None:
        """Find the nodes that are allocated already; raise `OperatorError` when none ever can be."""
        if self._allocator is not None:
            self._allocator.begin(self.log.job.id, self.log.job.name, self.spec.inside("."))

    def close(self, *, end: bool) -> None:
        """Request no more; with *end*, return all allocations."""
        if self._allocator is not None:
            self._allocator.close(end=end)
            self._record_messages(self._allocator)

    def poll(self) -> None:
        """Request what the job needs now, and record what the batch system reports, without waiting."""
        allocator = self._allocator
        if allocator is None:
            return
        members, incident = self.generations.members, self.incidents.current
        usable = allocator.usable(time.time())
        self._forget_old_notices(allocator, usable)
        names = {*usable, *members, *self.eligibility.isolated()}
        out = {node: why for node in names if (why := self.eligibility.isolation(node))}
        used, save = (
            frozenset() if self.machine.state is State.WAITING else frozenset(members),
            self.spec.timeouts.final_checkpoint.total_seconds(),
        )
        if incident is not None:
            self._note_lost(incident.lost, incident.silent_since)
        alive = set(self.agents.alive())
        self._lost = {node: at for node, at in self._lost.items() if node not in alive}
        wanted, back = self.spec.max_nodes + self.spec.spare_nodes, self.eligibility.back_in_service()
        allocator.request(
            AllocationRequest(
                nodes=wanted, excluded=out, returned=back, unreachable=dict(self._lost), in_use=used, final_checkpoint_seconds=save
            )
        )
        self._record_messages(allocator)
        self._record_faults(allocator)

    def _forget_old_notices(self, allocator: Allocator, usable: Iterable[str]) -> None:
        """Forget the notices of nodes that are allocated anew: they were about the previous allocation."""
        anew = self._lost.keys() & set(usable)
        for one in self.eligibility.preemption_notices():
            since = allocator.allocated_since(one.node)
            if since is not None and since > one.since:
                anew.add(one.node)
        for node in anew:
            self.forget_notice(node)

    def _record_messages(self, allocator: Allocator) -> None:
        for text in allocator.new_messages():
            self.log.record_event(text)

    def _record_faults(self, allocator: Allocator) -> None:
        """Record the faults that the scheduler reports of nodes, once as long as they last."""
        for state in allocator.scheduler_states():
            faults = see([state], hang_limits(self.spec.timeouts))
            kinds = tuple(fault.kind for fault in faults)
            if self._recorded.get(state.node, ()) == kinds:
                continue
            self._recorded[state.node] = kinds
            for fault in faults:
                self.faults.add_node_fault(fault)
                if self.faults.recommended_actions.of(fault) is not RecommendedAction.RECORD:
                    self.log.record_event(f"{state.node}: {fault_line(fault.entry.title, fault.quote, fault.entry.action)}")

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def can_grow(self) -> bool:
        """Return whether more nodes than are there may be allocated."""
        return self._allocator is not None

    def usable(self) -> list[str] | None:
        """Return the allocated nodes that the job may continue to use; None where nodes are not allocated to jobs."""
        return None if self._allocator is None else self._allocator.usable(time.time())

    def has_enough_nodes(self) -> bool:
        """Return whether the job can start on the allocated nodes."""
        usable = self.usable()
        return usable is None or len(self.eligibility.usable(usable)) >= self.spec.max_nodes

    def may_retry_launch(self) -> bool:
        """Return whether a launch that found too few nodes is to wait for others: nodes on which no agent starts count as lost."""
        self._launches += 1
        if self._allocator is None or self._launches == MAX_LAUNCHES:
            return False
        self._note_lost(set(self._allocator.usable(time.time())) - set(self.agents.alive()), {})
        return True

    def _note_lost(self, nodes: Iterable[str], since: Mapping[str, float]) -> None:
        """Note that *nodes* are lost, now or *since* then: an allocation that was requeued may have started again meanwhile."""
        now = time.time()
        for node in nodes:
            self._lost[node] = max(self._lost.get(node, 0.0), since[node]) if node in since else self._lost.get(node, now)

    def explained(self, node: str, why: str) -> str:
        """Return *why* an agent is lost, and whether its node's allocation has ended."""
        return why if self._allocator is None or self._allocator.is_allocated(node) else f"{why}; its allocation has ended"

    @property
    def refused(self) -> HoldfastError | None:
        """Return why no more nodes can be allocated, if that is so."""
        return None if self._allocator is None else self._allocator.refused

    def describe(self) -> str:
        """Return a line about the allocated nodes, and why there are no more; empty where nodes are not allocated to jobs."""
        return "" if self._allocator is None else self._allocator.describe()

    def drain_of(self, node: str) -> Drain | None:
        """Return why and by when *node* has to be left."""
        drain = None if self._allocator is None else self._allocator.drain_reason(node, time.time())
        return None if drain is None else Drain(node=node, reason=drain.reason, since=drain.since, by=drain.by)

    @property
    def end(self) -> str:
        """Return that the allocation of this controller itself is nearly over; empty where it is not."""
        over = None if self._allocator is None else self._allocator.ends_at()
        timeouts = self.spec.timeouts
        if over is None or time.time() < over - (timeouts.final_checkpoint + timeouts.termination_grace).total_seconds() - STOP_SECONDS:
            return ""
        return (
            f"the allocation of the controller ends at {moment(over)}: a final checkpoint is saved, and the same `holdfast run` continues"
        )
