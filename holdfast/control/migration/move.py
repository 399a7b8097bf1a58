"""Move ranks that live to another node, as somebody asked for."""

from __future__ import annotations

import time
from collections import Counter

from holdfast.control.migration.planned import CannotMove, Interrupted, MigrationPlan
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.requests import MigrationRequest
from holdfast.errors import WorldError
from policies.node_faults import NodeFault
from policies.states import Event, Transition


def move(run: JobController) -> Transition:
    """Carry out the oldest move that was asked for; what keeps it from being done leaves training as it is."""
    asked, begin = run.requests.moves[0], time.monotonic()
    try:
        rank_move = RankMove(run, asked)
        words = rank_move.carry_out()
    except (CannotMove, WorldError) as error:  # an agent that is gone, or refused: if that is a fault, the next look at the job finds it
        run.stragglers.remember([run.requests.answer(asked, str(error), done=False)])
        return Transition(Event.MOVE_FAILED, str(error))
    except Interrupted as error:
        run.stragglers.remember([run.requests.answer(asked, f"something came in between: {error}", done=False)])
        return error.turn
    words = f"{words} in {time.monotonic() - begin:.1f} s, while training went on"
    run.stragglers.remember([run.requests.answer(asked, words, done=True, pause=rank_move.pause)])
    return Transition(Event.MOVED, words)


class RankMove(MigrationPlan):
    """One planned move."""

    def __init__(self, run: JobController, asked: MigrationRequest) -> None:
        super().__init__(run)
        self.asked = asked

    def carry_out(self) -> str:
        """Prepare, change over, put it on record; return what was done, in words."""
        run, told = self.run, False
        try:
            self.wait(
                lambda: bool(run.generations.roles) and run.generations.state.all_stepped() and run.generations.state.grouped(),
                self.why_not_yet,
            )
            leavers, source = self._leavers()
            target = self._target(source, len(leavers))
            seats = self.seats(dict.fromkeys(leavers, target))
            rank_table = self.plan(seats, leavers)
            told = True
            self.prepare(rank_table, seats)
            self.switch()
        except BaseException:
            self.give_up(told=told)
            raise
        self.record(seats, rank_table, reason=self.asked.describe(), source=source)
        if self.asked.kind:  # a detector's wish: the node held the others up
            severe, words = source not in run.generations.members, f"{self.asked.kind}: {self.asked.quote}"
            run.nodes.eligibility.record_faults([NodeFault(node=source, severe=severe, reason=words, evidence=(words,), seen=time.time())])
        ranks = ", ".join(map(str, sorted(leavers)))
        if self.asked.rank is None and source not in run.generations.members:
            run.log.record_node_status(source, "excluded", f"rank(s) {ranks} were moved to {target}")
            run.agents.drop_async(source)
        return f"rank(s) {ranks} moved from {source} to {target}"

    def _leavers(self) -> tuple[frozenset[int], str]:
        """Return the ranks that are to move, and the node that holds them."""
        membership, asked = self.run.generations.state.membership, self.asked
        held = ", ".join(f"{node} ({', '.join(map(str, ranks))})" for node, ranks in membership.items())
        if asked.rank is not None:
            node = next((node for node, ranks in membership.items() if asked.rank in ranks), None)
            if node is None:
                raise CannotMove(f"there is no rank {asked.rank}; the job runs on {held}")
            leavers = frozenset({asked.rank})
        else:
            node = asked.source or ""
            if node not in membership:
                raise CannotMove(f"{node} holds no rank of this job; it runs on {held}")
            leavers = frozenset(membership[node])
        if len(leavers) == len(self.run.generations.state.ranks):
            raise CannotMove("all ranks would move at once; at least one has to stay, so that the others find it")
        return leavers, node

    def _target(self, source: str, count: int) -> str:
        """Return the node to move to: the one asked for, else one where standbys wait or that has room, else any free one."""
        fleet, wanted = self.run.agents, self.asked.target
        if wanted == source:
            raise CannotMove(f"the ranks are on {source} already")
        if wanted and (why := self.run.nodes.eligibility.why_ineligible(wanted)):
            raise CannotMove(f"{wanted} is {why}")
        candidates = (
            [wanted] if wanted else [*self._alive(source, count), *(node for node in self.run.nodes.free() if node not in fleet.alive())]
        )
        refused = []
        for node in candidates:
            if node in fleet.alive():
                return node
            if node not in fleet.source.names():
                raise CannotMove(f"cluster {self.run.cluster.name} has no node {node}")
            answer = fleet.each([node], fleet.bring_up)[node]
            if not isinstance(answer, WorldError):
                self.run.log.record_node_status(node, "healthy", "its agent is up")
                return node
            refused.append(f"{node}: {answer}")
        refused += self.run.nodes.eligibility.left_out()
        raise CannotMove("there is no other node to move to" + (f" ({'; '.join(refused)})" if refused else ""))

    def _alive(self, source: str, count: int) -> list[str]:
        """Return the nodes with an agent that can take *count* more ranks: where standbys wait first, then where there is most room."""
        room, waiting = (
            self.run.nodes.room(),
            Counter(one.node for one in self.run.nodes.hot_spares.ready(self.run.generations.rank_table.width)),
        )
        able = [node for node in room if node != source and max(room[node], waiting[node]) >= count]
        return sorted(able, key=lambda node: (-min(waiting[node], count), -room[node]))
