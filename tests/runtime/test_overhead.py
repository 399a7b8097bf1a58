"""What snapshots take from training, found from steps whose cost is known, and the interval that follows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest

from holdfast.runtime.snapshots.copy_schedule import SnapshotLimits
from holdfast.runtime.snapshots.measurements import ENOUGH, RunDelay, StepMeasurements
from holdfast.runtime.snapshots.overhead import FIRST, GAP, OFTEN, SELDOM, Overhead, is_control

STEP = 0.27
LIMIT = 0.01


@dataclass
class Job:
    """Steps of a job whose snapshots cost a share of a step each, of which a part falls into the step after."""

    noise: float = 0.01
    spill: float = 0.3
    seed: int = 0
    found: Overhead = field(default_factory=lambda: Overhead(LIMIT))
    taken: list[bool] = field(default_factory=list)
    every: list[int] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)

    def run(self, steps: int, cost: float, odd: Callable[[int], float] = lambda _step: 0.0) -> Job:
        """Train this many more steps; *odd*: additional seconds of a step."""
        order = random.Random(self.seed + len(self.taken))
        for step in range(len(self.taken), len(self.taken) + steps):
            every, cycle = self.found.every, self.found.cycle
            copied = step % every == 0 and not is_control(step, every, cycle)
            after = bool(self.taken) and self.taken[-1]
            took = STEP * (1 + cost * ((1 - self.spill) * copied + self.spill * after))
            self.found.add(took * (1 + order.gauss(0, self.noise)) + odd(step), copied=copied)
            self.taken.append(copied)
            self.every.append(every)
            self.extra.append(cost * copied)
        return self

    def overhead(self, since: int) -> float:
        """Return the share that snapshots took of the steps since one."""
        return mean(self.extra[since:])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("cost", "noise"), [(0.02, 0.005), (0.05, 0.01), (0.25, 0.01), (0.25, 0.05), (0.25, 0.1), (2.0, 0.05)])
def test_the_cost_stays_at_the_limit_whatever_a_snapshot_takes(cost: float, noise: float, seed: int) -> None:
    """Once it was measured; a machine that scatters is given a third more."""
    job = Job(noise=noise, seed=seed).run(1200, cost)
    assert job.overhead(300) <= LIMIT * (1.1 if noise < 0.05 else 1.35)
    assert job.overhead(300) > LIMIT / 4, "snapshots are rarer than they need be"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_where_snapshots_cost_nothing_they_are_taken_at_nearly_every_step(noise: float, seed: int) -> None:
    """All but the control steps, which become rarer."""
    job = Job(noise=noise, seed=seed).run(1200, 0.002)
    assert mean(job.taken) > 0.8
    assert mean(job.taken[-SELDOM * 4 :]) >= 1 - (GAP + 1) / SELDOM
    assert job.found.every == 1


def test_the_first_cycles_detect_a_large_cost() -> None:
    """It is not paid for long."""
    assert max(Job().run(4 * FIRST, 0.25).every) > 15


@pytest.mark.parametrize(("before", "after", "wanted"), [(0.0, 0.25, range(18, 40)), (0.25, 0.0, range(1, 3)), (0.5, 0.1, range(8, 16))])
def test_another_load_gives_another_interval(before: float, after: float, wanted: range) -> None:
    """A neighbour comes, or goes."""
    job = Job().run(800, before).run(1200, after)
    assert job.found.every in wanted


def test_single_slow_steps_change_nothing() -> None:
    """An evaluation each fifty steps, and a save each hundred."""
    job = Job(noise=0.005).run(1500, 0.002, odd=lambda step: STEP * 40 * (step % 50 == 7) + STEP * 15 * (step % 100 == 0))
    assert max(job.every) == 1
    job = Job(noise=0.005).run(1500, 0.1, odd=lambda step: STEP * 40 * (step % 50 == 7) + STEP * 15 * (step % 100 == 0))
    assert job.overhead(300) <= LIMIT * 1.2


@pytest.mark.parametrize("spill", [0.0, 0.5, 1.0])
def test_the_effect_on_the_next_step_counts(spill: float) -> None:
    """At every step, and at every n-th."""
    job = Job(noise=0.002, spill=spill).run(800, 0.08)
    found = job.found.measured
    assert found is not None
    assert found.share == pytest.approx(0.08, abs=0.01)
    assert found.step == pytest.approx(STEP, rel=0.02)
    assert found.error < 0.01


def test_a_negligible_cost_skips_no_snapshot() -> None:
    """Half a millisecond of a step of two."""
    found = Overhead(LIMIT)
    for step in range(400):
        copied = not is_control(step, found.every, found.cycle)
        found.add(0.002 + 0.0005 * copied, copied=copied)
    assert found.every == 1
    assert found.measured is not None
    assert found.measured.share > LIMIT


def test_few_steps_give_no_result_and_a_reset_drops_everything() -> None:
    """Another rank, other steps."""
    found = Job().run(2 * FIRST, 0.25).found
    assert found.measured is None
    assert (found.every, found.cycle) == (1, FIRST)
    found = Job().run(400, 0.25).found
    assert found.every > 1
    found.reset()
    assert (found.every, found.cycle, found.measured) == (1, FIRST, None)


@pytest.mark.parametrize(
    ("every", "cycle", "left_out"), [(1, 0, 0), (1, 16, 3), (2, 16, 3), (3, 16, 3), (4, 16, 0), (30, 64, 0), (1, 64, 3)]
)
def test_control_steps_are_the_same_on_all_ranks(every: int, cycle: int, left_out: int) -> None:
    """They follow from the step's number and from what the ranks have agreed on; an interval of some steps has its own."""
    assert sum(is_control(step, every, cycle) for step in range(cycle or 16)) == left_out


