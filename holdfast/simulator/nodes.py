"""The nodes of a simulated cluster: which are free, broken, under repair, or out of service by the rules of `policies.nodes.quarantine`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

import simpy

from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, Fault
from holdfast.policies.nodes.cordons import (
    TESTABLE,
    CordonChanged,
    CordonedFault,
    Node,
    OperatorRequest,
    Owner,
    QuarantineLimits,
    Rules,
)
from holdfast.policies.nodes.node_faults import NodeFault as CountedFault
from holdfast.policies.nodes.node_faults import isolating_fault
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import begin_burn_in, end_burn_in, quarantine, return_to_service, settle, suspect
from holdfast.simulator.scenario import ScenarioCluster

CONTROLLER: Final = Owner(name="the simulated controller")
REPAIRER: Final = Owner(name="the simulated repair crew", person=True)
Steps = Generator[simpy.Event, Any, None]


class NodePool:
    """Nodes by name, in four places: held by a job, free, broken, or isolated.

    With *isolates* a node that a fault counts against is quarantined, and returns when a burn-in finds it working, or when the person who
    repaired it returns it. Without, it returns when it is repaired.
    """

    def __init__(self, env: simpy.Environment, cluster: ScenarioCluster, *, isolates: bool, hot_spares: int) -> None:
        self._env, self._cluster, self._isolates, self._hot_spares = env, cluster, isolates, hot_spares
        width = len(str(cluster.nodes - 1))
        self.names = [f"node-{number:0{width}d}" for number in range(cluster.nodes)]
        self.free: dict[str, None] = dict.fromkeys(self.names)
        """Nodes that a job can take, in order."""
        self.broken: dict[str, None] = {}
        """Nodes that cannot run ranks until they are repaired."""
        self.hot: dict[str, float] = {}
        """Free nodes that hold warm processes, or will: node to the time from which they are ready."""
        self.held: set[str] = set()
        """Nodes of jobs."""
        self._records: dict[str, Node] = {}
        """What the quarantine knows of nodes that ever had a fault."""
        self._isolated: set[str] = set()
        self._in_burn_in: set[str] = set()
        self._crews = simpy.Resource(env, cluster.repair_crews) if cluster.repair_crews else None
        self.on_free: list[Callable[[], None]] = []
        """Called when a node became free."""
        self.on_repaired: list[Callable[[str], None]] = []
        """Called when a node that a job still holds was repaired."""
        self.idle_seconds = 0.0
        """Node-seconds that nodes were free, parts of nodes that a job holds included."""
        self._vacant: dict[str, float] = {}
        """Nodes that each job holds beyond those that its ranks fill."""
        self.most_out = 0
        """Most nodes that were broken or isolated at the same time."""
        self.most_isolated = 0
        """Most nodes that programs had isolated at the same time."""
        self._counted_until = env.now
        self.rules = Rules()

    @property
    def warm_up_seconds(self) -> float:
        """Return the seconds until a process is warm."""
        return self._cluster.warm_up.total_seconds()

    # -- taking and giving -------------------------------------------------------------------------------------------

    def take(self, nodes: Iterable[str]) -> None:
        """Hold *nodes*, which must be free."""
        self.count()
        for node in nodes:
            del self.free[node]
            self.hot.pop(node, None)
            self.held.add(node)
        self._warm_up()

    def release(self, node: str) -> None:
        """Let go of a node of a job: it is free if it works and is in service."""
        self.held.discard(node)
        self._offer(node)

    def hot_nodes(self) -> list[str]:
        """Return the free nodes whose warm processes are ready."""
        return [node for node, ready in self.hot.items() if ready <= self._env.now]

    def prefer_hot(self, count: int) -> list[str]:
        """Return *count* free nodes, fewer if there are not enough; those that are warm come first."""
        chosen = self.hot_nodes()[:count]
        known = set(chosen)
        for node in self.free:
            if len(chosen) >= count:
                break
            if node not in known:
                chosen.append(node)
        return chosen

    def _offer(self, node: str) -> None:
        if node in self.free or node in self.held or node in self.broken or node in self._isolated:
            return
        self.count()
        self.free[node] = None
        self._warm_up()
        for call in self.on_free:
            call()

    def _warm_up(self) -> None:
        """Let free nodes hold warm processes, as many as are wanted."""
        if len(self.hot) >= min(self._hot_spares, len(self.free)):
            return
        for node in self.free:
            if node not in self.hot:
                began = self._env.now > 0
                self.hot[node] = self._env.now + (self._cluster.warm_up.total_seconds() if began else 0.0)
                if len(self.hot) >= self._hot_spares:
                    return

    def count(self) -> None:
        """Add the time since the last call to what the free nodes spent idle."""
        self.idle_seconds += (len(self.free) + sum(self._vacant.values())) * (self._env.now - self._counted_until)
        self._counted_until = self._env.now

    def note_vacant(self, job: str, nodes: float) -> None:
        """Note that *job* holds so many *nodes* more than its ranks fill."""
        if self._vacant.get(job, 0.0) != nodes:
            self.count()
            self._vacant[job] = nodes

    def withdraw(self, node: str) -> None:
        """Take a node out of the free ones."""
        if node in self.free:
            self.count()
            del self.free[node]
            self.hot.pop(node, None)
            self._warm_up()

    # -- faults and repairs ------------------------------------------------------------------------------------------

    def fail(self, node: str, repair: float) -> None:
        """Break *node*; it is repaired after *repair* seconds, and after the time for which all crews are busy."""
        self.withdraw(node)
        self.broken[node] = None
        self._note_out()
        self._env.process(self._repair(node, repair))

    def _note_out(self) -> None:
        self.most_out = max(self.most_out, len(self.broken.keys() | self._isolated))

    def _repair(self, node: str, seconds: float) -> Steps:
        if self._crews is None:
            yield self._env.timeout(seconds)
        else:
            with self._crews.request() as turn:
                yield turn
                yield self._env.timeout(seconds)
        self.repaired(node)

    def leave(self, node: str, seconds: float) -> None:
        """Take *node*, which no job holds, out for *seconds* of planned maintenance; one that is broken is repaired in its own time."""
        if node not in self.broken:
            self.fail(node, seconds)

    def repaired(self, node: str) -> None:
        """Let a node work again."""
        del self.broken[node]
        if node in self.held:
            for call in self.on_repaired:
                call(node)
        if node in self._isolated and self._records[node].state is NodeState.DECOMMISSIONED:
            self._return(node)
        self._offer(node)

    # -- quarantine --------------------------------------------------------------------------------------------------

    def see(self, fault: Fault) -> None:
        """Isolate a free node for a *fault* that a health check found, if the fault recommends it."""
        counted = isolating_fault([fault], CATALOGUE_ACTIONS)
        if self._isolates and counted is not None:
            self.count_against(counted)

    def count_against(self, counted: CountedFault) -> None:
        """Quarantine the node of *counted*, or make it suspect, by the rules of the quarantine."""
        node = counted.node
        record = self._settled(node)
        limits = QuarantineLimits(size=len(self.names), isolated=len(self._isolated - {node}), rules=self.rules)
        request = self._request(counted.reason, counted.evidence, counted.faults, seen=counted.seen)
        answer = (quarantine if counted.severe else suspect)(record, request, limits)
        if isinstance(answer, CordonChanged):
            self._keep(answer.node)

    def _settled(self, node: str) -> Node:
        """Return what is known of *node*, without what has expired; a node that was tested is left to its burn-in."""
        record = self._records.get(node, Node(name=node))
        while node not in self._in_burn_in and (changed := settle(record, self._env.now, self.rules)) is not None:
            record = changed.node
        return record

    def _keep(self, record: Node) -> None:
        node = record.name
        self._records[node] = record
        if not record.is_isolated:
            self._isolated.discard(node)
            return
        self._isolated.add(node)
        self.most_isolated = max(self.most_isolated, len(self._isolated))
        self._note_out()
        self.withdraw(node)
        if node not in self._in_burn_in:
            self._in_burn_in.add(node)
            self._env.process(self._burn_ins(node))

    def _burn_ins(self, node: str) -> Steps:
        """Test an isolated node whenever it is due, until it returns or only a person can return it."""
        while (record := self._records[node]).is_isolated:
            if record.state is NodeState.DECOMMISSIONED:
                if node in self.broken:  # who repairs it returns it
                    break
                yield self._env.timeout(self._cluster.replacement.total_seconds())
                if self._records[node].state is NodeState.DECOMMISSIONED and node not in self.broken:
                    self._return(node)
                continue
            cordon = record.of_kind(*TESTABLE)[0]
            if cordon.until is not None and cordon.until > self._env.now:
                yield self._env.timeout(cordon.until - self._env.now)
                continue
            seconds = self._cluster.burn_in.total_seconds()
            begun = begin_burn_in(record, self._request("the burn-in is due"), cordon.number, seconds=2 * seconds + 1)
            assert isinstance(begun, CordonChanged)
            self._records[node] = begun.node
            yield self._env.timeout(seconds)
            passed = node not in self.broken
            request = self._request("all checks passed" if passed else "the node still has its fault")
            ended = end_burn_in(self._records[node], request, begun.burn_in, passed=passed, rules=self.rules)
            if isinstance(ended, CordonChanged):
                self._records[node] = ended.node
        self._in_burn_in.discard(node)
        if not self._records[node].is_isolated:
            self._isolated.discard(node)
            self._offer(node)

    def _return(self, node: str) -> None:
        """Return a repaired node to service, as the person who repaired it does."""
        request = OperatorRequest(owner=REPAIRER, reason="repaired", at=self._env.now)
        answer = return_to_service(self._records[node], request)
        if isinstance(answer, CordonChanged):
            self._records[node] = answer.node
            self._isolated.discard(node)

    def _request(
        self, reason: str, evidence: tuple[str, ...] = (), faults: tuple[CordonedFault, ...] = (), *, seen: float | None = None
    ) -> OperatorRequest:
        return OperatorRequest(owner=CONTROLLER, reason=reason, at=self._env.now, seen=seen, evidence=evidence, faults=faults)
