"""Ranks without progress: query their status so that a hang can be attributed, and report pauses from which a job continues by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.detectors.evidence import GroupProgress, HangLimits, LaunchedOperations, PendingOperation, Progress, RankStatus
from holdfast.detectors.training.progress import Pause, describe_pause, hang_limit, pause_in
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.control.agents.pool import AgentPool
    from holdfast.control.state.generation import GenerationState

FIRST: Final = 0.5
"""Share of the hang limit after which the ranks of a quiet job are queried for the first time."""
AGAIN: Final = 0.1
"""Share of the limit, or of the time that the job has been quiet, after which they are queried again: changes show progress."""
MIN_INTERVAL: Final = 0.4
"""Seconds between two queries, at least."""
LONGER: Final = 1.5
"""A pause is reported once it is this many times as long as the longest before: an evaluation every hundred steps is reported once."""


class RankStatusQuery:
    """Queries the ranks of a job that may hang for their status."""

    def __init__(self, agents: AgentPool) -> None:
        self._agents = agents

    def poll(self, state: GenerationState, seen: Progress, limits: HangLimits) -> None:
        """Query when it is time, without waiting."""
        if not seen.steps_expected or not seen.ranks:
            return
        limit = hang_limit(seen.step_seconds, limits) if seen.step_seconds else limits.startup
        quiet = min(rank.age for rank in seen.ranks.values())
        if quiet < FIRST * limit or seen.at - state.asked_at < max(MIN_INTERVAL, AGAIN * max(limit, quiet)):
            return
        state.asked_at = seen.at
        self.ask(state, {rank.node for rank in seen.ranks.values()}, {"do": "roll-call"})

    def ask(self, state: GenerationState, nodes: Iterable[str], query: Message, *, ranks: list[int] | None = None) -> None:
        """Send a query to the ranks on *nodes*; the answers are events."""
        facts = {"generation": state.generation, "query": query, "ranks": ranks}
        self._agents.send_commands_async(dict.fromkeys(set(nodes) & set(self._agents.alive()), facts), "query")


class Pauses:
    """Reports a job's longest pauses between two steps; what one pause took, a later one may take without being a hang."""

    def __init__(self, report: Callable[[str], None], record: Callable[[Pause | None], None]) -> None:
        """Start with no pause seen; *report* gets the message for people, *record* the present pause, or None once it is over."""
        self._report, self._record = report, record
        self._recorded: Pause | None = None
        self._generation = -1
        self._present = self._longest = 0.0
        self._reported = False

    def poll(self, state: GenerationState, seen: Progress, limits: HangLimits) -> None:
        """Follow the progress of the ranks of *state*; a pause that a recovery ended says nothing about the job."""
        if state.generation != self._generation:
            self._generation, self._present, self._reported, self._recorded = state.generation, 0.0, False, None
        pause = pause_in(seen, limits)
        if pause < self._present:
            state.longest_pause = self._longest = max(self._longest, self._present)
            self._reported = False
        self._present = pause
        if not pause:
            self._keep(None)
            return
        found = describe_pause(seen, limits)
        if self._recorded is None or (found.cause and found.rank != self._recorded.rank):  # the ranks' answers come later than the pause
            self._keep(found)
        if not self._reported and pause > LONGER * self._longest:
            self._reported = True
            self._report(found.text)

    def _keep(self, pause: Pause | None) -> None:
        """Record the pause, every one: those who watch the job have to see it, also one that is too short to be reported again."""
        if pause is not self._recorded:
            self._recorded = pause
            self._record(pause)


def parse_rank_status(answer: Mapping[str, Any]) -> RankStatus | None:
    """Return the status in a rank's answer; None where it is invalid."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return RankStatus(
            waits=str(answer.get("waits") or ""),
            seconds=float(answer.get("seconds") or 0.0),
            groups=tuple(_group(one) for one in answer.get("groups") or ()),
            launched=tuple(_launched(one) for one in answer.get("launched") or ()),
            place=str(answer.get("place") or "")[:200],
            stack=tuple(str(line)[:200] for line in answer.get("stack") or ()),
        )
    return None


def _launched(counts: Mapping[str, Any]) -> LaunchedOperations:
    return LaunchedOperations(
        name=str(counts["name"])[:40],
        ranks=int(counts["ranks"]),
        most=int(counts["most"]),
        behind={int(rank): int(number) for rank, number in counts["behind"].items()},
    )


def _group(group: Mapping[str, Any]) -> GroupProgress:
    return GroupProgress(
        name=str(group["name"]),
        ranks=_ranks(group["ranks"]),
        counts={str(way): int(number) for way, number in group["counts"].items()},
        pending=tuple(
            PendingOperation(
                way=str(one["way"]),
                number=int(one["number"]),
                name=str(one["name"]),
                size=int(one["size"]),
                kind=str(one["kind"]),
                seconds=float(one["seconds"]),
            )
            for one in group["pending"]
        ),
    )


def _ranks(ranks: Any) -> tuple[int, ...]:  # noqa: ANN401 (an object or a list)
    if isinstance(ranks, dict):
        first, stride, count = int(ranks["first"]), int(ranks["stride"]), int(ranks["count"])
        return tuple(range(first, first + stride * count, stride))
    return tuple(int(rank) for rank in ranks)
