"""Who keeps whose snapshots: homes arranged beside training as nodes come and go, and what agents tell of the memory."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

from detectors.evidence import MemstoreFailure
from holdfast.control.agents.events import MemstoreFull, MemstoreUnavailable, ReplicaLost, ReplicaRestored
from holdfast.control.agents.pool import AgentPool
from holdfast.errors import WorldError
from holdfast.protocol import Message
from holdfast.spec.job import MemoryPlan
from policies.replicas import assign_replica_nodes

N = TypeVar("N", str, str | None)

KINDS: Final = {"memstore.unavailable": "memory-none", "memstore.full": "memory-limit", "replica.lost": "replica-lost"}
"""What a node's event is in the catalogue."""

News: TypeAlias = tuple[MemstoreFailure | None, str]
"""A trouble for the record, if it is one, and what a person should read."""


class Replicas:
    """The replicas of one job's snapshots."""

    def __init__(self, fleet: AgentPool, plan: MemoryPlan) -> None:
        self.known: set[tuple[str, str | None, float]] = set()
        """Kind, node and time of what is on record already: a flow that adopts a job hears of it again."""
        self._fleet, self._plan = fleet, plan
        self._homes: Mapping[str, Sequence[str]] = {}
        self._members: frozenset[str] = frozenset()
        self._ordered: dict[str, tuple[object, list[list[Any]]]] = {}
        self._asked: dict[str, Future[Message]] = {}
        self._open: set[tuple[str, str]] = set()
        self._begun = time.time()

    def environments(self, members: Container[str], nodes: Iterable[N]) -> dict[N, dict[str, str]]:
        """Return for each of *nodes* what workers there must know to fetch snapshots from any node of the job; see `servers`."""
        found = self.servers(members, nodes)
        return {node: {"HOLDFAST_MEMORY_SERVERS": json.dumps(servers)} if servers else {} for node, servers in found.items()}

    def servers(self, members: Container[str], nodes: Iterable[N]) -> dict[N, dict[str, list[Any]]]:
        """Return for each of *nodes* host and port of the servers to be asked, by node: its own, and those of nodes that are no *members*.

        Members tell each other of theirs when they meet. If each of thousands were told of all, that would be hundreds of megabytes in the
        middle of a recovery, and more than a process may be given as its environment.
        """
        gone = self._fleet.gone()
        live = {one: list(address) for one, address in sorted(self._fleet.memory.items()) if one not in gone}
        beside = {one: address for one, address in live.items() if one not in members}
        return {node: dict(sorted({**beside, node: live[node]}.items())) if node in live else beside for node in nodes}

    # -- homes --------------------------------------------------------------------------------------------------------

    def reattach(self, told: Mapping[str, Message]) -> None:
        """Learn from the agents which homes the flow before had chosen."""
        nodes = {address: node for node, address in self._fleet.memory.items()}
        homes = {node: [tuple(address) for address in (one.get("memory") or {}).get("to") or ()] for node, one in told.items()}
        self._homes = {node: [nodes[address] for address in held if address in nodes] for node, held in homes.items()}

    def maintain(self, members: Sequence[str]) -> list[News]:
        """See to it that the snapshots of each of *members* go where they should; wait for nothing. Return what there is to tell."""
        if not self._plan.replicas or not self._fleet.gone().keys().isdisjoint(members):  # an incident comes, and changes the members
            return []
        self._settle()
        alive = [node for node in self._fleet.not_gone() if node in self._fleet.memory]  # who cannot be reached from here keeps them well
        nodes, before, held = [node for node in members if node in alive], self._homes, self._members
        self._homes = assign_replica_nodes(self._with_spares(nodes, alive), self._fleet.source.domain, self._plan.replicas, before=before)
        self._members = frozenset(members)
        for node in nodes:
            order = (self._fleet.clients.get(node), [list(self._fleet.memory[home]) for home in self._homes[node]])
            if self._ordered.get(node) != order:
                self._ordered[node] = order
                self._asked[node] = self._fleet.send_command_async(node, "replicate", to=order[1], bandwidth=self._plan.bandwidth)
        return [news for node in nodes for news in self._moved(node, before.get(node, ()), alive, held)]

    def _moved(self, node: str, before: Sequence[str], alive: Sequence[str], held: frozenset[str]) -> Iterator[News]:
        """Yield what to tell when a node's homes are others than *before*: of one that *held* ranks an incident tells already."""
        after, lost = self._homes[node], (node, "replica-lost")
        if tuple(after) == tuple(before):
            return
        gone, now = [home for home in before if home not in alive], f"go to {' and '.join(after)} from now on"
        for home in [home for home in gone if not after or home not in held]:
            rest = f"they {now}" if after else "no other node can keep them"
            news = self._news(node, lost[1], time.time(), f"{home}, which kept its snapshots, is gone; {rest}")
            yield from [] if news is None else [news]
        if after:
            if lost in self._open and not gone:
                yield None, f"the snapshots of {node} {now}"
            self._open.discard(lost)

    def _with_spares(self, nodes: list[str], alive: list[str]) -> list[str]:
        """Return who can be a home: those with ranks; spare ones only where these would leave a node without a home that is apart."""
        domain, spares = self._fleet.source.domain, [node for node in alive if node not in nodes]
        if len({domain(node) for node in nodes}) > 1:
            return nodes
        apart = [node for node in spares if domain(node) not in map(domain, nodes)]
        return [*nodes, *(apart or (spares if len(nodes) == 1 else []))]

    def _settle(self) -> None:
        """Look at the answers that have come: what was refused, or not heard, is ordered again."""
        for node, future in list(self._asked.items()):
            if future.done():
                del self._asked[node]
                if future.cancelled() or isinstance(future.exception(), WorldError):
                    self._ordered.pop(node, None)

    # -- news ---------------------------------------------------------------------------------------------------------

    def note_restored(self, node: str, event: ReplicaRestored) -> str:
        """Note that snapshots of *node* are kept again; return what a person should read."""
        again = (node, "replica-lost") in self._open and event.at > self._begun
        self._open.discard((node, "replica-lost"))
        return f"the snapshots of {node} are kept on {self._name_of(event.peer)} again" if again else ""

    def note_problem(self, node: str, event: MemstoreUnavailable | MemstoreFull | ReplicaLost) -> News:
        """Return the evidence in an agent's *event*, if it is news, and what a person should read."""
        words = event.why
        if isinstance(event, ReplicaLost):
            peer = self._name_of(event.peer)
            if peer not in self._homes.get(node, (peer,)):
                return None, ""  # its snapshots go elsewhere since
            words = f"{peer} cannot be reached: {event.why}"
        return self._news(node, KINDS[event.event], event.at, words) or (None, "")

    def _news(self, node: str, kind: str, at: float, words: str) -> News | None:
        """Return a trouble and what a person should read, unless it is on record or told already."""
        first, known = not any(seen == kind for _, seen in self._open), (kind, node, at) in self.known or (node, kind) in self._open
        self._open.add((node, kind))
        if known:
            return None
        return MemstoreFailure(node=node, at=at, kind=kind, why=words), f"{node}: {words}" if first or kind == "replica-lost" else ""

    def _name_of(self, peer: str) -> str:
        return next((node for node, (host, port) in self._fleet.memory.items() if f"{host}:{port}" == peer), peer)

    def remember(self, faults: Iterable[tuple[str, str | None, float]]) -> None:
        """Take what is on record: kind, node and time of each fault."""
        self.known.update(one for one in faults if one[0] in KINDS.values())
