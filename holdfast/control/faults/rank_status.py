"""Calling the roll: when a job has been quiet for a while, ask its ranks where they stand, so that a hang can be told with its culprit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from detectors.evidence import GroupProgress, HangLimits, PendingOperation, Progress, RankStatus
from detectors.progress import hang_limit
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.control.agents.pool import AgentPool
    from holdfast.control.state.generation import GenerationState

EARLY: Final = 0.5
"""Share of the limit after which a quiet job is asked for the first time."""
AGAIN: Final = 0.1
"""Share of the limit, or of the time that it has been quiet, after which it is asked again: what has changed shows progress."""
SOONEST: Final = 0.4
"""Seconds that lie between two calls at least."""


class RankStatusQuery:
    """Asks the ranks of a job that may hang where they stand."""

    def __init__(self, fleet: AgentPool) -> None:
        self._fleet = fleet

    def poll(self, board: GenerationState, seen: Progress, limits: HangLimits) -> None:
        """Ask when it is time; wait for nothing."""
        if not seen.steps_expected or not seen.ranks or any(held.section for held in seen.ranks.values()):
            return
        limit = hang_limit(seen.step_seconds, limits) if seen.step_seconds else limits.first_step
        quiet = min(held.age for held in seen.ranks.values())
        if quiet < EARLY * limit or seen.at - board.asked_at < max(SOONEST, AGAIN * max(limit, quiet)):
            return
        board.asked_at = seen.at
        self.ask(board, {held.node for held in seen.ranks.values()}, {"do": "roll-call"})

    def ask(self, board: GenerationState, nodes: Iterable[str], question: Message, *, ranks: list[int] | None = None) -> None:
        """Put a question to the ranks on *nodes*; the answers are events."""
        order = {"generation": board.generation, "question": question, "ranks": ranks}
        self._fleet.send_commands_async(dict.fromkeys(set(nodes) & set(self._fleet.alive()), order), "ask")


def parse_rank_status(said: Mapping[str, Any]) -> RankStatus | None:
    """Return where a rank says that it stands; None where that cannot be understood."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return RankStatus(
            waits=str(said.get("waits") or ""),
            seconds=float(said.get("seconds") or 0.0),
            groups=tuple(_group(one) for one in said.get("groups") or ()),
            place=str(said.get("place") or "")[:200],
            stack=tuple(str(line)[:200] for line in said.get("stack") or ()),
        )
    return None


def _group(told: Mapping[str, Any]) -> GroupProgress:
    return GroupProgress(
        name=str(told["name"]),
        ranks=_ranks(told["ranks"]),
        counts={str(way): int(number) for way, number in told["counts"].items()},
        pending=tuple(
            PendingOperation(
                way=str(one["way"]),
                number=int(one["number"]),
                name=str(one["name"]),
                size=int(one["size"]),
                kind=str(one["kind"]),
                seconds=float(one["seconds"]),
            )
            for one in told["pending"]
        ),
    )


def _ranks(told: Any) -> tuple[int, ...]:  # noqa: ANN401 (an object or a list)
    if isinstance(told, dict):
        first, pace, count = int(told["first"]), int(told["pace"]), int(told["count"])
        return tuple(range(first, first + pace * count, pace))
    return tuple(int(rank) for rank in told)
