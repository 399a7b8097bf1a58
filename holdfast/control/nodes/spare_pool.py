"""Nodes in place of spare ones that were used, lost or taken out: so that the next fault is answered as fast as the one before.

They are looked for beside training, so a look that takes long, or a node that does not come up, holds up nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.errors import HoldfastError, WorldError
from holdfast.log import note
from holdfast.report.wording import plural, some

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController

log = logging.getLogger("holdfast.control")

PAUSE: Final = 10.0
"""Seconds between the first two tries to find a node; twice as long after each further one, as it may be the same node that fails."""
LONGEST_PAUSE: Final = 160.0
CALM: Final = 60.0
"""Seconds with all spare nodes there after which the tries are counted anew."""


class SparePool:
    """Keeps as many nodes with an agent as the job wants, spare ones included."""

    def __init__(self, run: JobController) -> None:
        self._run = run
        self._next = 0.0
        """When to look again (monotonic)."""
        self._pause = PAUSE
        self._full = 0.0
        """Since when none is missing (monotonic)."""
        self._told = True
        """It is known that some are missing and none can be had: who launches tells of it."""
        self._kept_out: frozenset[str] = frozenset()
        """Nodes that were out of service, or given up and out of reach, when this was looked at last."""
        self._thread: threading.Thread | None = None
        self._over = False
        """No further node is to be begun with."""

    def look(self, now: float) -> None:
        """Look for what is missing when it is time to, and wait for nothing. *now*: monotonic seconds."""
        if not self._missing():
            self._told, self._full = False, self._full or now
            if now - self._full >= CALM:
                self._pause = PAUSE
            return
        self._full = 0.0
        kept_out = frozenset({*self._run.eligibility.isolated(), *self._run.fleet.owed})
        if self._kept_out - kept_out:  # somebody took a node back, or it answers again
            self._next, self._pause = 0.0, PAUSE
        self._kept_out = kept_out
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next, self._pause = now + self._pause, min(LONGEST_PAUSE, 2 * self._pause)
            self._thread = threading.Thread(target=self._fill, name="refill", daemon=True)
            self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Begin with no further node, and wait so long at most for one that is being brought up: the job's end or its heir finds it."""
        self._over = True
        if self._thread is not None:
            self._thread.join(seconds)

    def _missing(self) -> int:
        nodes, fleet = self._run.spec.nodes, self._run.fleet
        return max(0, nodes.wanted + nodes.spare - len(set(fleet.alive()) | set(self._run.members)))

    def _fill(self) -> None:
        run, failed, came = self._run, dict[str, str](), list[str]()
        try:
            candidates = run.preflight.by_worth(self._candidates())
            with suppress(RuntimeError):  # the flow ends, and its hands with it
                while not self._over and (batch := candidates[: self._missing()]):
                    candidates = candidates[len(batch) :]
                    run.preflight.begin(batch)
                    answers = run.fleet.each(batch, run.fleet.bring_up)
                    failed |= {node: str(answer) for node, answer in answers.items() if isinstance(answer, WorldError)}
                    came += [node for node in batch if node not in failed]
                    run.preflight.finish()
                self._tell(came, failed)
        except (HoldfastError, OSError) as error:
            note(log, "refill.blind", why=error)

    def _candidates(self) -> list[str]:
        run = self._run
        lent = run.borrowed_nodes.usable()
        if lent is None:
            return run.free()
        alive = set(run.fleet.channels) | set(run.members)
        return [node for node in run.eligibility.usable(lent) if node not in alive]

    def _tell(self, came: Sequence[str], failed: Mapping[str, str]) -> None:
        """Record which nodes came up, and say what is missing still."""
        run, short = self._run, self._missing()
        for node in came:
            sound = run.preflight.is_sound(node)
            run.stand(node, "healthy" if sound else "suspect", "its agent is up" if sound else run.preflight.against(node))
        if came:
            run.remark(f"{some(came)} taken in to be spare" + (f", {plural(short, 'node')} still missing" if short else ""))
        elif not self._told and not run.borrowed_nodes.is_lent:
            self._told = True
            why = f" ({'; '.join(f'{node}: {words}' for node, words in failed.items())})" if failed else ""
            run.remark(
                f"{plural(short, 'spare node')} missing and nothing free in {run.cluster.name} to fill up with{why}; looked for again"
            )
