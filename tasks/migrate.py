"""Migrate: let ranks go on elsewhere while training runs, and change over between two steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from detectors.evidence import TakeOverTrouble
from holdfast.control import runs
from holdfast.control.fleet import failures
from holdfast.control.lineup import Lineup
from holdfast.control.move import MoveInWork
from holdfast.control.plan import log_directory
from holdfast.control.requests import MoveAsked
from holdfast.control.run import TICK, Run
from holdfast.errors import WorldError
from policies.ladder import Seat
from policies.placement import membership_after
from policies.states import Event
from tasks.monitor import look
from tasks.takeover import facts_of, store_without, worker_of
from tasks.turn import Turn


class CannotMove(Exception):
    """A move that comes to nothing; training goes on as it was."""


class Interrupted(Exception):
    """Something came in between that the flow has to turn for."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.because)
        self.turn = turn


@task(task_run_name="migrate {job}", cache_policy=NO_CACHE)
def migrate(job: str) -> Turn:
    """Carry out the oldest move that was asked for; whatever keeps it from being done leaves training as it is."""
    run = runs.of(job)
    asked, begin = run.requests.moves[0], time.monotonic()
    try:
        words = Move(run, asked).carry_out()
    except CannotMove as error:
        run.requests.answer(asked, str(error), done=False)
        return Turn(Event.MOVE_FAILED, str(error))
    except WorldError as error:  # an agent that is gone, or refused: if that is a fault, the next look at the job finds it
        run.requests.answer(asked, str(error), done=False)
        return Turn(Event.MOVE_FAILED, str(error))
    except Interrupted as error:
        run.requests.answer(asked, f"something came in between: {error}", done=False)
        return error.turn
    words = f"{words} in {time.monotonic() - begin:.1f} s, while training went on"
    run.requests.answer(asked, words, done=True)
    return Turn(Event.MOVED, words)


