"""Grow while training runs: let processes take the places that the job goes on without, between two steps."""

from __future__ import annotations

import time

from holdfast.control.migration.planned import CannotMove, Interrupted, MigrationPlan
from holdfast.control.supervisor.controller import JobController
from holdfast.errors import WorldError
from holdfast.report.wording import ranks as in_ranges
from policies.states import Event, Transition


def grow_live(run: JobController) -> Transition:
    """Have missing ranks come back; whatever keeps them from it leaves training as it is, and is tried again later."""
    begin = time.monotonic()
    try:
        words = GrowLive(run).carry_out()
    except (CannotMove, WorldError) as error:
        run.scale_up.failed()
        return Transition(Event.MOVE_FAILED, str(error))
    except Interrupted as error:
        run.scale_up.failed()
        return error.turn
    run.scale_up.succeeded()
    return Transition(Event.MOVED, f"{words} in {time.monotonic() - begin:.1f} s, while training went on")


class GrowLive(MigrationPlan):
    """One growth of the job, back to its full width or a part of the way."""

    def carry_out(self) -> str:
        """Bring up the nodes, prepare, change over, put it on record; return what was done, in words."""
        run, told = self.run, False
        try:
            places = self._places()
            seats = self.seats(places)
            rank_table = self.plan(seats, frozenset())
            told = True
            self.prepare(rank_table, seats)
            self.switch()
        except BaseException:
            self.give_up(told=told)
            raise
        where = "; ".join(f"rank {seat.rank} came to {seat.node}" for seat in seats)
        self.record(seats, rank_table, reason=f"there was room for rank(s) {in_ranges(places)} again")
        return f"{where}: {len(run.generations.state.ranks)} of {run.generations.rank_table.width} ranks share each step's samples"

    def _places(self) -> dict[int, str]:
        """Return where the missing ranks go on: on nodes that have an agent."""
        run = self.run
        places = run.scale_up.places()
        if not places:
            raise CannotMove("there is no room any more for the ranks that are missing")
        missing = sorted(set(places.values()) - set(run.agents.alive()))
        self.all_did(run.agents.each(missing, run.agents.bring_up))
        for node in missing:
            run.log.record_node_status(node, "healthy", "its agent is up")
        return places
