"""The pool of standbys: warm processes of the job's script that wait for a rank. Kept filled beside training, never in its way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from holdfast.control.agents.events import StandbyExited, StandbyReady
from holdfast.control.agents.pool import AgentPool
from holdfast.errors import WorldError
from holdfast.protocol import Message
from holdfast.report import wording
from policies.escalation import HotSpare

MOST_LOSSES: Final = 5
EACH: Final = 1000
"""Numbers that each flow has for the standbys it starts: the one before may have standbys on nodes that this one cannot reach, and where
nodes share a home the number names their log."""
WINDOW: Final = 600.0
"""Seconds: after `MOST_LOSSES` standbys lost within them no new one is started until some time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpareRequest:
    """What standbys are to be good for."""

    roles: Sequence[Sequence[int]]
    world: int
    environment: Callable[[int, int, int], dict[str, str]]
    """From a rank, a standby's id and the role it is to park in to its environment."""


@dataclass(slots=True, kw_only=True)
class HotSpareState:
    """One standby, from the order that starts it to its end or its promotion."""

    id: int
    node: str
    role: int
    """The role that it is to park in."""
    world: int
    agent: object = None
    """The agent that keeps it: another one on the same node knows nothing of it."""
    ready: bool = False


class HotSparePool:
    """The standbys of one job."""

    def __init__(self, fleet: AgentPool, record_event: Callable[[str], None]) -> None:
        self.standbys: dict[int, HotSpareState] = {}
        self._fleet, self._remark = fleet, record_event
        self._next = EACH * (fleet.epoch - 1)
        self._losses: deque[float] = deque(maxlen=MOST_LOSSES)
        self._asked: list[tuple[str, list[int], Future[Message]]] = []

    def ready(self, world: int) -> tuple[HotSpare, ...]:
        """Return the standbys that can take over a rank of a job of *world* ranks now."""
        return tuple(
            HotSpare(id=one.id, node=one.node, role=one.role)
            for one in self.standbys.values()
            if one.ready and one.world == world and self._is_kept(one)
        )

    def _is_kept(self, one: HotSpareState) -> bool:
        """Tell whether the agent that started a standby lives: it takes it along."""
        return one.agent is not None and self._fleet.agent(one.node) is one.agent

    def are_ready(self, numbers: Sequence[int]) -> bool:
        """Tell whether all these standbys have parked."""
        return all(number in self.standbys and self.standbys[number].ready for number in numbers)

    def lost(self, numbers: Sequence[int]) -> list[int]:
        """Return those of these standbys that are no more."""
        return [number for number in numbers if number not in self.standbys]

    def next_id(self) -> int:
        """Return a number that no standby of this job has had."""
        self._next += 1
        return self._next - 1

    # -- hearing ------------------------------------------------------------------------------------------------------

    def reattach(self, node: str, told: dict[str, Message], world: int) -> None:
        """Take up the standbys that the agent of *node* tells of."""
        for name, view in told.items():
            number = int(name)
            self._next = max(self._next, number + 1)
            role, agent = int(view.get("role") or 0), self._fleet.agent(node)
            self.standbys[number] = HotSpareState(id=number, node=node, role=role, world=world, agent=agent, ready=bool(view["ready"]))

    def note_started(self, number: int) -> None:
        """Learn that this number is taken: a flow before may have asked for it."""
        self._next = max(self._next, number + 1)

    def note_ready(self, event: StandbyReady) -> None:
        """Learn that a standby has parked; what it holds and what it has seen is worth a remark."""
        one = self.standbys.get(event.id)
        if one is not None:
            if not one.ready:
                self._remark(f"standby {one.id} on {one.node} {_parked(event)}")
            one.ready, one.role = True, one.role if event.role is None else event.role

    def note_exited(self, event: StandbyExited) -> None:
        """Learn that a standby has ended; one that was not wanted gone is worth a remark, and is replaced."""
        one = self.standbys.pop(event.id, None)
        if one is None or event.ordered:
            return
        self._lose(one, _how(event))

    def _lose(self, one: HotSpareState, how: str) -> None:
        now = time.monotonic()
        self._losses.append(now)
        rest = "no more are started for a while" if self._is_unlucky(now) else "another one takes its place"
        self._remark(f"standby {one.id} on {one.node} {how}; {rest}")

    def _is_unlucky(self, now: float) -> bool:
        return len(self._losses) == MOST_LOSSES and now - self._losses[0] < WINDOW

    # -- giving and taking --------------------------------------------------------------------------------------------

    def take(self, numbers: Sequence[int]) -> None:
        """Let go of standbys that have become ranks."""
        for number in numbers:
            self.standbys.pop(number, None)

    def drop(self, numbers: Sequence[int]) -> None:
        """End standbys, without waiting for it."""
        for node in {self.standbys[number].node for number in numbers if number in self.standbys}:
            here = [number for number in numbers if number in self.standbys and self.standbys[number].node == node]
            self.take(here)
            self._fleet.send_command_async(node, "drop", standbys=here)

    def maintain(self, places: Sequence[str], wanted: HotSpareRequest) -> None:
        """Have a standby on each of *places* (a node may be named several times): start what is missing.

        One that waits elsewhere goes as soon as each place has one that has parked: beside workers it uses what is theirs.
        """
        self.settle()
        self.drop([one.id for one in self.standbys.values() if one.world != wanted.world])
        alive = set(self._fleet.alive())
        self.take([one.id for one in self.standbys.values() if not self._is_kept(one)])
        if not wanted.roles or self._is_unlucky(time.monotonic()):
            return
        astray, missing = self._astray(places), dict[str, list[int]]()
        for node, role in self._missing([node for node in places if node in alive], wanted.roles, astray):
            missing.setdefault(node, []).append(role)
        for node, parks in missing.items():
            self.start(node, parks, wanted)
        if places and not Counter(places) - Counter(one.node for one in self.standbys.values() if one.ready):
            self.drop(astray)

    def start(self, node: str, parks: Sequence[int], wanted: HotSpareRequest) -> list[int]:
        """Begin to start standbys on *node*, one for each of the roles *parks*; return their numbers."""
        standbys: list[dict[str, Any]] = []
        for role in parks:
            number = self.next_id()
            self.standbys[number] = HotSpareState(id=number, node=node, role=role, world=wanted.world, agent=self._fleet.agent(node))
            rank = min(wanted.roles[role])
            standbys.append({"id": number, "environment": wanted.environment(rank, number, role)})
        numbers = [one["id"] for one in standbys]
        self._asked.append((node, numbers, self._fleet.send_command_async(node, "standby", standbys=standbys)))
        return numbers

    def settle(self) -> None:
        """Take note of orders that were refused."""
        done = [one for one in self._asked if one[2].done()]
        self._asked = [one for one in self._asked if not one[2].done()]
        for _, numbers, answer in done:
            error = answer.exception()
            for number in numbers if isinstance(error, WorldError) else ():
                one = self.standbys.pop(number, None)
                if one is not None:
                    self._lose(one, f"could not be started: {error}")

    def held(self) -> Counter[str]:
        """Return how many standbys there are on each node."""
        return Counter(one.node for one in self.standbys.values())

    def _astray(self, places: Sequence[str]) -> list[int]:
        """Return the standbys that are on none of *places*, or are too many there: the newest that have not parked before others."""
        left, astray = Counter(places), list[int]()
        for one in sorted(self.standbys.values(), key=lambda one: (not one.ready, one.id)):
            if left[one.node] > 0:
                left[one.node] -= 1
            else:
                astray.append(one.id)
        return astray

    def _missing(self, places: Sequence[str], roles: Sequence[Sequence[int]], astray: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield a node and a role for each standby that is missing, those *astray* not counted: the largest role first, then in turn."""
        order = sorted(range(len(roles)), key=lambda role: (-len(roles[role]), role))
        wanted = Counter(order[place % len(order)] for place in range(len(places)))
        there = [one for one in self.standbys.values() if one.id not in astray]
        nodes = list((Counter(places) - Counter(one.node for one in there)).elements())
        parks = wanted - Counter(one.role for one in there)
        yield from zip(nodes, sorted(parks.elements(), key=order.index), strict=False)


def places_for(count: int, room: Mapping[str, int], members: Sequence[str], held: Mapping[str, int]) -> list[str]:
    """Return the node of each of *count* standbys: where there is *room* for ranks, most of it first; the rest beside workers in turn.

    Those that *held* standbys until now come before others of their kind: it need not be started anew.
    """
    roomy = sorted((node for node in room if room[node] > 0), key=lambda node: (not held.get(node), -room[node]))
    places = [node for node in roomy for _ in range(room[node])][:count]
    rest, beside = count - len(places), sorted(members, key=lambda node: not held.get(node))
    return places + [beside[place % len(beside)] for place in range(rest)] if beside else places


def _parked(event: StandbyReady) -> str:
    """Say how a standby warmed up."""
    coverage = event.coverage
    after = f" after {wording.duration(event.seconds)}" if event.seconds is not None else ""
    memory = f", holding {wording.size(event.rss)} of memory" if event.rss is not None else ""
    calls = f"; {coverage.get('played')} of {coverage['calls']} calls were answered from the tape" if coverage.get("calls") else ""
    return f"is warm and parked{after}{memory}{calls}"


def _how(event: StandbyExited) -> str:
    """Say how a standby ended."""
    if event.raised is not None:
        return f"raised {event.raised.type}: {event.raised.message}"[:300]
    if event.why:
        return f"could not be started: {event.why}"
    return f"was ended by signal {event.signal}" if event.signal is not None else f"ended with status {event.code}"
