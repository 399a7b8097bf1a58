"""Migrate: let ranks go on elsewhere while training runs, or come back where they were missing."""

from __future__ import annotations

import time

from holdfast.control.supervisor.controller import JobController
from holdfast.errors import WorldError
from policies.states import Event
from tasks import titles
from tasks.move import RankMove
from tasks.planned import CannotMove, Interrupted
from tasks.regrow import regrow
from tasks.turn import Transition, step
from tasks.widen import widen


@step("migrate", titles.migrate)
def migrate(run: JobController) -> Transition:
    """Carry out the oldest move that was asked for, or have missing ranks come; what keeps it from being done leaves training as it is."""
    if not run.requests.moves:
        return regrow(run) if run.growth.by_restart else widen(run)
    asked, begin = run.requests.moves[0], time.monotonic()
    try:
        move = RankMove(run, asked)
        words = move.carry_out()
    except (CannotMove, WorldError) as error:  # an agent that is gone, or refused: if that is a fault, the next look at the job finds it
        run.slow_ranks.remember([run.requests.answer(asked, str(error), done=False)])
        return Transition(Event.MOVE_FAILED, str(error))
    except Interrupted as error:
        run.slow_ranks.remember([run.requests.answer(asked, f"something came in between: {error}", done=False)])
        return error.turn
    words = f"{words} in {time.monotonic() - begin:.1f} s, while training went on"
    run.slow_ranks.remember([run.requests.answer(asked, words, done=True, pause=move.pause)])
    return Transition(Event.MOVED, words)
