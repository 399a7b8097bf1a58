"""Which node keeps the replicas of whose in-memory snapshots: assigned as nodes come and go, and what agents report about it."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

from holdfast.control.agents.events import MemstoreFull, MemstoreUnavailable, ReplicaLost, ReplicaRestored
from holdfast.control.agents.pool import AgentPool
from holdfast.detectors.evidence import MemstoreFailure
from holdfast.errors import WorldError
from holdfast.policies.nodes.replicas import assign_replica_nodes
from holdfast.protocol import Message
from holdfast.spec.job import MemoryPlan

N = TypeVar("N", str, str | None)

KINDS: Final = {"memstore.unavailable": "memory-none", "memstore.full": "memory-limit", "replica.lost": "replica-lost"}
"""An event's fault kind in the catalogue."""

News: TypeAlias = tuple[MemstoreFailure | None, str]
"""A failure for the record, if there is one, and the message for people."""


class Replicas:
    """The replicas of one job's snapshots."""

    def __init__(self, agents: AgentPool, plan: MemoryPlan) -> None:
        self.known: set[tuple[str, str | None, float]] = set()
        """Kind, node and time of the faults on record: a controller that reattaches receives their events again."""
        self._agents, self._plan = agents, plan
        self._replica_nodes: Mapping[str, Sequence[str]] = {}
        self._members: frozenset[str] = frozenset()
        self._sent: dict[str, tuple[object, list[list[Any]]]] = {}
        self._pending: dict[str, Future[Message]] = {}
        self._open: set[tuple[str, str]] = set()
        self._start = time.time()

    def environments(self, members: Container[str], nodes: Iterable[N]) -> dict[N, dict[str, str]]:
        """Return for each of *nodes* the variables with which its workers fetch snapshots from other nodes; see `servers`."""
        found = self.servers(members, nodes)
        return {node: {"HOLDFAST_MEMORY_SERVERS": json.dumps(servers)} if servers else {} for node, servers in found.items()}

    def servers(self, members: Container[str], nodes: Iterable[N]) -> dict[N, dict[str, list[Any]]]:
        """Return for each of *nodes* host and port of memory stores, by node: its own, and those of nodes that are no *members*.

        Members exchange theirs in the rendezvous. All of thousands to each node would be hundreds of megabytes in the middle of a
        recovery, and more than fits into an environment.
        """
        lost = self._agents.disconnected()
        live = {one: list(address) for one, address in sorted(self._agents.memory.items()) if one not in lost}
        others = {one: address for one, address in live.items() if one not in members}
        return {node: dict(sorted({**others, node: live[node]}.items())) if node in live else others for node in nodes}

    # -- replica nodes ------------------------------------------------------------------------------------------------

    def reattach(self, answers: Mapping[str, Message]) -> None:
        """Learn from the agents' answers which replica nodes the last controller had assigned."""
        nodes = {address: node for node, address in self._agents.memory.items()}
        found = {node: [tuple(address) for address in (one.get("memory") or {}).get("to") or ()] for node, one in answers.items()}
        self._replica_nodes = {node: [nodes[one] for one in addresses if one in nodes] for node, addresses in found.items()}

    def maintain(self, members: Sequence[str]) -> list[News]:
        """Send the snapshots of each of *members* to their replica nodes, without waiting; return what there is to report."""
        if not self._plan.replicas or not self._agents.disconnected().keys().isdisjoint(members):  # an incident will change the members
            return []
        self._settle()
        alive = [node for node in self._agents.connected() if node in self._agents.memory]  # an unreachable node keeps its replicas
        nodes, before, members_before = [node for node in members if node in alive], self._replica_nodes, self._members
        candidates, domain = self._with_spares(nodes, alive), self._agents.source.domain
        self._replica_nodes = assign_replica_nodes(candidates, domain, self._plan.replicas, before=before)
        self._members = frozenset(members)
        for node in nodes:
            to = [list(self._agents.memory[one]) for one in self._replica_nodes[node]]
            if self._sent.get(node) != (self._agents.clients.get(node), to):
                self._sent[node] = self._agents.clients.get(node), to
                self._pending[node] = self._agents.send_command_async(node, "replicate", to=to, bandwidth=self._plan.bandwidth)
        return [news for node in nodes for news in self._changes(node, before.get(node, ()), alive, members_before)]

    def _changes(self, node: str, before: Sequence[str], alive: Sequence[str], members_before: frozenset[str]) -> Iterator[News]:
        """Yield what to report when a node's replica nodes are others than *before*: an incident reports the loss of a member."""
        after, lost = self._replica_nodes[node], (node, "replica-lost")
        if tuple(after) == tuple(before):
            return
        gone, now = [one for one in before if one not in alive], f"go to {' and '.join(after)} from now on"
        for one in [one for one in gone if not after or one not in members_before]:
            rest = f"they {now}" if after else "no other node can keep them"
            news = self._news(node, lost[1], time.time(), f"{one}, which kept its replicas, is lost; {rest}")
            yield from [] if news is None else [news]
        if after:
            if lost in self._open and not gone:
                yield None, f"the snapshots of {node} {now}"
            self._open.discard(lost)

    def _with_spares(self, nodes: list[str], alive: list[str]) -> list[str]:
        """Return the candidates: members; spare nodes only if some member would have no replica node in another failure domain."""
        domain, spares = self._agents.source.domain, [node for node in alive if node not in nodes]
        if len({domain(node) for node in nodes}) > 1:
            return nodes
        elsewhere = [node for node in spares if domain(node) not in map(domain, nodes)]
        return [*nodes, *(elsewhere or (spares if len(nodes) == 1 else []))]

    def _settle(self) -> None:
        """Forget the commands that were rejected or not answered: they are sent again."""
        for node, future in list(self._pending.items()):
            if future.done():
                del self._pending[node]
                if future.cancelled() or isinstance(future.exception(), WorldError):
                    self._sent.pop(node, None)

    # -- events -------------------------------------------------------------------------------------------------------

    def note_restored(self, node: str, event: ReplicaRestored) -> str:
        """Note that snapshots of *node* have replicas again; return the message for people."""
        is_news = (node, "replica-lost") in self._open and event.at > self._start
        self._open.discard((node, "replica-lost"))
        return f"the snapshots of {node} are kept on {self._name_of(event.peer)} again" if is_news else ""

    def note_problem(self, node: str, event: MemstoreUnavailable | MemstoreFull | ReplicaLost) -> News:
        """Return the failure in an agent's *event*, if it is new, and the message for people."""
        why = event.why
        if isinstance(event, ReplicaLost):
            peer = self._name_of(event.peer)
            if peer not in self._replica_nodes.get(node, (peer,)):
                return None, ""  # its snapshots go elsewhere since
            why = f"{peer} cannot be reached: {event.why}"
        return self._news(node, KINDS[event.event], event.at, why) or (None, "")

    def _news(self, node: str, kind: str, at: float, why: str) -> News | None:
        """Return a failure and the message for people, unless it is on record or was reported already."""
        first = not any(seen == kind for _, seen in self._open)
        is_known = (kind, node, at) in self.known or (node, kind) in self._open
        self._open.add((node, kind))
        if is_known:
            return None
        return MemstoreFailure(node=node, at=at, kind=kind, why=why), f"{node}: {why}" if first or kind == "replica-lost" else ""

    def _name_of(self, peer: str) -> str:
        return next((node for node, (host, port) in self._agents.memory.items() if f"{host}:{port}" == peer), peer)

    def remember(self, faults: Iterable[tuple[str, str | None, float]]) -> None:
        """Note the faults on record: kind, node and time of each."""
        self.known.update(one for one in faults if one[0] in KINDS.values())
