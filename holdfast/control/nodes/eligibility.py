"""Which nodes no job may be given, as the flow of one job sees it: what the history holds against them, and what this job has just found.

What is found counts here at once. It is put on record by a thread, as neither a recovery nor a launch may wait for a database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from detectors.catalogue import Fault, RecommendedActions
from detectors.codec import unpacked
from holdfast.control.nodes.approvals import SHARE, Approvals
from holdfast.history import History
from holdfast.history import cordons as record
from holdfast.history.approvals import KEEP
from holdfast.history.cordons import CordonTable
from holdfast.history.models import ApprovalRequest
from holdfast.history.retry import RetryingHistory
from holdfast.log import note
from holdfast.report.wording import moment
from holdfast.spec import Cluster
from policies.cordons import CordonChanged, CordonedFault, CordonKind, NeedsPerson, Node, OperatorRequest, OutOfDate, Owner, describe
from policies.drains import Drain
from policies.maintenance import PlannedOutage, planned_outage, window_before
from policies.node_faults import NodeFault, isolating_fault
from policies.node_states import NodeState
from policies.quarantine import doubt, quarantine

log = logging.getLogger("holdfast.control")

EVERY: Final = 1.0
"""Seconds between two looks at what the history holds against nodes: a person's hold counts from then on."""
LAST: Final = 5.0
"""Seconds that the end of a job may wait until what was found is on record."""


