"""Step time of a pipeline, computed from the cost of its single operations: torch's 1F1B schedule over gloo, stage by stage.

The schedule's own order is followed: which sends and receives it issues together, and where it waits for them. A message is there *hop*
seconds after both its ends have asked for it, as gloo has it: a send ends no sooner than its receive was posted. Processors are not
modelled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

Message = tuple[str, int, int]
"""What (``"act"`` or ``"grad"``), of which micro-batch, between a stage and the next one: the lower number."""
Wait = tuple[list[Message], float]
"""Messages that a stage waits for, and since when (its own time)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of the single operations, as often as they were measured: each one of a step is drawn from these."""

    forward: Sequence[float]
    backward: Sequence[float]
    hop: Sequence[float] = (0.0,)
    """From the latest post on either side of what is waited for to the end of the wait."""
    step: Sequence[float] = (0.0,)
    """Of what a step has once: optimizer, vote, the loop around it."""


class _Stage:
    """One stage's way through a step: it computes, posts messages, and waits."""

    def __init__(self, number: int, stages: int, micro: int, costs: Costs, draw: Random) -> None:
        self._number, self._stages, self._micro, self._costs, self._draw = number, stages, micro, costs, draw
        self.posted: dict[Message, list[float]] = {}
        """When either end of a message was posted; all stages share it."""
        self.now = 0.0

    def post(self, what: str, batch: int, *, lower: bool) -> list[Message]:
        """Post this stage's end of a message to or from the stage before (*lower*) or behind it; nothing where there is no such stage."""
        edge = self._number - 1 if lower else self._number
        if not 0 <= edge < self._stages - 1:
            return []
        message = (what, batch, edge)
        self.posted.setdefault(message, []).append(self.now)
        return [message]

    def wait(self, messages: Iterable[Message]) -> Generator[list[Message]]:
        """Wait for all of *messages*."""
        waited = list(messages)
        if not waited:
            return
        while any(len(self.posted[one]) < 2 for one in waited):  # noqa: PLR2004 (both ends)
            yield waited
        self.now = max(self.now, max(at for one in waited for at in self.posted[one]) + self._draw.choice(self._costs.hop))

    def run(self) -> Generator[list[Message]]:
        """Go through one step, as `Schedule1F1B` does."""
        warm = min(self._micro, self._stages - self._number)
        sent: list[Message] = []
        for batch in range(warm):
            yield from self.wait(self.post("act", batch, lower=True))
            self.now += self._draw.choice(self._costs.forward)
            yield from self.wait(sent)
            sent = self.post("act", batch, lower=False) if batch < warm - 1 else []
        ahead, back = warm, 0
        while True:
            yield from self.wait(self.post("act", ahead - 1, lower=False) + self.post("grad", back, lower=False))
            self.now += self._draw.choice(self._costs.backward)
            back += 1
            if ahead == self._micro:
                break
            yield from self.wait(self.post("grad", back - 1, lower=True) + self.post("act", ahead, lower=True))
            self.now += self._draw.choice(self._costs.forward)
            ahead += 1
        sent = self.post("grad", back - 1, lower=True)
        for batch in range(back, self._micro):
            yield from self.wait(self.post("grad", batch, lower=False))
            self.now += self._draw.choice(self._costs.backward)
            yield from self.wait(sent)
            sent = self.post("grad", batch, lower=True)
        yield from self.wait(sent)


def step_seconds(stages: int, micro: int, costs: Costs, *, draws: int = 40) -> float:
    """Return how long a step of *micro* micro-batches takes in a pipeline of *stages* stages: the median of some that were drawn."""
    draw = Random(11)  # noqa: S311 (no secret)
    return median(_one_step(stages, micro, costs, draw) for _ in range(draws))


def _one_step(stages: int, micro: int, costs: Costs, draw: Random) -> float:
    ways = [_Stage(number, stages, micro, costs, draw) for number in range(stages)]
    for way in ways:
        way.posted = ways[0].posted
    running = [way.run() for way in ways]
    while running:
        running = [run for run in running if next(run, None) is not None]  # each goes on as far as it can
    return max(way.now for way in ways) + draw.choice(costs.step)


# -- costs, from a traced run of two stages -----------------------------------------------------------------------------

Event = tuple[str, float, float, int, int]
"""See `benchmarks.train_stages.Trace`."""


def costs_of(reports: Sequence[dict[str, Any]]) -> Costs:
    """Return what the operations of a run of two stages have cost; what is computed includes what torch does around it."""
    steps = [_steps(rank["trace"]) for rank in reports]
    both = list(zip(*steps, strict=True))
    return Costs(
        forward=[one for rank in steps for events in rank for one in _computed(events, "forward")],
        backward=[one for rank in steps for events in rank for one in _computed(events, "backward")],
        hop=[hop for pair in both for hop in _hops(pair)],
        step=[max(0.0, later[0][-1][1] - max(events[-1][2] for events in sooner)) for sooner, later in pairwise(both)],
    )


def _steps(trace: Sequence[Event]) -> list[list[Event]]:
    """Return the events of each step, the step itself as the last one."""
    found: list[list[Event]] = [[]]
    for event in trace:
        found[-1].append(event)
        if event[0] == "step":
            found.append([])
    return found[:-1]


def _computed(events: Sequence[Event], what: str) -> list[float]:
    """Return the seconds of each *what*, with its share of all that is neither computing nor waiting, such as posting messages."""
    spent = {name: [end - begin for kind, begin, end, *_ in events if kind == name] for name in ("forward", "backward", "wait", "step")}
    around = sum(spent["step"]) - sum(spent["wait"]) - sum(spent["forward"]) - sum(spent["backward"])
    return [one + around / (len(spent["forward"]) + len(spent["backward"])) for one in spent[what]]


def _hops(pair: Sequence[Sequence[Event]]) -> list[float]:
    """Return for each wait of a step how long it lasted after all that it waits for had been posted by both sides."""
    posts = [[event for event in events if event[0] == "post"] for events in pair]
    # The n-th send of one side is the n-th receive of the other.
    sends = [[end for _, _, end, count, _ in side for _ in range(count)] for side in posts]
    receives = [[end for _, _, end, _, count in side for _ in range(count)] for side in posts]
    found = []
    for rank, events in enumerate(pair):
        sent = received = 0
        for event, after in pairwise(events):
            if event[0] != "post":
                continue
            _, _, end, out, into = event
            ready = [end, *receives[1 - rank][sent : sent + out], *sends[1 - rank][received : received + into]]
            sent, received = sent + out, received + into
            if after[0] == "wait" and into:
                found.append(max(0.0, after[2] - max(ready)))
    return found
