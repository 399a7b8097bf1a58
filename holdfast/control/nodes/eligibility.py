"""Which nodes the job may use: cordons in the history, faults that this job has found, notices, drains and maintenance windows.

Faults count here at once. A thread writes them to the history, as neither a recovery nor a launch may wait for a database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.control.nodes.approvals import SHARE, Approvals
from holdfast.detectors.catalogue import Fault, RecommendedActions
from holdfast.detectors.codec import unpacked
from holdfast.history import History
from holdfast.history import cordons as record
from holdfast.history.approvals import KEEP
from holdfast.history.cordons import CordonTable
from holdfast.history.errors import RetryingHistory
from holdfast.history.models import ApprovalRequest
from holdfast.log import note
from holdfast.policies.nodes.cordons import (
    CordonChanged,
    CordonedFault,
    CordonKind,
    NeedsPerson,
    Node,
    OperatorRequest,
    OutOfDate,
    Owner,
    describe,
)
from holdfast.policies.nodes.drains import Drain
from holdfast.policies.nodes.maintenance import PlannedOutage, planned_outage, window_before
from holdfast.policies.nodes.node_faults import NodeFault, isolating_fault
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import quarantine, suspect
from holdfast.report.text.wording import moment
from holdfast.spec import Cluster

log = logging.getLogger("holdfast.control")

INTERVAL: Final = 1.0
"""Seconds between two reads of the cordons in the history: a person's cordon counts from then on."""
CLOSE_SECONDS: Final = 5.0
"""How long the end of a job may wait until the faults that it found are in the history."""


