"""The training that simulated agents report: all ranks of a generation step together, and stop as soon as one is lost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.simulated.agent import Agent


@dataclass(slots=True)
class Training:
    """One job's ranks, wherever their agents are."""

    step_seconds: float
    generation: int = 0
    world: int = 0
    step: int = 0
    """The newest step that all ranks have finished."""
    moved: float = field(default_factory=time.monotonic)
    """When that was."""
    seats: dict[int, Agent] = field(default_factory=dict)
    """Rank to the agent that has a worker for it."""
    reported_step: int = 0
    """The newest step that the lowest rank's agent has reported."""
    steps: bool = False
    """All ranks of the generation are there, and none was lost since."""
    broken: list[Agent] = field(default_factory=list)
    """Agents whose workers are about to say that their groups broke."""

    def arrive(self, agent: Agent, generation: int, ranks: list[int], world: int) -> None:
        """Take in that an agent has workers for *ranks*; once all *world* ranks are there, every one does its first step."""
        if generation > self.generation:
            self.generation, self.world, self.seats, self.steps = generation, world, {}, False
        if generation < self.generation:
            return
        self.seats |= dict.fromkeys(ranks, agent)
        if len(self.seats) < self.world:
            return
        self.steps, resumed, self.step, self.moved = True, self.step, self.step + 1, time.monotonic()
        self.reported_step = self.step - 1
        for one in dict.fromkeys(self.seats.values()):
            one.met(resumed, self.step, first=min(self.seats))

    def leave(self, generation: int, *, lost: bool = True) -> None:
        """Take in that a rank of *generation* left: the others wait for it, and see their groups break when it was *lost*."""
        if generation != self.generation or not self.steps:
            return
        self.steps = False
        if lost:
            self.broken = list(dict.fromkeys(self.seats.values()))

    def tick(self, now: float) -> None:
        """Let time pass until *now* (monotonic): steps are done, and the lowest rank's agent reports them."""
        broken, self.broken = self.broken, []
        for agent in broken:
            agent.report_broken_groups()
        if not self.steps:
            return
        done = int((now - self.moved) / self.step_seconds)
        if done:
            self.step += done
            self.moved += done * self.step_seconds
            self.seats[min(self.seats)].report_steps(range(self.reported_step + 1, self.step + 1), self.step_seconds)
            self.reported_step = self.step
