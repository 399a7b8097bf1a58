"""The pool of hot spares: warm processes of the job's script that wait for a rank. It is filled while training runs."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from holdfast.control.agents.events import HotSpareExited, HotSpareReady
from holdfast.control.agents.pool import AgentPool
from holdfast.errors import WorldError
from holdfast.policies.recovery.escalation import HotSpare
from holdfast.protocol import Message
from holdfast.report.text import wording

MAX_LOSSES: Final = 5
LOSS_WINDOW: Final = 600.0
"""Seconds: after `MAX_LOSSES` losses within them no hot spare is started for a while."""
IDS_PER_CONTROLLER: Final = 1000
"""Ids that each controller has for its hot spares: those of the last one may run on nodes that this one cannot reach, and where nodes share
a home folder the id names their log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpareRequest:
    """What new hot spares must fit."""

    roles: Sequence[Sequence[int]]
    world: int
    environment: Callable[[int, int, int], dict[str, str]]
    """From a rank, a hot spare's id and the role that it warms up for to its environment."""
    ranks_per_node: int = 0
    local_ranks: Callable[[str], AbstractSet[int]] = lambda _node: frozenset()
    """The local ranks, and so the GPUs, that the job's ranks on a node have."""


@dataclass(slots=True, kw_only=True)
class HotSpareState:
    """One hot spare, from the command that starts it to its exit or its activation."""

    id: int
    node: str
    role: int
    """The role that it warms up for."""
    world: int
    local_rank: int | None = None
    """The local rank of its own, and so its GPU; None where all of the node's have a rank."""
    beside: AbstractSet[int] = frozenset()
    """The local ranks that the job's ranks on its node had when it was started."""
    agent: object = None
    """The client of the agent that started it: another agent on the same node does not know it."""
    ready: bool = False


