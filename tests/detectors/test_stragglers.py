"""Stragglers, slow links, slow data and jobs that became slower: each is distinguished from the others, and no clean run is accused."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import median

import pytest

from holdfast.detectors.evidence import StepBreakdown, StepBreakdowns, StepTimes
from holdfast.detectors.training.stragglers import cost_of
from tests.detectors.evidence_of import seen, the_fault
from tests.mentions import mentions

BLOCK = 8
"""Steps of a block."""


class Job:
    """Ranks that work and meet at the end of each step; what a rank waits follows from what the others work."""

    def __init__(self, work: Mapping[int, float], *, roles: Sequence[Sequence[int]] = (), jitter: float = 0.1, seed: int = 1) -> None:
        self.work, self.talk, self.data = dict(work), dict.fromkeys(work, 0.02), dict.fromkeys(work, 0.0)
        self.roles = tuple(tuple(role) for role in roles)
        self.blocks: dict[int, list[StepBreakdown]] = {rank: [] for rank in work}
        self.times: list[tuple[int, float]] = []
        self.jitter, self.noise = jitter, random.Random(seed)

    def go(self, blocks: int) -> Job:
        """Go on for so many blocks of steps."""
        for _ in range(blocks):
            steps = [self.step() for _ in range(BLOCK)]
            for rank, timings in self.blocks.items():
                times = [step[rank] for step in steps]
                own, talk, data = (median(getattr(one, name) for one in times) for name in ("own", "talk", "data"))
                timings.append(StepBreakdown(own=own, talk=talk, data=data))
        return self

    def step(self) -> dict[int, StepBreakdown]:
        """Return how each rank spent one step: noise is uneven, and now and then a rank is held up for long."""
        own = {rank: seconds * math.exp(abs(self.noise.gauss(0.0, self.jitter))) for rank, seconds in self.work.items()}
        for rank in own:
            if self.noise.random() < 0.03:
                own[rank] += self.noise.uniform(0.5, 5.0) * self.work[rank]
        arrives = {rank: own[rank] + self.data[rank] for rank in own}
        last = max(arrives.values())
        self.times.append((len(self.times) + 1, last + max(self.talk.values())))
        return {rank: StepBreakdown(own=own[rank], talk=last - arrives[rank] + self.talk[rank], data=self.data[rank]) for rank in own}

    def timings(self) -> StepBreakdowns:
        """Return what the flow would hand to the detectors now."""
        first = {rank: tuple(timings[1:9]) for rank, timings in self.blocks.items()}
        recent = {rank: tuple(timings[1:][-16:]) for rank, timings in self.blocks.items()}
        nodes = {rank: f"n{rank // 2}" for rank in self.work}
        return StepBreakdowns(at=0.0, step=len(self.times), nodes=nodes, first=first, blocks=recent, roles=self.roles)

    def step_times(self) -> StepTimes:
        """Return the times of its steps, as the flow would hand them over."""
        warm = self.times[8:]
        return StepTimes(at=0.0, steps=(*warm[:64], *warm[64:][-96:]))


COPIES = {"roles": [(0, 1, 2, 3)]}
CLEAN = {
    "copies": (dict.fromkeys(range(4), 0.3), COPIES),
    "copies on a busy machine": (dict.fromkeys(range(4), 0.05), {**COPIES, "jitter": 0.5}),
    "two": (dict.fromkeys(range(2), 0.1), {"roles": [(0, 1)], "jitter": 0.3}),
    "uneven stages": ({0: 0.1, 1: 0.1, 2: 0.35, 3: 0.35}, {"roles": [(0, 1), (2, 3)]}),
    "one rank a stage": ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.15}, {"roles": [(0,), (1,), (2,), (3,)], "jitter": 0.3}),
    "nobody knows the roles": ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.15}, {}),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_is_never_accused(name: str, seed: int) -> None:
    """Looked at after every block of some thousand steps, with noise and with steps that are many times as long."""
    work, more = CLEAN[name]
    job = Job(work, seed=seed, **more)  # type: ignore[arg-type]
    for _ in range(150):
        job.go(1)
        assert seen(job.timings(), job.step_times()) == []


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_computes_slowly_is_named(name: str, rank: int) -> None:
    """By its peers; where it has none, by what it did before: stages are not compared with other stages."""
    work, more = CLEAN[name]
    job = Job(work, **more).go(20)  # type: ignore[arg-type]
    job.work[rank] = 2.0 * max(job.work.values())
    job.go(10)
    assert {(fault.kind, fault.rank) for fault in seen(job.timings())} == {("straggler-gpu", rank)}


def test_a_straggler_from_the_first_step_is_named_by_its_peers() -> None:
    """There is no earlier time to compare with."""
    fault = the_fault(Job({0: 0.3, 1: 0.3, 2: 0.48, 3: 0.3}, **COPIES).go(10).timings())  # type: ignore[arg-type]
    assert (fault.kind, fault.rank, fault.node) == ("straggler-gpu", 2, "n1")
    assert mentions(fault.quote, "computing is slow")


def test_a_rank_without_waiting_peers_is_no_straggler() -> None:
    """The last stage has more to do, and the others have as much to wait for elsewhere."""
    timings = {0: StepBreakdown(own=0.3, talk=0.02), 1: StepBreakdown(own=0.42, talk=0.3), 2: StepBreakdown(own=0.3, talk=0.02)}
    blocks = {rank: (timing,) * 9 for rank, timing in timings.items()}
    assert seen(StepBreakdowns(at=0.0, step=90, nodes=dict.fromkeys(timings, "n0"), first=blocks, blocks=blocks, roles=((0, 1, 2),))) == []


def test_a_few_slow_steps_are_no_straggler() -> None:
    """Half of the blocks that are looked at."""
    job = Job(dict.fromkeys(range(4), 0.3), **COPIES).go(20)  # type: ignore[arg-type]
    job.work[1] = 0.6
    job.go(4)
    assert seen(job.timings()) == []


def test_slow_links_are_distinguished_from_slow_computation() -> None:
    """All wait for longer, the last one to come too, and nobody works longer."""
    job = Job(dict.fromkeys(range(4), 0.3), **COPIES).go(20)  # type: ignore[arg-type]
    job.talk = dict.fromkeys(job.talk, 0.2)
    fault = the_fault(job.go(10).timings())
    assert (fault.kind, fault.rank) == ("straggler-network", None)
    assert mentions(fault.quote, "links are slow")


def test_a_job_whose_batches_grew_has_no_slow_links() -> None:
    """All work longer and talk longer: that is the script's doing."""
    job = Job(dict.fromkeys(range(4), 0.3), **COPIES).go(20)  # type: ignore[arg-type]
    job.work, job.talk = dict.fromkeys(range(4), 0.6), dict.fromkeys(range(4), 0.3)
    assert seen(job.go(10).timings()) == []