@dataclass(slots=True)
class NodeEligibility:
    """What keeps nodes of one cluster from being used by this job."""

    cluster: Cluster
    history: History
    names: Callable[[], Sequence[str]]
    owner: Owner
    record_event: Callable[[str], None]
    approvals: Approvals
    ends: float | None = None
    """When the job's walltime is over (seconds since 1970); None without one."""
    allocation_drain: Callable[[str], Drain | None] = lambda _: None
    """Returns why an allocated node has to be left."""
    _known: dict[str, Node] = field(default_factory=dict)
    _severe: dict[str, tuple[NodeFault, float]] = field(default_factory=dict)
    """Node to the fault that isolated it in this job, and when: it stays out until it returns to service, even if it is not quarantined."""
    _suspect: dict[str, NodeFault] = field(default_factory=dict)
    """Node to a fault that makes it suspect and is not in the history yet."""
    _notices: dict[str, Drain] = field(default_factory=dict)
    """Node to its preemption notice."""
    _queue: deque[NodeFault] = field(default_factory=deque)
    """Faults that are not in the history yet."""
    _recorded: list[NodeFault] = field(default_factory=list)
    """Faults that are in the history, but were not when the cordons were last read."""
    _need_person: dict[str, NodeFault] = field(default_factory=dict)
    """Node to a fault that would isolate it with a person's approval."""
    _approved: dict[str, str] = field(default_factory=dict)
    """Node to the person who approved that this job isolates it."""
    _kept: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict)
    """Node to when a person decided that it stays, and despite which fault kinds: these, and what was seen by then, no longer count."""
    _reported: dict[str, str] = field(default_factory=dict)
    _wake: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _retry: RetryingHistory = field(default_factory=lambda: RetryingHistory("eligibility"))

    # -- queries ------------------------------------------------------------------------------------------------------

    def why_ineligible(self, node: str) -> str:
        """Return why no job may use *node*, and what brings it back; empty when jobs may."""
        if node in self._notices:
            return self._notices[node].reason
        if (drain := self.allocation_drain(node)) is not None:
            return f"left out: {drain.reason}"
        known = self._known.get(node)
        if (outage := self._outage(node)) is not None and (known is None or not known.is_isolated):
            return f"left out for {_window(outage)}; it comes back by itself"
        return self.isolation(node)

    def usable(self, nodes: Iterable[str]) -> list[str]:
        """Return those of *nodes* that jobs may use."""
        return [node for node in nodes if not self.why_ineligible(node)]

    def left_out(self, nodes: Iterable[str] | None = None) -> list[str]:
        """Return a line for each of *nodes*, or of all nodes of the cluster, that no job may use, with the reason."""
        return [f"{node} is {why}" for node in (self.names() if nodes is None else nodes) if (why := self.why_ineligible(node))]

    def news(self, nodes: Iterable[str]) -> list[str]:
        """Return a line for each of *nodes* that has become ineligible since the last call."""
        found = []
        for node in nodes:
            why = self.why_ineligible(node)
            if why and not self._reported.get(node):
                found.append(f"{node} is left out: {why}")
            self._reported[node] = why
        return found

    def isolation(self, node: str) -> str:
        """Return the fault or cordon that keeps *node* out of service, and what brings it back; empty when nothing does."""
        known, severe = self._known.get(node), self._severe.get(node)
        if known is not None and known.is_isolated:
            return describe(known)
        if severe is None or (known is not None and known.state is NodeState.HEALTHY and known.since > severe[1]):
            return ""
        return f"taken out by {self.owner.name}: {severe[0].reason}; `holdfast node return {node} --reason ...` takes it back"

    def isolated(self) -> list[str]:
        """Return the nodes that are out of service for a fault or cordon."""
        return [node for node in {*self._known, *self._severe} if self.isolation(node)]

    def back_in_service(self) -> dict[str, float]:
        """Return the nodes that have returned to service, and when, by the history."""
        return {name: known.back for name, known in self._known.items() if known.back and not self.isolation(name)}

    def drain_of(self, node: str) -> Drain | None:
        """Return why and by when the job has to leave *node*: of several drains the most urgent; None where it may stay."""
        found = [one for one in (self._notices.get(node), self.allocation_drain(node)) if one is not None]
        known = self._known.get(node)
        if known is not None and (cordon := known.drain) is not None:
            until = "" if cordon.leave_by is None else f" until {moment(cordon.leave_by)}"
            reason = f"drained by {cordon.owner.name}{until}: {cordon.reason}"
            found.append(Drain(node=node, reason=reason, since=cordon.at, by=cordon.leave_by))
        if (outage := self._outage(node)) is not None:
            found.append(Drain(node=node, reason=_window(outage), since=min(time.time(), outage.start), by=outage.start))
        return min(found, key=lambda one: float("inf") if one.by is None else one.by, default=None)

    def _outage(self, node: str) -> PlannedOutage | None:
        return planned_outage(self.cluster.windows, node, time.time())

    def why_suspect(self, node: str) -> str:
        """Return why *node* is used only where there is no better one; empty otherwise."""
        fault, known = self._suspect.get(node), self._known.get(node)
        if fault is not None:
            return f"suspect: {fault.reason}"
        if known is None or known.state is not NodeState.SUSPECT:
            return ""
        return f"suspect: {known.of_kind(CordonKind.SUSPICION)[-1].reason}"

    def cut_short(self, node: str) -> str:
        """Return the maintenance window that begins on *node* before the job's walltime is over; empty where none does."""
        now = time.time()
        if self.ends is None or (outage := window_before(self.cluster.windows, node, now, self.ends)) is None:
            return ""
        return f"{_window(outage)} begins before the job's walltime ends at {moment(self.ends)}"

    def is_excused(self, fault: Fault, recommended_actions: RecommendedActions) -> bool:
        """Return whether *fault* does not count because a person keeps the node despite it; a fault that stopped a rank always counts."""
        return fault.rank is None and self._is_kept(fault) and isolating_fault([fault], recommended_actions) is not None

    def kept(self, faults: Iterable[Fault], recommended_actions: RecommendedActions) -> frozenset[str]:
        """Return the nodes that a person keeps in service despite all of *faults* that would isolate them."""
        severe = [fault for fault in faults if isolating_fault([fault], recommended_actions) is not None]
        isolated = {str(fault.node) for fault in severe if not self._is_kept(fault)}
        return frozenset(str(fault.node) for fault in severe if self._is_kept(fault)) - isolated

    def _is_kept(self, fault: Fault) -> bool:
        at, kinds = self._kept.get(fault.node or "", (0.0, frozenset()))
        return fault.at <= at or fault.kind in kinds

    # -- notices, faults and decisions --------------------------------------------------------------------------------

    def notice(self, node: str, *, at: float, by: float, why: str) -> bool:
        """Note the preemption notice of *node*; return whether it is new."""
        is_new = node not in self._notices
        self._notices[node] = Drain(node=node, reason=f"{why}: it will be gone at {moment(by)}", since=at, by=by)
        return is_new

    def take_back(self, node: str) -> None:
        """Forget the preemption notice of *node*."""
        self._notices.pop(node, None)

    def has_preemption_notice(self, node: str) -> bool:
        """Return whether *node* has a preemption notice."""
        return node in self._notices

    def preemption_notices(self) -> list[Drain]:
        """Return the preemption notices in force."""
        return list(self._notices.values())

    def approve(self, nodes: Iterable[str], by: str) -> None:
        """Note that a person approved the isolation of *nodes*."""
        for node in nodes:
            self._approved[node] = by
            self._kept.pop(node, None)

    def keep(self, nodes: Mapping[str, Any], at: float) -> None:
        """Note that a person decided at *at* that *nodes* stay in service, despite the faults of each (`ApprovalRequest.nodes`)."""
        for node, facts in nodes.items():
            self._kept[node] = at, frozenset(str(text).partition(":")[0] for text in facts["evidence"])
            self._severe.pop(node, None)

    def record_faults(self, found: Iterable[NodeFault]) -> None:
        """Count the faults against their nodes, here from now on and soon in the history."""
        for one in found:
            at, kinds = self._kept.get(one.node, (0.0, frozenset()))
            if one.severe and one.faults and all(one.seen <= at or fault.kind in kinds for fault in one.faults):
                continue  # a person keeps the node despite these
            if one.severe:
                self._severe[one.node] = one, time.time()
            else:
                self._suspect[one.node] = one
            self._queue.append(one)
            note(log, "node.fault-recorded", node=one.node, severe=one.severe, reason=one.reason)
        self._wake.set()

    # -- the history --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the cordons, and follow them from now on."""
        self._retry(self._read)
        self._thread = threading.Thread(target=self._follow, name="eligibility", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the queued faults, if the history can be reached in time."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        for one in list(self._queue):  # the thread may still be at it
            note(log, "node.fault-record-lost", level=logging.ERROR, node=one.node, severe=one.severe, reason=one.reason)

    def _follow(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(INTERVAL)
            self._wake.clear()
            self._retry(self._synchronize)
        self._retry(self._write)  # what was found between the last check and the end

    def _synchronize(self) -> None:
        """Write and read. A history that can only be read is unreachable too, for as long as that is so, and is read all the same."""
        try:
            self._write()
        finally:
            self._read()

    def _table(self) -> CordonTable:
        return CordonTable(cluster=self.cluster.name, names=self.names(), rules=self.cluster.quarantine.rules)

    def _read(self) -> None:
        self._known = record.nodes(self.history, self._table(), now=time.time())
        for one in self._recorded:
            if self._suspect.get(one.node) is one:
                del self._suspect[one.node]
        self._recorded.clear()

    def _write(self) -> None:
        for answer in self.approvals.answers(SHARE):
            self._apply(answer)
        while self._queue:
            self._write_fault(self._queue[0])
            self._recorded.append(self._queue.popleft())
            self._read()
        if self._need_person and not self.approvals.is_open(SHARE):
            self._request_approval()

    def _request_approval(self) -> None:
        """Request approval for all nodes that programs may not isolate by themselves."""
        against, self._need_person = self._need_person, {}
        if self._closed.is_set() or not self.approvals.seconds:
            for node in against:
                self.record_event(f"`holdfast node cordon {node} --reason ...` takes {node} out of service")
            return
        why = "; ".join(f"{node}: {one.reason}" for node, one in against.items())
        reason = f"may {', '.join(against)} be isolated, although programs may isolate no more of the cluster? {why}"
        self.approvals.ask(SHARE, against.values(), reason, otherwise=KEEP)

    def _apply(self, request: ApprovalRequest) -> None:
        """Apply a person's answer about nodes that programs may not isolate by themselves; without one nothing changes."""
        for node, facts in request.nodes.items():
            if node in request.picked:
                self.approve([node], request.by)
                evidence = tuple(map(str, facts["evidence"]))
                faults = tuple(unpacked(CordonedFault, fault) for fault in facts.get("faults", ()))
                reason, seen = str(facts["reason"]), float(facts["seen"])
                self.record_faults([NodeFault(node=node, severe=True, reason=reason, evidence=evidence, faults=faults, seen=seen)])
            elif request.by:
                self.keep({node: facts}, request.answered_at or time.time())

    def _write_fault(self, one: NodeFault) -> None:
        """Write one fault; where a program may isolate no more nodes, the node stays suspect and a person's approval is requested."""
        now, table = time.time(), self._table()
        approved = self._approved.get(one.node, "")
        reason = f"{one.reason} (approved by {approved})" if approved and one.severe else one.reason
        request = OperatorRequest(
            owner=self.owner, reason=reason, at=now, seen=one.seen, evidence=one.evidence, faults=one.faults, approved=approved
        )
        rule = quarantine if one.severe else suspect
        answer = record.apply(self.history, table, one.node, lambda node, limits: rule(node, request, limits), now=now)
        if isinstance(answer, NeedsPerson):
            self._need_person[one.node] = one
            self.record_event(f"{one.node} is not quarantined for {one.reason}: {answer.why}. It is suspect meanwhile")
            answer = record.apply(self.history, table, one.node, lambda node, limits: suspect(node, request, limits), now=now)
        if isinstance(answer, CordonChanged):
            for move in answer.transitions:
                self.record_event(f"{one.node}: {move.before} -> {move.after}: {move.reason}")
                self.approvals.publish("node-moved", {"node": one.node, "move": move, "cordon": answer.cordon})
        elif isinstance(answer, OutOfDate):
            note(log, "node.fault-record-stale", node=one.node, why=answer.why)


def _window(outage: PlannedOutage) -> str:
    return f"{outage.reason} from {moment(outage.start)} to {moment(outage.ends)}"