class HotSparePool:
    """The hot spares of one job."""

    def __init__(self, agents: AgentPool, record_event: Callable[[str], None]) -> None:
        self.spares: dict[int, HotSpareState] = {}
        self._agents, self._record_event = agents, record_event
        self._next = IDS_PER_CONTROLLER * (agents.epoch - 1)
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._starting: list[tuple[list[int], Future[Message]]] = []
        self._full: dict[str, AbstractSet[int]] = {}
        """Nodes on which a hot spare would share a GPU with a rank, and the local ranks of their ranks at that time."""

    # -- queries ------------------------------------------------------------------------------------------------------

    def ready(self, world: int) -> tuple[HotSpare, ...]:
        """Return the hot spares that can take a rank of a job of *world* ranks now."""
        return tuple(
            HotSpare(id=one.id, node=one.node, role=one.role)
            for one in self.spares.values()
            if one.ready and one.world == world and self._has_agent(one)
        )

    def _has_agent(self, one: HotSpareState) -> bool:
        """Return whether the agent that started a hot spare still runs: the hot spare ends with it."""
        return one.agent is not None and self._agents.agent(one.node) is one.agent

    def are_ready(self, ids: Sequence[int]) -> bool:
        """Return whether all these hot spares have warmed up."""
        return all(number in self.spares and self.spares[number].ready for number in ids)

    def lost(self, ids: Sequence[int]) -> list[int]:
        """Return those of these hot spares that have exited."""
        return [number for number in ids if number not in self.spares]

    def held(self) -> Counter[str]:
        """Return the number of hot spares on each node."""
        return Counter(one.node for one in self.spares.values())

    # -- events -------------------------------------------------------------------------------------------------------

    def reattach(self, node: str, spares: dict[str, Message], world: int) -> None:
        """Add the hot spares that the agent of *node* reports."""
        for name, view in spares.items():
            number = int(name)
            self.note_started(number)
            role, agent = int(view.get("role") or 0), self._agents.agent(node)
            self.spares[number] = HotSpareState(
                id=number,
                node=node,
                role=role,
                world=world,
                local_rank=int(view["local_rank"]) if str(view.get("local_rank")).isdecimal() else None,
                agent=agent,
                ready=bool(view["ready"]),
            )

    def note_started(self, number: int) -> None:
        """Note that this id is taken: an earlier controller may have used it."""
        self._next = max(self._next, number + 1)

    def note_ready(self, event: HotSpareReady) -> None:
        """Note that a hot spare has warmed up, and record it."""
        one = self.spares.get(event.id)
        if one is not None:
            if not one.ready:
                self._record_event(f"hot spare {one.id} on {one.node} {_warm_up_text(event)}")
            one.ready, one.role = True, one.role if event.role is None else event.role

    def note_exited(self, event: HotSpareExited) -> None:
        """Note that a hot spare has exited; one that was not ended by a command is recorded, and replaced."""
        one = self.spares.pop(event.id, None)
        if one is not None and not event.ordered:
            self._note_lost(one, _exit_text(event))

    def _note_lost(self, one: HotSpareState, how: str) -> None:
        now = time.monotonic()
        self._losses.append(now)
        rest = "no more are started for a while" if self._lost_too_many(now) else "another one takes its place"
        self._record_event(f"hot spare {one.id} on {one.node} {how}; {rest}")

    def _lost_too_many(self, now: float) -> bool:
        return len(self._losses) == MAX_LOSSES and now - self._losses[0] < LOSS_WINDOW

    # -- start and end ------------------------------------------------------------------------------------------------

    def take(self, ids: Sequence[int]) -> None:
        """Remove hot spares that have become ranks."""
        for number in ids:
            self.spares.pop(number, None)

    def drop(self, ids: Sequence[int]) -> None:
        """End hot spares, without waiting for it."""
        for node in {self.spares[number].node for number in ids if number in self.spares}:
            here = [number for number in ids if number in self.spares and self.spares[number].node == node]
            self.take(here)
            self._agents.send_command_async(node, "drop", hot_spares=here)

    def maintain(self, places: Sequence[str], wanted: HotSpareRequest) -> None:
        """Keep a hot spare on each of *places* (a node may be listed several times): start the missing ones.

        Others are ended as soon as each place has one that has warmed up, as they use resources of the workers. None is started on a node
        whose agent has refused one because all of its GPUs have ranks.
        """
        self.settle()
        places = [node for node in places if self._full.get(node) != wanted.local_ranks(node)]
        self.drop([one.id for one in self.spares.values() if one.world != wanted.world])
        alive = set(self._agents.alive())
        self.take([one.id for one in self.spares.values() if not self._has_agent(one)])
        if not wanted.roles or self._lost_too_many(time.monotonic()):
            return
        extra, missing = self._extra(places), dict[str, list[int]]()
        for node, role in self._missing([node for node in places if node in alive], wanted.roles, extra):
            missing.setdefault(node, []).append(role)
        for node, roles in missing.items():
            self.start(node, roles, wanted)
        if places and not Counter(places) - Counter(one.node for one in self.spares.values() if one.ready):
            self.drop(extra)

    def start(self, node: str, roles: Sequence[int], wanted: HotSpareRequest) -> list[int]:
        """Begin to start hot spares on *node*, one for each of *roles*; return their ids."""
        hot_spares: list[dict[str, Any]] = []
        for role in roles:
            number, self._next = self._next, self._next + 1
            environment, local = wanted.environment(min(wanted.roles[role]), number, role), self._free_local_rank(node, wanted)
            if local is not None:
                environment["LOCAL_RANK"] = str(local)
            self.spares[number] = HotSpareState(
                id=number,
                node=node,
                role=role,
                world=wanted.world,
                local_rank=local,
                beside=wanted.local_ranks(node),
                agent=self._agents.agent(node),
            )
            hot_spares.append({"id": number, "environment": environment})
        ids = [one["id"] for one in hot_spares]
        self._starting.append((ids, self._agents.send_command_async(node, "start-hot-spares", hot_spares=hot_spares)))
        return ids

    def _free_local_rank(self, node: str, wanted: HotSpareRequest) -> int | None:
        """Return the lowest local rank of *node* that no rank and no other hot spare has: two processes must not share a GPU."""
        taken = set(wanted.local_ranks(node)) | {one.local_rank for one in self.spares.values() if one.node == node}
        return next((number for number in range(wanted.ranks_per_node) if number not in taken), None)

    def settle(self) -> None:
        """Handle rejected start commands, and hot spares that an agent refused."""
        done = [one for one in self._starting if one[1].done()]
        self._starting = [one for one in self._starting if not one[1].done()]
        for ids, answer in done:
            error = answer.exception()
            for number in ids if isinstance(error, WorldError) else ():
                one = self.spares.pop(number, None)
                if one is not None:
                    self._note_lost(one, f"could not be started: {error}")
            for name, why in (answer.result().get("refused") or {}).items() if error is None else ():
                one = self.spares.pop(int(name), None)
                if one is not None and self._full.get(one.node) != one.beside:
                    self._full[one.node] = one.beside
                    self._record_event(f"no hot spare on {one.node}: {why}. Give the job spare nodes, or fewer ranks on each node")

    def _extra(self, places: Sequence[str]) -> list[int]:
        """Return the hot spares beyond those on *places*: those that have not warmed up, and the newest, first."""
        remaining, extra = Counter(places), list[int]()
        for one in sorted(self.spares.values(), key=lambda one: (not one.ready, one.id)):
            if remaining[one.node] > 0:
                remaining[one.node] -= 1
            else:
                extra.append(one.id)
        return extra

    def _missing(self, places: Sequence[str], roles: Sequence[Sequence[int]], extra: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield a node and a role for each missing hot spare, not counting *extra*: the roles in turn, the largest first."""
        order = sorted(range(len(roles)), key=lambda role: (-len(roles[role]), role))
        wanted = Counter(order[place % len(order)] for place in range(len(places)))
        present = [one for one in self.spares.values() if one.id not in extra]
        nodes = list((Counter(places) - Counter(one.node for one in present)).elements())
        missing = wanted - Counter(one.role for one in present)
        yield from zip(nodes, sorted(missing.elements(), key=order.index), strict=False)


def places_for(count: int, room: Mapping[str, int], members: Sequence[str], held: Mapping[str, int]) -> list[str]:
    """Return a node for each of *count* hot spares: where there is *room* for ranks, most of it first; the rest on members in turn.

    Of equal nodes those with hot spares (*held*) come first, so that fewer have to be started.
    """
    roomy = sorted((node for node in room if room[node] > 0), key=lambda node: (not held.get(node), -room[node]))
    places = [node for node in roomy for _ in range(room[node])][:count]
    rest, others = count - len(places), sorted(members, key=lambda node: not held.get(node))
    return places + [others[place % len(others)] for place in range(rest)] if others else places


def _warm_up_text(event: HotSpareReady) -> str:
    after = f" after {wording.duration(event.seconds)}" if event.seconds is not None else ""
    memory = f", holding {wording.size(event.rss)} of memory" if event.rss is not None else ""
    calls, played = event.coverage.calls, event.coverage.played
    answered = f"; {played} of {calls} calls were answered from the recording" if calls else ""
    return f"has warmed up{after}{memory}{answered}"


def _exit_text(event: HotSpareExited) -> str:
    if event.raised is not None:
        return f"raised {event.raised.type}: {event.raised.message}"[:300]
    if event.why:
        return f"could not be started: {event.why}"
    return f"was killed by signal {event.signal}" if event.signal is not None else f"exited with status {event.code}"