@pytest.mark.parametrize(("late", "kind"), [((0, 1, 2, 3), "data-stall"), ((2, 3), "straggler-host")])
def test_slow_data_loading_is_attributed_to_node_or_storage(late: tuple[int, ...], kind: str) -> None:
    """All ranks: the storage. The ranks of one node: that node."""
    job = Job(dict.fromkeys(range(4), 0.3), **COPIES).go(12)  # type: ignore[arg-type]
    job.data |= dict.fromkeys(late, 0.3)
    assert the_fault(job.go(10).timings()).kind == kind


def test_a_lasting_slowdown_is_reported() -> None:
    """All ranks alike, so nobody is a straggler."""
    job = Job(dict.fromkeys(range(4), 0.3), **COPIES).go(20)  # type: ignore[arg-type]
    job.work = dict.fromkeys(range(4), 0.5)
    assert seen(job.go(8).step_times()) == []
    fault = the_fault(job.go(4).step_times())
    assert (fault.kind, fault.node) == ("step-slow", None)


def test_a_checkpoint_every_few_steps_makes_no_job_slow() -> None:
    """Every eighth step is five times as long, from some moment on."""
    steps = [(step, 0.3 if step < 100 or step % 8 else 1.5) for step in range(9, 400)]
    for end in range(160, len(steps)):
        assert seen(StepTimes(at=0.0, steps=(*steps[:64], *steps[64:end][-96:]))) == []


def test_what_a_straggler_costs_is_what_the_others_wait_for_it() -> None:
    """By its peers; with its data; nothing of a rank that holds nobody up, or that nobody can compare."""
    slow = Job({0: 0.3, 1: 0.3, 2: 0.5, 3: 0.3}, **COPIES, jitter=0.02).go(20)  # type: ignore[arg-type]
    found = cost_of(slow.timings(), 2)
    assert found is not None
    assert found == pytest.approx((0.52, 0.2), rel=0.2)
    idle = cost_of(slow.timings(), 1)
    assert idle is not None
    assert idle[1] == 0.0
    timings = {rank: StepBreakdown(own=0.3, talk=0.3 if rank else 0.05, data=0.0 if rank else 0.25) for rank in range(3)}
    blocks = {rank: (timing,) * 9 for rank, timing in timings.items()}
    late = StepBreakdowns(at=0.0, step=90, nodes=dict.fromkeys(timings, "n0"), first=blocks, blocks=blocks, roles=((0, 1, 2),))
    assert cost_of(late, 0) == pytest.approx((0.6, 0.25))
    assert cost_of(late, 7) is None
