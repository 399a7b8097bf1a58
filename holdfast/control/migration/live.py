"""Live changes of who holds which ranks while training runs: migrate ranks to another node, or grow back into vacant places.

Hot spares get ready, then all processes switch between two steps. What keeps a change from being made leaves training as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.control.agents.pool import failures
from holdfast.control.config.worker_env import membership_by_node
from holdfast.control.recovery.in_process import shared_facts, store_without, worker_facts
from holdfast.control.state.migration import MigrationState
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import TICK, JobController, poll
from holdfast.control.supervisor.requests import MigrationRequest
from holdfast.detectors.evidence import ReplaceRanksFailure
from holdfast.errors import WorldError
from holdfast.plurals import named_ranks
from holdfast.policies.nodes.node_faults import NodeFault
from holdfast.policies.nodes.placement import Membership, membership_after
from holdfast.policies.recovery.escalation import Placement
from holdfast.policies.states import Event, Transition


class CannotMove(Exception):
    """A change that cannot be made; training continues as before."""


class Interrupted(Exception):
    """Something else needs the controller first."""

    def __init__(self, turn: Transition) -> None:
        super().__init__(turn.reason)
        self.turn = turn


def move(run: JobController) -> Transition:
    """Carry out the oldest requested migration."""
    request, begin = run.requests.migrations[0], time.monotonic()
    try:
        migration = RankMove(run, request)
        done = migration.carry_out()
    except (CannotMove, WorldError) as error:  # an agent that is lost, or refused: if that is a fault, the next poll finds it
        run.stragglers.remember([run.requests.answer(request, str(error), done=False)])
        return Transition(Event.MOVE_FAILED, str(error))
    except Interrupted as error:
        run.stragglers.remember([run.requests.answer(request, f"interrupted: {error}", done=False)])
        return error.turn
    done = f"{done} in {time.monotonic() - begin:.1f} s, while training went on"
    run.stragglers.remember([run.requests.answer(request, done, done=True, pause=migration.pause)])
    return Transition(Event.MOVED, done)


def grow_live(run: JobController) -> Transition:
    """Bring missing ranks back; after a failure it is tried again later."""
    begin = time.monotonic()
    try:
        done = GrowLive(run).carry_out()
    except (CannotMove, WorldError) as error:
        run.scale_up.failed()
        return Transition(Event.MOVE_FAILED, str(error))
    except Interrupted as error:
        run.scale_up.failed()
        return error.turn
    run.scale_up.succeeded()
    return Transition(Event.MOVED, f"{done} in {time.monotonic() - begin:.1f} s, while training went on")


class LiveChange:
    """One live change: plan, prepare, switch, record."""

    def __init__(self, run: JobController) -> None:
        self.run = run
        self.end = time.monotonic() + run.spec.timeouts.recovery.migrate.total_seconds()
        self.joiners: list[int] = []
        """Ids of the hot spares that join."""
        self.pause = 0.0
        """Seconds for which training paused."""

    def change(
        self, places: Mapping[int, str], leavers: frozenset[int], *, reason: str, source: str | None = None
    ) -> tuple[Placement, ...]:
        """Have hot spares take the ranks of *places* (to a node each) from *leavers*; *source*: the node that is left."""
        planned = False
        try:
            seats = self._seats(places)
            rank_table = self._plan(seats, leavers)
            planned = True
            self._prepare(rank_table, seats)
            self._switch()
        except BaseException:
            if planned:
                self._send_to_all({"do": "forget", "generation": self._migration.generation})
            self.run.nodes.hot_spares.drop(self.joiners)  # one that got ready for a rank fits no other
            self.run.generations.migration = None
            raise
        self._record(seats, rank_table, reason=reason, source=source)
        return seats

    def _seats(self, places: Mapping[int, str]) -> tuple[Placement, ...]:
        """Have a hot spare for each rank of *places* warmed up on its node there."""
        hot_spares, generations = self.run.nodes.hot_spares, self.run.generations
        role_of = {rank: number for number, ranks in enumerate(generations.roles) for rank in ranks}
        ready = list(hot_spares.ready(generations.rank_table.width))
        taken, missing = dict[int, int](), dict[str, list[int]]()
        for rank, node in sorted(places.items()):
            fit = next((one for one in ready if one.node == node and one.role == role_of.get(rank, 0)), None)
            if fit is None:
                missing.setdefault(node, []).append(rank)
                continue
            ready.remove(fit)
            taken[rank] = fit.id
        for node, ranks in missing.items():
            roles = [role_of.get(rank, 0) for rank in ranks]
            taken |= dict(zip(ranks, hot_spares.start(node, roles, self.run.nodes.hot_spare_spec()), strict=True))
        self.joiners = list(taken.values())
        nodes = ", ".join(set(places.values()))
        self.wait(lambda: hot_spares.are_ready(self.joiners), lambda: f"the hot spares on {nodes} have not warmed up")
        return tuple(Placement(rank=rank, node=places[rank], hot_spare=number) for rank, number in sorted(taken.items()))

    def _plan(self, seats: tuple[Placement, ...], leavers: frozenset[int]) -> RankTable:
        """Agree on the next generation."""
        generations = self.run.generations
        membership = membership_after(generations.state.membership, seats)
        store, serve = store_without(self.run, leavers, membership)
        generations.newest += 1  # whatever becomes of this, no other generation has this number
        joiners = {seat.rank: seat.hot_spare for seat in seats if seat.hot_spare is not None}
        generations.migration = MigrationState(
            generation=generations.newest,
            leavers=leavers,
            joiners=joiners,
            ranks=frozenset(generations.state.ranks),
            membership=membership,
        )
        local_ranks = self.run.nodes.local_ranks_of_spares(joiners)
        rank_table = generations.rank_table.after(generations.newest, membership, frozenset(joiners), local_ranks)
        return replace(rank_table, store=store, serve=serve, since=generations.number)

    @property
    def _migration(self) -> MigrationState:
        assert self.run.generations.migration is not None
        return self.run.generations.migration

    def _prepare(self, rank_table: RankTable, seats: tuple[Placement, ...]) -> None:
        """Have all processes build what the next generation needs while training runs; wait until all have."""
        run, migration = self.run, self._migration
        shared = {
            "do": "prepare",
            "generation": migration.generation,
            **shared_facts(run, rank_table),
            "leavers": sorted(migration.leavers),
            "joiners": {str(seat.rank): {"node": seat.node, "hot_spare": seat.hot_spare} for seat in seats},
        }
        nodes = {*run.generations.members, *(seat.node for seat in seats)}
        memory = run.checkpoints.replicas.servers(migration.membership, nodes)

        def send(node: str) -> None:
            client, message = run.agents.client(node), {**shared, "memory": memory[node]}
            for rank in run.generations.state.membership.get(node, ()):
                client.send_command("forward", ranks=[rank], hot_spares=[], message={**message, "rank": rank})
            for seat in (seat for seat in seats if seat.node == node):
                environment = run.generations.seat_environment(seat.rank, seat.node, number=migration.generation, rank_table=rank_table)
                own = {"rank": seat.rank, "environment": environment, "log": f"{run.agents.logs(node)}/rank-{seat.rank}.log"}
                client.send_command("forward", ranks=[], hot_spares=[seat.hot_spare], message={**message, **own})

        self.check_failures(run.agents.each(nodes, send))
        self.wait(lambda: migration.is_prepared, lambda: f"{migration.unprepared} did not get ready")

    def _switch(self) -> None:
        """Have all processes switch at the next step that all of them vote for; wait until they have."""
        run, migration = self.run, self._migration
        self.check_failures(self._send_to_all({"do": "switch", "generation": migration.generation}))
        try:
            self.wait(lambda: migration.is_done, lambda: "the ranks did not agree on a step for the switch")
        except CannotMove as error:
            if not (migration.switched or migration.departed):
                raise
            why = f"a live migration stopped halfway: {error}"
            run.generations.state.evidence.append(ReplaceRanksFailure(node=run.generations.members[0], at=time.time(), why=why))
            raise Interrupted(Transition(Event.FAULTED, why)) from error

    def _send_to_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message to all running ranks, and to the hot spares that join."""
        state, members = self.run.generations.state, self.run.generations.members
        node_of = {number: one.node for number, one in self.run.nodes.hot_spares.spares.items() if number in self.joiners}
        facts = {}
        for node in {*members, *node_of.values()}:
            ranks = [rank for rank in state.membership.get(node, ()) if not state.ranks[rank].ended]
            hot_spares = [number for number, other in node_of.items() if other == node]
            facts[node] = {"ranks": ranks, "hot_spares": hot_spares, "message": message}
        return self.run.agents.send_commands(facts, "forward")

    def _record(self, seats: tuple[Placement, ...], rank_table: RankTable, *, reason: str, source: str | None) -> None:
        """Record what the ranks have done: in the history, and at every agent."""
        run, generations, migration = self.run, self.run.generations, self._migration
        by_rank, generations.migration, self.pause = {seat.rank: seat for seat in seats}, None, migration.pause
        generations.enter(migration.generation, migration.membership, rank_table=rank_table, reason=reason)
        nodes: Membership = {**({source: []} if source is not None else {}), **migration.membership}
        known = membership_by_node(migration.membership)
        everything = known[next(iter(migration.membership))]
        workers = {node: [worker_facts(run, node, rank, by_rank.get(rank)) for rank in ranks] for node, ranks in nodes.items()}
        answers = run.agents.send_commands(
            {node: {"generation": generations.number, **known.get(node, everything), "workers": workers[node]} for node in nodes}, "switch"
        )
        failed = failures(answers)
        run.nodes.hot_spares.take(self.joiners)
        generations.sent_to |= dict.fromkeys(answers.keys() - failed.keys(), generations.number)
        errors = {node: str(error) for node, error in failed.items() if node in migration.membership}
        if errors:
            now = time.time()
            generations.state.evidence.extend(ReplaceRanksFailure(node=node, at=now, why=why) for node, why in errors.items())
            raise Interrupted(Transition(Event.FAULTED, "; ".join(errors.values())))

    def check_failures(self, answers: dict[str, Any]) -> None:
        """Raise `CannotMove` unless every node carried out the command."""
        if failed := failures(answers):
            raise CannotMove("; ".join(str(error) for error in failed.values()))

    def wait(self, done: Callable[[], bool], why_not: Callable[[], str]) -> None:
        """Wait while training continues; raise `Interrupted` for anything that the controller has to answer, `CannotMove` for a failure."""
        run, hot_spares = self.run, self.run.nodes.hot_spares
        while not done():
            turn = poll(run)
            if turn is not None:
                raise Interrupted(turn)
            hot_spares.settle()
            lost = hot_spares.lost(self.joiners)
            if lost:
                raise CannotMove(f"hot spare {lost[0]}, which was to take a rank, is lost")
            migration = run.generations.migration
            if migration is not None and migration.refused:
                (kind, number), why = next(iter(migration.refused.items()))
                raise CannotMove(f"{kind} {number} cannot prepare it: {why}")
            if time.monotonic() > self.end:
                raise CannotMove(f"it took longer than {run.spec.timeouts.recovery.migrate.total_seconds():.0f} s: {why_not()}")
            run.pump(TICK)