class Move:
    """One planned move."""

    def __init__(self, run: Run, asked: MoveAsked) -> None:
        self.run, self.asked = run, asked
        self.until = time.monotonic() + run.spec.deadlines.migrate.total_seconds()
        self.joiners: list[int] = []

    def carry_out(self) -> str:
        """Prepare, change over, put it on record; return what was done, in words."""
        run, told = self.run, False
        try:
            self._wait(lambda: bool(run.roles) and run.board.all_stepped() and run.board.grouped(), self._why_not_yet)
            leavers, source = self._leavers()
            target = self._target(source, len(leavers))
            seats = self._seats(leavers, target)
            lineup = self._plan(seats)
            told = True
            self._prepare(lineup, target)
            self._switch()
        except BaseException:
            self._give_up(told=told)
            raise
        self._record(seats, lineup, source)
        ranks = ", ".join(map(str, sorted(leavers)))
        if self.asked.rank is None and source not in run.members:
            run.stand(source, "excluded", f"rank(s) {ranks} were moved to {target}")
            run.fleet.drop_later(source)
        return f"rank(s) {ranks} moved from {source} to {target}"

    def _why_not_yet(self) -> str:
        return self.run.why_not_kept() or "the job has not told of its roles"

    # -- plan ---------------------------------------------------------------------------------------------------------

    def _leavers(self) -> tuple[frozenset[int], str]:
        """Return the ranks that are to move, and the node that holds them."""
        membership, asked = self.run.board.membership, self.asked
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
        if len(leavers) == len(self.run.board.ranks):
            raise CannotMove("all ranks would move at once; at least one has to stay, so that the others find it")
        return leavers, node

    def _target(self, source: str, count: int) -> str:
        """Return the node to move to: the one asked for, else one where standbys wait or that has room, else any free one."""
        fleet, wanted = self.run.fleet, self.asked.target
        if wanted == source:
            raise CannotMove(f"the ranks are on {source} already")
        candidates = [wanted] if wanted else [*self._alive(source, count), *(node for node in fleet.free() if node not in fleet.alive())]
        refused = []
        for node in candidates:
            if node in fleet.alive():
                return node
            if node not in fleet.source.names():
                raise CannotMove(f"cluster {self.run.cluster.name} has no node {node}")
            answer = fleet.each([node], fleet.bring_up)[node]
            if not isinstance(answer, WorldError):
                self.run.stand(node, "healthy", "its agent is up")
                return node
            refused.append(f"{node}: {answer}")
        raise CannotMove("there is no other node to move to" + (f" ({'; '.join(refused)})" if refused else ""))

    def _alive(self, source: str, count: int) -> list[str]:
        """Return the nodes with an agent that can take *count* more ranks: where standbys wait first, then where there is most room."""
        room, waiting = self.run.room(), Counter(one.node for one in self.run.pool.ready(len(self.run.board.ranks)))
        able = [node for node in room if node != source and max(room[node], waiting[node]) >= count]
        return sorted(able, key=lambda node: (-min(waiting[node], count), -room[node]))

    def _seats(self, leavers: frozenset[int], target: str) -> tuple[Seat, ...]:
        """Have a standby on *target* for each of the *leavers*, warmed up and parked."""
        run, world = self.run, len(self.run.board.ranks)
        role_of = {rank: number for number, ranks in enumerate(run.roles) for rank in ranks}
        ready = [one for one in run.pool.ready(world) if one.node == target]
        taken, missing = dict[int, int](), list[int]()
        for rank in sorted(leavers):
            fit = next((one for one in ready if one.role == role_of.get(rank, 0)), None)
            if fit is None:
                missing.append(rank)
                continue
            ready.remove(fit)
            taken[rank] = fit.id
        if missing:
            taken |= dict(zip(missing, run.pool.start(target, [role_of.get(rank, 0) for rank in missing], run.wanted()), strict=True))
        self.joiners = list(taken.values())
        self._wait(lambda: run.pool.are_ready(self.joiners), lambda: f"the standbys on {target} have not parked")
        return tuple(Seat(rank=rank, node=target, standby=number) for rank, number in sorted(taken.items()))

    def _plan(self, seats: tuple[Seat, ...]) -> Lineup:
        """Agree on the coming generation."""
        run, leavers = self.run, frozenset(seat.rank for seat in seats)
        membership = membership_after(run.board.membership, seats)
        store, serve = store_without(run, leavers, membership)
        run.newest += 1  # whatever comes of this, no other generation has this number
        joiners = {seat.rank: seat.standby for seat in seats if seat.standby is not None}
        run.moving = MoveInWork(
            generation=run.newest, leavers=leavers, joiners=joiners, ranks=frozenset(run.board.ranks), membership=membership
        )
        lineup = run.lineup.after(run.newest, membership, leavers)
        return replace(lineup, store=store, serve=serve, since=run.generation)

    # -- prepare and change over --------------------------------------------------------------------------------------

    @property
    def _moving(self) -> MoveInWork:
        assert self.run.moving is not None
        return self.run.moving

    def _prepare(self, lineup: Lineup, target: str) -> None:
        """Have everybody build what the coming generation needs, beside training; wait until all have."""
        run, moving = self.run, self._moving
        shared = {
            "do": "prepare",
            "generation": moving.generation,
            **facts_of(run, lineup),
            "leavers": sorted(moving.leavers),
            "joiners": {str(rank): {"node": target, "standby": number} for rank, number in moving.joiners.items()},
        }

        def tell(node: str) -> None:
            for rank in run.board.membership.get(node, ()):
                run.fleet.channel(node).order("tell", ranks=[rank], standbys=[], message={**shared, "rank": rank})
            for rank, number in moving.joiners.items() if node == target else ():
                environment = run.seat_environment(rank, moving.generation, lineup)
                own = {"rank": rank, "environment": environment, "log": str(log_directory(run.job.name) / f"rank-{rank}.log")}
                run.fleet.channel(node).order("tell", ranks=[], standbys=[number], message={**shared, **own})

        self._all_did(run.fleet.each({*run.members, target}, tell))
        self._wait(lambda: moving.is_prepared, lambda: f"{moving.missing(moving.prepared)} did not get ready")

    def _switch(self) -> None:
        """Have everybody change over at the next step that all of them vote for; wait until they have."""
        run, moving = self.run, self._moving
        self._all_did(self._tell_all({"do": "switch", "generation": moving.generation}))
        try:
            self._wait(lambda: moving.is_done, lambda: "the ranks did not agree on a step to change over")
        except CannotMove as error:
            if not (moving.switched or moving.left):
                raise
            run.board.evidence.append(TakeOverTrouble(node=run.members[0], at=time.time(), why=f"a planned move stopped halfway: {error}"))
            raise Interrupted(Turn(Event.FAULTED, f"a planned move stopped halfway: {error}")) from error

    def _tell_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """Tell something to all ranks that live, and to those that are to come."""
        run, at = self.run, {number: one.node for number, one in self.run.pool.standbys.items() if number in self.joiners}
        living = {node: [rank for rank in ranks if not run.board.ranks[rank].ended] for node, ranks in run.board.membership.items()}
        return run.fleet.each(
            {*run.members, *at.values()},
            lambda node: run.fleet.channel(node).order(
                "tell", ranks=living.get(node, []), standbys=[number for number, where in at.items() if where == node], message=message
            ),
        )

    def _give_up(self, *, told: bool) -> None:
        """Have everybody forget what was prepared. A standby that got ready for a rank is good for no other."""
        if told:
            self._tell_all({"do": "forget", "generation": self._moving.generation})
        self.run.pool.drop(self.joiners)
        self.run.moving = None

    def _record(self, seats: tuple[Seat, ...], lineup: Lineup, source: str) -> None:
        """Put on record what the ranks have done: in the history, and at every agent."""
        run, moving = self.run, self._moving
        by_rank, run.moving = {seat.rank: seat for seat in seats}, None
        run.enter_generation(moving.generation, moving.membership, lineup=lineup, because=self.asked.in_words())
        nodes = {source: [], **moving.membership}
        answers = run.fleet.each(
            nodes,
            lambda node: run.fleet.channel(node).order(
                "switch",
                generation=run.generation,
                membership=moving.membership,
                workers=[worker_of(run, rank, by_rank.get(rank)) for rank in nodes[node]],
            ),
        )
        run.pool.take(self.joiners)
        run.held |= dict.fromkeys(answers.keys() - failures(answers).keys(), run.generation)
        wrong = {node: error for node, error in failures(answers).items() if node in moving.membership}
        if wrong:
            now, why = time.time(), "; ".join(str(error) for error in wrong.values())
            run.board.evidence.extend(TakeOverTrouble(node=node, at=now, why=str(error)) for node, error in wrong.items())
            raise Interrupted(Turn(Event.FAULTED, why))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _all_did(self, answers: dict[str, Any]) -> None:
        wrong = failures(answers)
        if wrong:
            raise CannotMove("; ".join(str(error) for error in wrong.values()))

    def _wait(self, done: Callable[[], bool], why_not: Callable[[], str]) -> None:
        """Wait while training goes on; whatever asks for an answer of its own ends the move."""
        run = self.run
        while not done():
            turn = look(run)
            if turn is not None:
                raise Interrupted(turn)
            run.pool.settle()
            lost = run.pool.lost(self.joiners)
            if lost:
                raise CannotMove(f"standby {lost[0]}, which was to take a rank over, is lost")
            if run.moving is not None and run.moving.refused:
                (kind, number), why = next(iter(run.moving.refused.items()))
                raise CannotMove(f"{kind} {number} cannot prepare it: {why}")
            if time.monotonic() > self.until:
                raise CannotMove(f"it took longer than {run.spec.deadlines.migrate.total_seconds():.0f} s: {why_not()}")
            run.pump(TICK)
