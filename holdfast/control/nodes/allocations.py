"""Nodes that a job is lent, as by Slurm: how many it needs, what is said of them, and which have to be left because their time ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from detectors.catalogue import RecommendedAction
from detectors.diagnosis import see
from holdfast.cluster.interface import AllocationRequest, Allocator, allocator_of
from holdfast.control.agents.pool import AgentPool
from holdfast.control.faults.job_faults import JobFaults
from holdfast.control.nodes.eligibility import NodeEligibility
from holdfast.control.state.generation import hang_limits
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.errors import HoldfastError
from holdfast.report.wording import moment, told
from holdfast.spec import TrainingJob
from policies.drains import Drain
from policies.states import State

STARTS: Final = 3
"""Launches that may find too few nodes with an agent before the job is given up."""
STOP: Final = 15.0
"""Seconds that it may take to stop all ranks, beside what is saved."""


@dataclass(slots=True, kw_only=True)
class AllocatedNodes:
    """Keeps as many nodes as the job wants, where they are allocated to jobs; else it does nothing."""

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
    _said: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Node to the kinds of the scheduler's faults that were recorded of it."""
    _lost: dict[str, float] = field(default_factory=dict)
    """Nodes that were lost, and when, until they are back."""
    _starts: int = 0

    def __post_init__(self) -> None:
        self._allocator = allocator_of(self.agents.source)

    def begin(self) -> None:
        """Learn what the job has been lent already; raise `OperatorError` when nothing ever can be."""
        if self._allocator is not None:
            self._allocator.begin(self.log.job.id, self.log.job.name, self.spec.inside("."))

    def close(self, *, end: bool) -> None:
        """Ask for no more; with *end*, give everything back."""
        if self._allocator is not None:
            self._allocator.close(end=end)
            self._tell()

    @property
    def is_lent(self) -> bool:
        """Tell whether more nodes may come than are there."""
        return self._allocator is not None

    def poll(self) -> None:
        """Say what the job needs now, and take in what there is to know; waits for nothing."""
        if self._allocator is None:
            return
        nodes, members, incident = self.spec.nodes, self.generations.members, self.incidents.current
        usable = self._allocator.usable(time.time())
        self._forget_old_notices(usable)
        names = {*usable, *members, *self.eligibility.isolated()}
        out = {node: why for node in names if (why := self.eligibility.isolation(node))}
        used, save = frozenset() if self.machine.state is State.WAITING else frozenset(members), self.spec.limits.last_save.total_seconds()
        if incident is not None:
            self._lose(incident.lost, incident.silent_since)
        alive = set(self.agents.alive())
        self._lost = {node: at for node, at in self._lost.items() if node not in alive}
        wanted, back = nodes.wanted + nodes.spare, self.eligibility.back_in_service()
        self._allocator.request(AllocationRequest(nodes=wanted, out=out, back=back, lost=dict(self._lost), used=used, save=save))
        self._tell()
        self._take_words()

    def _forget_old_notices(self, usable: Iterable[str]) -> None:
        """Forget what nodes were told that are lent anew: it was the allocation before that is over."""
        assert self._allocator is not None
        anew = self._lost.keys() & set(usable)
        for one in self.eligibility.preemption_notices():
            since = self._allocator.allocated_since(one.node)
            if since is not None and since > one.since:
                anew.add(one.node)
        for node in anew:
            self.forget_notice(node)

    def _tell(self) -> None:
        assert self._allocator is not None
        for text in self._allocator.new_messages():
            self.log.record_event(text)

    def _take_words(self) -> None:
        """Record what is said against nodes, once as long as it lasts."""
        assert self._allocator is not None
        for word in self._allocator.scheduler_states():
            faults = see([word], hang_limits(self.spec.limits))
            kinds = tuple(fault.kind for fault in faults)
            if self._said.get(word.node, ()) == kinds:
                continue
            self._said[word.node] = kinds
            for fault in faults:
                self.faults.add_node_fault(fault)
                if self.faults.recommended_actions.of(fault) is not RecommendedAction.RECORD:
                    self.log.record_event(f"{word.node}: {told(fault.entry.title, fault.quote, fault.entry.action)}")

    # -- asking -------------------------------------------------------------------------------------------------------

    def usable(self) -> list[str] | None:
        """Return the nodes that the job has been given and may go on using; nothing where nodes are not lent."""
        return None if self._allocator is None else self._allocator.usable(time.time())

    def has_enough_nodes(self) -> bool:
        """Tell whether the job can start on what is there."""
        return self._allocator is None or len(self.eligibility.usable(self._allocator.usable(time.time()))) >= self.spec.nodes.wanted

    def may_retry_launch(self) -> bool:
        """Tell whether a launch that found too few nodes is to wait for others: nodes on which no agent comes up count as lost."""
        self._starts += 1
        if self._allocator is None or self._starts == STARTS:
            return False
        self._lose(set(self._allocator.usable(time.time())) - set(self.agents.alive()), {})
        return True

    def _lose(self, nodes: Iterable[str], since: Mapping[str, float]) -> None:
        """Note that *nodes* are lost, now or *since* then: an allocation that was put back into the queue may have begun anew meanwhile."""
        now = time.time()
        for node in nodes:
            self._lost[node] = max(self._lost.get(node, 0.0), since[node]) if node in since else self._lost.get(node, now)

    def explained(self, node: str, why: str) -> str:
        """Return *why* an agent is gone, with what is known of its node's allocation."""
        return why if self._allocator is None or self._allocator.is_allocated(node) else f"{why}; its allocation is over"

    @property
    def refused(self) -> HoldfastError | None:
        """Return why nothing more comes, if that is so."""
        return None if self._allocator is None else self._allocator.refused

    def describe(self) -> str:
        """Say what is there, and why not more; empty where nodes are not lent."""
        return "" if self._allocator is None else self._allocator.describe()

    def drain_of(self, node: str) -> Drain | None:
        """Return why and by when *node* is to be left."""
        drain_reason = None if self._allocator is None else self._allocator.drain_reason(node, time.time())
        return None if drain_reason is None else Drain(node=node, reason=drain_reason.reason, since=drain_reason.since, by=drain_reason.by)

    @property
    def end(self) -> str:
        """Say so when the time of this very flow is nearly over; empty where it is not."""
        over = None if self._allocator is None else self._allocator.ends_at()
        limits = self.spec.limits
        if over is None or time.time() < over - limits.last_save.total_seconds() - limits.stop_grace.total_seconds() - STOP:
            return ""
        return f"the allocation that this runs in ends at {moment(over)}: what the job has is saved, and the same `holdfast run` goes on"