# -- what a rank asks the others for -------------------------------------------------------------------------------------


def planning(copy_seconds: float, *, policy: str = "skip", step: float = STEP) -> StepMeasurements:
    """Return the plans of a rank whose copies take so long."""
    made = StepMeasurements(SnapshotLimits(policy=policy))
    for _ in range(ENOUGH + 1):
        made.add_copy(10**6, copy_seconds)
        made.add_step(step, [], copied=True)
    return made


def test_copies_that_cannot_matter_are_not_measured() -> None:
    """Neither a trifle nor a small share of the limit; a policy that wants one at every step whatever it costs gets it."""
    assert planning(0.02).control == FIRST
    assert planning(0.0005).control == 0
    assert planning(0.0012, step=5.0).control == 0
    assert planning(0.02, policy="pause").control == 0


def test_a_rank_requests_the_interval_that_it_has_measured() -> None:
    """Not for less than the job allows."""
    made = planning(0.02)
    assert made.wanted == 1
    for step in range(6 * OFTEN):
        copied = step % made.wanted == 0 and not is_control(step, made.wanted, made.control)
        made.add_step(STEP * (1.2 if copied else 1.0), [], copied=copied)
    assert made.wanted == pytest.approx(20, abs=2)
    made.reset()
    assert made.wanted == 1


def test_on_saturated_cores_the_copies_alone_make_snapshots_rarer_at_once() -> None:
    """Before any steps were compared, however much they vary; not on free cores, where copies take nothing from training."""
    for delay, used, wanted in ((0.1, 0.1, 20), (0.1, 0.2, 10), (0.001, 0.1, 1), (0.1, 0.0, 1)):
        made = StepMeasurements(SnapshotLimits())
        for number in range(ENOUGH + 1):
            made.add_copy(10**6, 0.02)
            made.add_step(STEP * (1 + number % 2), [], copied=True, delay=delay * STEP * (1 + number % 2), used=used)
        assert made.wanted == wanted


def test_a_thread_knows_how_long_it_waited_for_a_core() -> None:
    """Beside a process on the only core that both have, it waits; and nothing is known where the kernel keeps no count."""
    script = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", script, str(core)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, {core})
            delay, until = RunDelay(), time.thread_time() + 0.2
            while time.thread_time() < until:
                pass
            assert delay.since() > 0.02
            delay.close()
        finally:
            os.sched_setaffinity(0, before)
            other.kill()
    nothing = RunDelay("/nowhere")
    assert nothing.since() == 0.0
    nothing.close()
