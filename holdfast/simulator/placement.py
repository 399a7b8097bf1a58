"""Where the ranks of a simulated job are: its nodes, what they hold, and the warm processes that can take a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count

import simpy

from holdfast.policies.recovery.case import IN_PROCESS, Decision, HotSpare, ModelCopies, Placement
from holdfast.policies.recovery.in_process import placements_to_grow
from holdfast.policies.recovery.rank_map import RankMap
from holdfast.simulator.incidents import Hit
from holdfast.simulator.nodes import NodePool
from holdfast.simulator.scenario import ScenarioJob


class MemberTuple(tuple[str, ...]):  # noqa: SLOT001 (it has `places`)
    """Names of nodes in order, looked up in constant time by their *places*."""

    places: Mapping[str, int]

    @classmethod
    def of(cls, names: Iterable[str], places: Mapping[str, int]) -> MemberTuple:
        """Return *names*, which are the keys of *places*."""
        made = cls(names)
        made.places = places
        return made

    def __contains__(self, name: object) -> bool:
        return name in self.places


class JobPlacement:
    """The nodes and ranks of one job; nodes that it drops go back to the pool."""

    def __init__(self, env: simpy.Environment, spec: ScenarioJob, pool: NodePool, *, width: int, hot_spares: bool) -> None:
        self._env, self._spec, self._pool, self._width, self._uses_hot_spares = env, spec, pool, width, hot_spares
        nodes = list(self._pool.free)[: spec.nodes]
        self._pool.take(nodes)
        self.nodes, self.place = nodes, {node: place for place, node in enumerate(nodes)}
        self.members = MemberTuple.of(nodes, self.place)
        self.ranks = RankMap({node: range(place * self._width, (place + 1) * self._width) for node, place in self.place.items()})
        per_copy = spec.nodes // spec.copies * self._width
        self.copies: ModelCopies = tuple(tuple(range(copy * per_copy, (copy + 1) * per_copy)) for copy in range(spec.copies))
        self.broken: dict[str, Hit] = {}
        """Nodes of the job that cannot run ranks."""
        self.degraded: dict[str, float] = {}
        """Nodes that are repaired when the job leaves them: seconds of the repair."""
        self.slow: dict[str, float] = {}
        self._spare_ids = count(1)
        self._warm: dict[str, tuple[HotSpare, ...]] = {}
        """Warm processes of free nodes."""
        self._vacant: dict[int, tuple[HotSpare, float]] = {}
        """Warm processes on nodes with ranks, by id, and when each is ready: a place that a rank leaves is warmed up again."""

    def rearrange(self, decision: Decision) -> bool:
        """Give the ranks the places that *decision* names; return whether all new ones are warm."""
        if decision.action in IN_PROCESS:
            return self._seat(decision)
        warm = set(self._pool.hot_nodes())
        hot = all(node in warm for node in decision.add) if decision.add else bool(warm)
        if decision.drop or decision.add:
            self.exchange(decision.drop, decision.add)
        self.fill_up()
        self._consolidate()
        return hot

    def exchange(self, drop: Sequence[str], add: Sequence[str]) -> None:
        """Replace the nodes *drop* by *add*, in their places; those without a successor leave, and their ranks with them."""
        self._pool.take(add)
        coming, left = list(add), list[str]()
        for node in drop:
            ranks = self.ranks.get(node, ())
            if coming:
                new = coming.pop(0)
                self.place[new] = place = self.place.pop(node)
                self.nodes[place] = new
                for rank in ranks:
                    self.ranks.place(rank, new)
            else:
                left.append(node)
                for rank in ranks:
                    self.ranks.drop(rank)
        if left or coming:
            self.nodes = [node for node in self.nodes if node not in left] + coming
            self.place = {node: place for place, node in enumerate(self.nodes)}
            self._spread(coming)
        self.members = MemberTuple.of(self.nodes, self.place)
        for node in drop:
            self._forget(node)

    def _spread(self, coming: Sequence[str]) -> None:
        """Give the ranks that no node has to the nodes *coming*."""
        missing = iter(sorted(set(range(self._spec.nodes * self._width)) - self.ranks.ranks())) if coming else iter(())
        for node in coming:
            for _ in range(self._width):
                if (rank := next(missing, None)) is not None:
                    self.ranks.place(rank, node)

    def _forget(self, node: str) -> None:
        """Let go of a node without ranks."""
        self._vacant = {number: one for number, one in self._vacant.items() if one[0].node != node}
        self._warm.pop(node, None)
        self.broken.pop(node, None)
        self.slow.pop(node, None)
        if repair := self.degraded.pop(node, 0.0):
            self._pool.leave(node, repair)
        self._pool.release(node)

    def _seat(self, decision: Decision) -> bool:
        """Move ranks to their new places while the others stay; return whether all went to hot spares."""
        before = set(self.ranks) if decision.vacate else {*decision.drop, *(seat.node for seat in decision.seats)}
        moved_from = {node for seat in decision.seats if (node := self.ranks.node_of(seat.rank)) is not None}
        for rank in decision.vacate:
            self.ranks.drop(rank)
        for seat in decision.seats:
            self._note_vacancy(self.ranks.node_of(seat.rank), seat)
            self.ranks.place(seat.rank, seat.node)
        came = [node for node in dict.fromkeys(seat.node for seat in decision.seats) if node not in self.place]
        gone = [node for node in before | moved_from if node in self.place and node not in self.ranks]
        self._pool.take(came)
        for node in gone:
            place = self.place.pop(node)
            new = came.pop(0) if came else self.nodes.pop()
            if place < len(self.nodes):
                self.nodes[place], self.place[new] = new, place
        for node in came:
            self.place[node] = len(self.nodes)
            self.nodes.append(node)
        self.members = MemberTuple.of(self.nodes, self.place)
        for node in gone:
            self._forget(node)
        return all(seat.hot_spare is not None for seat in decision.seats)

    def _note_vacancy(self, home: str | None, seat: Placement) -> None:
        """Note which warm process a rank takes, and that the place that it leaves is warmed up again."""
        if seat.hot_spare is None:
            return
        self._vacant.pop(seat.hot_spare, None)
        for one in self._warm.pop(seat.node, ()):  # the others of its node stay warm
            if one.id != seat.hot_spare:
                self._vacant[one.id] = one, self._env.now
        if home is not None and home != seat.node and home not in self.broken:
            spare = HotSpare(id=next(self._spare_ids), node=home)
            self._vacant[spare.id] = spare, self._env.now + self._pool.warm_up_seconds

    def _consolidate(self) -> None:
        """Give each node its full number of ranks again, as a restart of all ranks does; nodes that are not needed are free then."""
        self._vacant.clear()
        if self.ranks.total == len(self.nodes) * self._width:
            return
        needed = -(-self.ranks.total // self._width)
        kept = sorted(self.nodes, key=lambda node: -len(self.ranks.get(node, ())))[:needed]
        chosen = set(kept)
        released = [node for node in self.nodes if node not in chosen]
        self.nodes = [node for node in self.nodes if node in chosen]
        self.place = {node: place for place, node in enumerate(self.nodes)}
        ranks = sorted(self.ranks.ranks())
        self.ranks = RankMap({node: ranks[place * self._width : (place + 1) * self._width] for node, place in self.place.items()})
        self.members = MemberTuple.of(self.nodes, self.place)
        for node in released:
            self._forget(node)

    @property
    def misses_ranks(self) -> bool:
        """Return whether some rank has no node."""
        return self.ranks.total < self._spec.nodes * self._width

    def fill_up(self) -> None:
        """Take free nodes until the job has all that it wants."""
        missing = self._spec.nodes - len(self.nodes)
        if missing > 0 and self._pool.free:
            self.exchange([], list(self._pool.free)[:missing])

    def hot_spares(self, most: int, near: AbstractSet[str]) -> tuple[HotSpare, ...]:
        """Return the hot spares that are ready: those on the nodes *near*, and *most* others at most.

        The policy takes those on the same node first, or those on others, and of several the one with the lowest number.
        """
        ready = [one for one, at in self._vacant.values() if at <= self._env.now and one.node not in self.broken]
        found = [*(one for one in ready if one.node in near), *[one for one in ready if one.node not in near][:most]]
        for node in self._pool.hot_nodes() if self._uses_hot_spares else ():
            if len(found) >= most:
                break
            if node not in self._warm:
                self._warm[node] = tuple(HotSpare(id=next(self._spare_ids), node=node) for _ in range(self._width))
            found += self._warm[node]
        return tuple(found)

    def live_copies(self) -> ModelCopies:
        """Return the copies of the model of which no rank is missing; none if there is only one."""
        if self._spec.copies < 2:  # noqa: PLR2004 (one copy cannot lose any)
            return ()
        if self.ranks.total == self._spec.nodes * self._width:
            return self.copies
        known = set(self.ranks.ranks())
        return tuple(copy for copy in self.copies if known.issuperset(copy))

    def grow(self) -> bool:
        """Give missing ranks to free nodes, in complete copies of the model; return whether there were any."""
        room = {node: self._width - len(self.ranks.get(node, ())) for node in (*self.nodes, *self._pool.free)}
        found = placements_to_grow(self.copies, set(self.ranks.ranks()), {node: some for node, some in room.items() if some > 0})
        came = [node for node in dict.fromkeys(found.values()) if node not in self.place]
        self._pool.take(came)
        for rank, node in found.items():
            self.ranks.place(rank, node)
        self.nodes += came
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.members = MemberTuple.of(self.nodes, self.place)
        return bool(found)
