"""A planned move: processes come, and others leave or none does, while training runs; all change over between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from detectors.evidence import ReplaceRanksFailure
from holdfast.control.agents.pool import failures
from holdfast.control.config.worker_env import membership_by_node
from holdfast.control.recovery.in_process import facts_of, store_without, worker_of
from holdfast.control.state.migration import MigrationState
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor.controller import TICK, JobController
from holdfast.control.supervisor.watch import poll
from policies.escalation import Placement
from policies.placement import Membership, membership_after
from policies.states import Event, Transition


class CannotMove(Exception):
    """A move that comes to nothing; training goes on as it was."""


class Interrupted(Exception):
    """Something came in between that the flow has to turn for."""

    def __init__(self, turn: Transition) -> None:
        super().__init__(turn.reason)
        self.turn = turn


class MigrationPlan:
    """One planned change of who holds which ranks."""

    def __init__(self, run: JobController) -> None:
        self.run = run
        self.until = time.monotonic() + run.spec.deadlines.migrate.total_seconds()
        self.joiners: list[int] = []
        self.pause = 0.0
        """Seconds for which training was held up."""

    def why_not_yet(self) -> str:
        """Say why nothing can be changed while training runs."""
        return self.run.generations.why_not_kept() or "the job has not told of its roles"

    # -- plan ---------------------------------------------------------------------------------------------------------

    def seats(self, places: Mapping[int, str]) -> tuple[Placement, ...]:
        """Have a standby for each rank of *places*, on its node there, warmed up and parked."""
        run, world = self.run, self.run.generations.rank_table.width
        role_of = {rank: number for number, ranks in enumerate(run.generations.roles) for rank in ranks}
        ready = list(run.nodes.hot_spares.ready(world))
        taken, missing = dict[int, int](), dict[str, list[int]]()
        for rank, node in sorted(places.items()):
            fit = next((one for one in ready if one.node == node and one.role == role_of.get(rank, 0)), None)
            if fit is None:
                missing.setdefault(node, []).append(rank)
                continue
            ready.remove(fit)
            taken[rank] = fit.id
        for node, ranks in missing.items():
            taken |= dict(
                zip(
                    ranks,
                    run.nodes.hot_spares.start(node, [role_of.get(rank, 0) for rank in ranks], run.nodes.hot_spare_spec()),
                    strict=True,
                )
            )
        self.joiners = list(taken.values())
        self.wait(
            lambda: run.nodes.hot_spares.are_ready(self.joiners),
            lambda: f"the standbys on {', '.join(set(places.values()))} have not parked",
        )
        return tuple(Placement(rank=rank, node=places[rank], standby=number) for rank, number in sorted(taken.items()))

    def plan(self, seats: tuple[Placement, ...], leavers: frozenset[int]) -> RankTable:
        """Agree on the coming generation."""
        run = self.run
        membership = membership_after(run.generations.state.membership, seats)
        store, serve = store_without(run, leavers, membership)
        run.generations.newest += 1  # whatever comes of this, no other generation has this number
        joiners = {seat.rank: seat.standby for seat in seats if seat.standby is not None}
        run.generations.migration = MigrationState(
            generation=run.generations.newest,
            leavers=leavers,
            joiners=joiners,
            ranks=frozenset(run.generations.state.ranks),
            membership=membership,
        )
        rank_table = run.generations.rank_table.after(run.generations.newest, membership, frozenset(joiners))
        return replace(rank_table, store=store, serve=serve, since=run.generations.number)

    # -- prepare and change over --------------------------------------------------------------------------------------

    @property
    def _moving(self) -> MigrationState:
        assert self.run.generations.migration is not None
        return self.run.generations.migration

    def prepare(self, rank_table: RankTable, seats: tuple[Placement, ...]) -> None:
        """Have everybody build what the coming generation needs, beside training; wait until all have."""
        run, moving = self.run, self._moving
        shared = {
            "do": "prepare",
            "generation": moving.generation,
            **facts_of(run, rank_table),
            "leavers": sorted(moving.leavers),
            "joiners": {str(seat.rank): {"node": seat.node, "standby": seat.standby} for seat in seats},
        }

        nodes = {*run.generations.members, *(seat.node for seat in seats)}
        memory = run.checkpoints.replicas.servers(moving.membership, nodes)

        def tell(node: str) -> None:
            told = {**shared, "memory": memory[node]}
            for rank in run.generations.state.membership.get(node, ()):
                run.agents.client(node).send_command("tell", ranks=[rank], standbys=[], message={**told, "rank": rank})
            for seat in (seat for seat in seats if seat.node == node):
                environment = run.generations.seat_environment(seat.rank, seat.node, number=moving.generation, rank_table=rank_table)
                own = {"rank": seat.rank, "environment": environment, "log": f"{run.agents.logs(node)}/rank-{seat.rank}.log"}
                run.agents.client(node).send_command("tell", ranks=[], standbys=[seat.standby], message={**told, **own})

        self.all_did(run.agents.each(nodes, tell))
        self.wait(lambda: moving.is_prepared, lambda: f"{moving.missing(moving.prepared)} did not get ready")

    def switch(self) -> None:
        """Have everybody change over at the next step that all of them vote for; wait until they have."""
        run, moving = self.run, self._moving
        self.all_did(self._tell_all({"do": "switch", "generation": moving.generation}))
        try:
            self.wait(lambda: moving.is_done, lambda: "the ranks did not agree on a step to change over")
        except CannotMove as error:
            if not (moving.switched or moving.left):
                raise
            run.generations.state.evidence.append(
                ReplaceRanksFailure(node=run.generations.members[0], at=time.time(), why=f"a planned move stopped halfway: {error}")
            )
            raise Interrupted(Transition(Event.FAULTED, f"a planned move stopped halfway: {error}")) from error

    def _tell_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """Tell something to all ranks that live, and to those that are to come."""
        run, at = self.run, {number: one.node for number, one in self.run.nodes.hot_spares.standbys.items() if number in self.joiners}
        living = {
            node: [rank for rank in ranks if not run.generations.state.ranks[rank].ended]
            for node, ranks in run.generations.state.membership.items()
        }
        coming = {node: [number for number, where in at.items() if where == node] for node in {*run.generations.members, *at.values()}}
        return run.agents.send_commands(
            {node: {"ranks": living.get(node, []), "standbys": standbys, "message": message} for node, standbys in coming.items()}, "tell"
        )

    def give_up(self, *, told: bool) -> None:
        """Have everybody forget what was prepared. A standby that got ready for a rank is good for no other."""
        if told:
            self._tell_all({"do": "forget", "generation": self._moving.generation})
        self.run.nodes.hot_spares.drop(self.joiners)
        self.run.generations.migration = None

    def record(self, seats: tuple[Placement, ...], rank_table: RankTable, *, reason: str, source: str | None = None) -> None:
        """Put on record what the ranks have done: in the history, and at every agent."""
        run, moving = self.run, self._moving
        by_rank, run.generations.migration, self.pause = {seat.rank: seat for seat in seats}, None, moving.pause
        run.generations.enter(moving.generation, moving.membership, rank_table=rank_table, reason=reason)
        nodes: Membership = {**({source: []} if source is not None else {}), **moving.membership}
        told = membership_by_node(moving.membership)
        keeper = told[next(iter(moving.membership))]
        workers = {node: [worker_of(run, node, rank, by_rank.get(rank)) for rank in ranks] for node, ranks in nodes.items()}
        answers = run.agents.send_commands(
            {node: {"generation": run.generations.number, **told.get(node, keeper), "workers": workers[node]} for node in nodes}, "switch"
        )
        run.nodes.hot_spares.take(self.joiners)
        run.generations.sent_to |= dict.fromkeys(answers.keys() - failures(answers).keys(), run.generations.number)
        wrong = {node: error for node, error in failures(answers).items() if node in moving.membership}
        if wrong:
            now, why = time.time(), "; ".join(str(error) for error in wrong.values())
            run.generations.state.evidence.extend(ReplaceRanksFailure(node=node, at=now, why=str(error)) for node, error in wrong.items())
            raise Interrupted(Transition(Event.FAULTED, why))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def all_did(self, answers: dict[str, Any]) -> None:
        """Go no further unless every node did as it was told."""
        wrong = failures(answers)
        if wrong:
            raise CannotMove("; ".join(str(error) for error in wrong.values()))

    def wait(self, done: Callable[[], bool], why_not: Callable[[], str]) -> None:
        """Wait while training goes on; whatever asks for an answer of its own ends the move."""
        run = self.run
        while not done():
            turn = poll(run)
            if turn is not None:
                raise Interrupted(turn)
            run.nodes.hot_spares.settle()
            lost = run.nodes.hot_spares.lost(self.joiners)
            if lost:
                raise CannotMove(f"standby {lost[0]}, which was to take a rank over, is lost")
            if run.generations.migration is not None and run.generations.migration.refused:
                (kind, number), why = next(iter(run.generations.migration.refused.items()))
                raise CannotMove(f"{kind} {number} cannot prepare it: {why}")
            if time.monotonic() > self.until:
                raise CannotMove(f"it took longer than {run.spec.deadlines.migrate.total_seconds():.0f} s: {why_not()}")
            run.pump(TICK)