class GrowLive(LiveChange):
    """One growth of the job, back to its full width or part of the way."""

    def carry_out(self) -> str:
        """Bring up the nodes and have the missing ranks join; return what was done."""
        run = self.run
        places = run.scale_up.places()
        if not places:
            raise CannotMove("there is no room any more for the missing ranks")
        missing = sorted(set(places.values()) - set(run.agents.alive()))
        self.check_failures(run.nodes.bring_up(missing))
        seats = self.change(places, frozenset(), reason=f"there was room for {named_ranks(places)} again")
        where = "; ".join(f"rank {seat.rank} came to {seat.node}" for seat in seats)
        return f"{where}: {len(run.generations.state.ranks)} of {run.generations.rank_table.width} ranks share each step's samples"


class RankMove(LiveChange):
    """One requested migration."""

    def __init__(self, run: JobController, request: MigrationRequest) -> None:
        super().__init__(run)
        self.request = request

    def carry_out(self) -> str:
        """Migrate the ranks; return what was done."""
        run, generations, request = self.run, self.run.generations, self.request
        self.wait(
            lambda: bool(generations.roles) and generations.state.all_stepped() and generations.state.grouped(),
            lambda: generations.why_not_kept() or "the job has not reported its roles",
        )
        leavers, source = self._leavers()
        target = self._target(source, len(leavers))
        self.change(dict.fromkeys(leavers, target), leavers, reason=request.describe(), source=source)
        if request.kind:  # requested by a detector: the node slowed the others down
            severe, reason = source not in generations.members, f"{request.kind}: {request.quote}"
            fault = NodeFault(node=source, severe=severe, reason=reason, evidence=(reason,), seen=time.time())
            run.nodes.eligibility.record_faults([fault])
        ranks = named_ranks(leavers)
        if request.rank is None and source not in generations.members:
            run.log.record_node_status(source, "excluded", f"{ranks} {'was' if len(leavers) == 1 else 'were'} moved to {target}")
            run.agents.drop_async(source)
        return f"{ranks} moved from {source} to {target}"

    def _leavers(self) -> tuple[frozenset[int], str]:
        """Return the ranks that leave, and their node."""
        membership, request = self.run.generations.state.membership, self.request
        held = ", ".join(f"{node} ({', '.join(map(str, ranks))})" for node, ranks in membership.items())
        if request.rank is not None:
            node = next((node for node, ranks in membership.items() if request.rank in ranks), None)
            if node is None:
                raise CannotMove(f"there is no rank {request.rank}; the job runs on {held}")
            leavers = frozenset({request.rank})
        else:
            node = request.source or ""
            if node not in membership:
                raise CannotMove(f"{node} holds no rank of this job; it runs on {held}")
            leavers = frozenset(membership[node])
        if len(leavers) == len(self.run.generations.state.ranks):
            raise CannotMove("all ranks would move at once; at least one has to stay and transfer its state")
        return leavers, node

    def _target(self, source: str, count: int) -> str:
        """Return the node to move to: the requested one, else one with hot spares or room, else any free one."""
        agents, nodes, wanted = self.run.agents, self.run.nodes, self.request.target
        if wanted == source:
            raise CannotMove(f"the ranks are on {source} already")
        if wanted and (why := nodes.eligibility.why_ineligible(wanted)):
            raise CannotMove(f"{wanted} is {why}")
        free = [] if wanted else [node for node in nodes.free() if node not in agents.alive()]
        rejected = []
        for node in [wanted] if wanted else [*self._with_agent(source, count), *free]:
            if node in agents.alive():
                return node
            if node not in agents.source.names():
                raise CannotMove(f"cluster {self.run.cluster.name} has no node {node}")
            answer = nodes.bring_up([node])[node]
            if not isinstance(answer, WorldError):
                return node
            rejected.append(f"{node}: {answer}")
        rejected += nodes.eligibility.left_out()
        raise CannotMove("there is no other node to move to" + (f" ({'; '.join(rejected)})" if rejected else ""))

    def _with_agent(self, source: str, count: int) -> list[str]:
        """Return the nodes with an agent that can take *count* more ranks: most hot spares first, then most room."""
        room = self.run.nodes.room()
        waiting = Counter(one.node for one in self.run.nodes.hot_spares.ready(self.run.generations.rank_table.width))
        able = [node for node in room if node != source and max(room[node], waiting[node]) >= count]
        return sorted(able, key=lambda node: (-min(waiting[node], count), -room[node]))