@dataclass(slots=True)
class NodeEligibility:
    """What is held against the nodes of one cluster."""

    cluster: Cluster
    history: History
    names: Callable[[], Sequence[str]]
    owner: Owner
    record_event: Callable[[str], None]
    approvals: Approvals
    ends: float | None = None
    """When the job's walltime is over (seconds since 1970); empty: it has none, and any window may meet it."""
    allocation_drain: Callable[[str], Drain | None] = lambda _: None
    """Why a node that was lent is to be left."""
    _known: dict[str, Node] = field(default_factory=dict)
    _grave: dict[str, tuple[NodeFault, float]] = field(default_factory=dict)
    """Node to what took it out of this job, and when: it stays out until it has come back, also where it could not be quarantined."""
    _light: dict[str, NodeFault] = field(default_factory=dict)
    """Node to a doubt that is not yet on record."""
    _notices: dict[str, Drain] = field(default_factory=dict)
    """Node to what it was told of its end."""
    _queue: deque[NodeFault] = field(default_factory=deque)
    _unsure: dict[str, NodeFault] = field(default_factory=dict)
    """Node to what would take it out of service, if a person said so."""
    _approved: dict[str, str] = field(default_factory=dict)
    """Node to the person who said that this job may isolate it."""
    _kept: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict)
    """Node to when a person said that it stays, and in spite of which kinds: these, and what was seen by then, count no more."""
    _told: dict[str, str] = field(default_factory=dict)
    _wake: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _try: RetryingHistory = field(default_factory=lambda: RetryingHistory("eligibility"))

    # -- asking -------------------------------------------------------------------------------------------------------

    def why_ineligible(self, node: str) -> str:
        """Return why no job may be given *node*, and what brings it back; empty when jobs may."""
        if node in self._notices:
            return self._notices[node].reason
        if (allocation_drain := self.allocation_drain(node)) is not None:
            return f"left out: {allocation_drain.reason}"
        if (closed := self._closing(node)) is not None and not self._is_isolated(node):
            return f"left out for {_of_window(closed)}; it comes back by itself"
        return self.isolation(node)

    def _is_isolated(self, node: str) -> bool:
        known = self._known.get(node)
        return known is not None and known.is_isolated

    def isolated(self) -> list[str]:
        """Return the nodes that are out of service for what is held against them."""
        return [node for node in {*self._known, *self._grave} if self.isolation(node)]

    def back_in_service(self) -> dict[str, float]:
        """Return the nodes that were out of service once and are no more, and since when, as the history has it."""
        return {name: known.back for name, known in self._known.items() if known.back and not self.isolation(name)}

    def isolation(self, node: str) -> str:
        """Return what is held against *node* that keeps it out of service, and what brings it back; empty when nothing is."""
        known, severe = self._known.get(node), self._grave.get(node)
        if known is not None and known.is_isolated:
            return describe(known)
        if severe is None or (known is not None and known.state is NodeState.HEALTHY and known.since > severe[1]):
            return ""
        return f"taken out by {self.owner.name}: {severe[0].reason}; `holdfast nodes readmit {node} --reason ...` takes it back"

    def drain_of(self, node: str) -> Drain | None:
        """Return why and by when *node* is to be left; of several reasons the one that leaves least time; nothing where jobs may stay."""
        found = [one for one in (self._notices.get(node), self.allocation_drain(node)) if one is not None]
        known = self._known.get(node)
        if known is not None and (hold := known.drain) is not None:
            until = "" if hold.leave_by is None else f" until {moment(hold.leave_by)}"
            reason = f"drained by {hold.owner.name}{until}: {hold.reason}"
            found.append(Drain(node=node, reason=reason, since=hold.at, by=hold.leave_by))
        if (closed := self._closing(node)) is not None:
            since = min(time.time(), closed.begins)
            found.append(Drain(node=node, reason=_of_window(closed), since=since, by=closed.begins))
        return min(found, key=lambda one: float("inf") if one.by is None else one.by, default=None)

    def _closing(self, node: str) -> PlannedOutage | None:
        return planned_outage(self.cluster.windows, node, time.time())

    def notice(self, node: str, *, at: float, by: float, why: str) -> bool:
        """Take in that *node* was told that it will be gone; tell whether that is new."""
        is_new = node not in self._notices
        self._notices[node] = Drain(node=node, reason=f"{why}: it will be gone at {moment(by)}", since=at, by=by)
        return is_new

    def take_back(self, node: str) -> None:
        """Take in that *node* stays after all."""
        self._notices.pop(node, None)

    def has_preemption_notice(self, node: str) -> bool:
        """Tell whether *node* itself was told that it will be gone."""
        return node in self._notices

    def preemption_notices(self) -> list[Drain]:
        """Return the notices that count."""
        return list(self._notices.values())

    def why_suspect(self, node: str) -> str:
        """Return why *node* is used only where there is no better one; empty where nothing speaks against it."""
        light, known = self._light.get(node), self._known.get(node)
        if light is not None:
            return f"suspect: {light.reason}"
        if known is None or known.state is not NodeState.SUSPECT:
            return ""
        return f"suspect: {known.of_kind(CordonKind.DOUBT)[-1].reason}"

    def cut_short(self, node: str) -> str:
        """Return which window would take *node* away before the job's walltime is over; empty where none does."""
        now = time.time()
        if self.ends is None or (closed := window_before(self.cluster.windows, node, now, self.ends)) is None:
            return ""
        return f"{_of_window(closed)} begins before the job's walltime ends at {moment(self.ends)}"

    def usable(self, nodes: Iterable[str]) -> list[str]:
        """Return those of *nodes* that jobs may be given."""
        return [node for node in nodes if not self.why_ineligible(node)]

    def left_out(self, nodes: Iterable[str] | None = None) -> list[str]:
        """Say of each node that no job may be given why: of those named, or of all of the cluster."""
        return [f"{node} is {why}" for node in (self.names() if nodes is None else nodes) if (why := self.why_ineligible(node))]

    def news(self, nodes: Iterable[str]) -> list[str]:
        """Say what has come to bar *nodes* since this was last asked of them."""
        found = []
        for node in nodes:
            why = self.why_ineligible(node)
            if why and not self._told.get(node):
                found.append(f"{node} is left out: {why}")
            self._told[node] = why
        return found

    def is_excused(self, fault: Fault, recommended_actions: RecommendedActions) -> bool:
        """Tell whether *fault* counts for nothing, as a person keeps the node in spite of it; one that stopped a rank needs an answer."""
        return fault.rank is None and self._is_kept(fault) and isolating_fault([fault], recommended_actions) is not None

    def kept(self, faults: Iterable[Fault], recommended_actions: RecommendedActions) -> frozenset[str]:
        """Return the nodes that a person keeps in service in spite of all of *faults* that would take them out."""
        severe = [fault for fault in faults if isolating_fault([fault], recommended_actions) is not None]
        return frozenset(str(fault.node) for fault in severe if self._is_kept(fault)) - {
            str(fault.node) for fault in severe if not self._is_kept(fault)
        }

    def _is_kept(self, fault: Fault) -> bool:
        at, kinds = self._kept.get(fault.node or "", (0.0, frozenset()))
        return fault.at <= at or fault.kind in kinds

    # -- telling ------------------------------------------------------------------------------------------------------

    def approve(self, nodes: Iterable[str], by: str) -> None:
        """Learn that a person said that *nodes* may be isolated."""
        for node in nodes:
            self._approved[node] = by
            self._kept.pop(node, None)

    def keep(self, nodes: Mapping[str, Any], at: float) -> None:
        """Learn that a person said at *at* that *nodes* stay in service, in spite of what speaks against each (`ApprovalRequest.nodes`)."""
        for node, told in nodes.items():
            kinds = frozenset(str(words).partition(":")[0] for words in told["evidence"])
            self._kept[node] = at, kinds
            self._grave.pop(node, None)

    def record_faults(self, found: Iterable[NodeFault]) -> None:
        """Hold against nodes what they have done, from now on here, and soon in the history."""
        for one in found:
            at, kinds = self._kept.get(one.node, (0.0, frozenset()))
            if one.severe and one.faults and all(one.seen <= at or fault.kind in kinds for fault in one.faults):
                continue  # a person keeps the node in spite of these
            if one.severe:
                self._grave[one.node] = one, time.time()
            else:
                self._light[one.node] = one
            self._queue.append(one)
            note(log, "node.accused", node=one.node, severe=one.severe, reason=one.reason)
        self._wake.set()

    # -- the history --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read what is held against nodes, and follow it from now on."""
        self._try(self._read)
        self._thread = threading.Thread(target=self._follow, name="eligibility", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put on record what is not yet, where the history can be reached in time."""
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST)
        for one in self._queue:
            note(log, "node.accusation-lost", level=logging.ERROR, node=one.node, severe=one.severe, reason=one.reason)

    def _follow(self) -> None:
        while not self._over.is_set():
            self._wake.wait(EVERY)
            self._wake.clear()
            self._try(self._write)
            self._try(self._read)
        self._try(self._write)  # what was found between the last look and the end

    def _place(self) -> CordonTable:
        return CordonTable(cluster=self.cluster.name, names=self.names(), rules=self.cluster.quarantine.rules)

    def _read(self) -> None:
        self._known = record.nodes(self.history, self._place(), now=time.time())

    def _write(self) -> None:
        for answer in self.approvals.answers(SHARE):
            self._answered(answer)
        while self._queue:
            self._put(self._queue[0])
            done = self._queue.popleft()
            self._read()
            if self._light.get(done.node) is done:
                del self._light[done.node]
        if self._unsure and not self.approvals.is_open(SHARE):
            self._ask()

    def _ask(self) -> None:
        """Ask a person about all nodes that programs may not isolate by themselves."""
        against, self._unsure = self._unsure, {}
        if self._over.is_set() or not self.approvals.seconds:
            for node in against:
                self.record_event(f"`holdfast nodes hold {node} --reason ...` takes {node} out by your word")
            return
        why = "; ".join(f"{node}: {one.reason}" for node, one in against.items())
        reason = f"may {', '.join(against)} be isolated, though programs may take out no more of the cluster? {why}"
        self.approvals.ask(SHARE, against.values(), reason, otherwise=KEEP)

    def _answered(self, question: ApprovalRequest) -> None:
        """Do as a person said about nodes that programs may not isolate by themselves; when nobody did, all stays as it is."""
        for node, told in question.nodes.items():
            if node in question.picked:
                self.approve([node], question.by)
                evidence = tuple(map(str, told["evidence"]))
                faults = tuple(unpacked(CordonedFault, fault) for fault in told.get("faults", ()))
                reason, seen = str(told["reason"]), float(told["seen"])
                self.record_faults([NodeFault(node=node, severe=True, reason=reason, evidence=evidence, faults=faults, seen=seen)])
            elif question.by:
                self.keep({node: told}, question.answered_at or time.time())

    def _put(self, one: NodeFault) -> None:
        """Put one offence on record; where a program may isolate no more, the node stays suspect and a person is asked."""
        now, place = time.time(), self._place()
        approved = self._approved.get(one.node, "")
        reason = f"{one.reason} (approved by {approved})" if approved and one.severe else one.reason
        word = OperatorRequest(
            owner=self.owner, reason=reason, at=now, seen=one.seen, evidence=one.evidence, faults=one.faults, approved=approved
        )
        verb = quarantine if one.severe else doubt
        answer = record.say(self.history, place, one.node, lambda node, ward: verb(node, word, ward), now=now)
        if isinstance(answer, NeedsPerson):
            self._unsure[one.node] = one
            self.record_event(f"{one.node} is not quarantined for {one.reason}: {answer.why}. It is suspect meanwhile")
            answer = record.say(self.history, place, one.node, lambda node, ward: doubt(node, word, ward), now=now)
        if isinstance(answer, CordonChanged):
            for move in answer.moves:
                self.record_event(f"{one.node}: {move.before} -> {move.after}: {move.reason}")
                self.approvals.tell("node-moved", {"node": one.node, "move": move, "hold": answer.hold})
        elif isinstance(answer, OutOfDate):
            note(log, "node.accusation-stale", node=one.node, why=answer.why)


def _of_window(closed: PlannedOutage) -> str:
    return f"{closed.reason} from {moment(closed.begins)} to {moment(closed.ends)}"
