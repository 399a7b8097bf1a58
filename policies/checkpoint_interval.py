"""Choose the checkpoint interval with the least loss, from the cost of a save and the fault rate.

All times are in seconds, rates in faults per node-hour. Faults are taken to come independently of each other at a constant rate
(exponential times between them), as both sources do:

- J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974.
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006.

In their terms ``save_s`` is the time that training stops for one save, ``between_s`` the mean time between faults that send the job back to
a checkpoint, and an interval is the training time between two saves, without the save itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

PUBLISHED: Final = 419 / (54 * 24 * 16384 / 8)
"""Faults per node-hour before the first fault: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node.

A. Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, 2024, section 3.3.4: one in some 6,300 node-hours.
"""
CONFIDENCE: Final = 0.9
"""Confidence of the interval of a rate."""
RECOVERY_S: Final = 60.0
"""Downtime of one fault before the first one. The best interval hardly depends on it; the waste does."""
ROOM: Final = 1.25
"""A save may take this many times the median: disks are slow at times."""
MOST: Final = 500.0
"""An interval longer than this many mean times between faults never finishes; `math.exp` overflows not far above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Fault rate of one node."""

    per_node_hour: float
    low: float
    high: float
    """Confidence interval of the rate, at `CONFIDENCE`."""
    reason: str

    def between_s(self, nodes: int) -> float:
        """Return the mean time between faults of a job on *nodes* nodes."""
        return 3600 / (self.per_node_hour * max(1, nodes))


def rate_of(faults: int, node_hours: float) -> Rate:
    """Estimate the rate from *faults* in *node_hours*.

    With faults: (k + 1/2) / T, the mean under Jeffreys' prior for a Poisson rate. Without any, T hours only show that the rate is
    not much above 1/T: it is 1/(2T), and at most `PUBLISHED`. The interval is Garwood's (Biometrika 28, 1936), with
    quantiles of chi-square after Wilson and Hilferty (PNAS 17, 1931): its upper end is right to 1 %, the lower one to 23 % at one fault
    and to 3 % from two faults on.
    """
    hours, tail = max(node_hours, 1e-3), (1 - CONFIDENCE) / 2
    high = chi_square(1 - tail, 2 * faults + 2) / (2 * hours)
    if faults:
        low, reason = chi_square(tail, 2 * faults) / (2 * hours), f"{_times(faults, 'fault')} in {_number(node_hours)} node-hours"
        return Rate(per_node_hour=(faults + 0.5) / hours, low=low, high=high, reason=reason)
    rate = min(0.5 / hours, PUBLISHED)
    if rate < PUBLISHED:
        reason = f"no fault in {_number(node_hours)} node-hours, which counts as half a fault"
    else:
        reason = f"assumed: no fault was seen, and {_number(node_hours)} node-hours are too few to know better than published figures"
    return Rate(per_node_hour=rate, low=0.0, high=max(high, rate), reason=reason)


def chi_square(quantile: float, freedom: int) -> float:
    """Return the *quantile* (0 to 1) of chi-square with *freedom* degrees, by the approximation of Wilson and Hilferty."""
    ninth = 2 / (9 * freedom)
    return freedom * max(0.0, 1 - ninth + NormalDist().inv_cdf(quantile) * math.sqrt(ninth)) ** 3


def rollback_share(back: int, recoveries: int) -> float:
    """Return the share of faults that send the job back to a checkpoint, when *back* of *recoveries* did; all of them before the first.

    (b + 1/2) / (n + 1), the mean under Jeffreys' prior: a few recoveries without a rollback do not prove that none will ever need one.
    """
    return (back + 0.5) / (recoveries + 1) if recoveries else 1.0


def young(save_s: float, between_s: float) -> float:
    """Return Young's interval, sqrt(2 C M): 2 % too long at C = M/500, 17 % at C = M/10, 70 % at C = M."""
    return math.sqrt(2 * save_s * between_s)


def daly(save_s: float, between_s: float) -> float:
    """Return Daly's interval: sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C below C = 2 M, else M.

    Within 0.05 % of the exact optimum up to C = M/10, 0.6 % up to M/2, 6 % everywhere; it never wastes 0.2 % more time than the optimum.
    """
    if save_s >= 2 * between_s:
        return between_s
    ratio = save_s / (2 * between_s)
    return young(save_s, between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCase:
    """Measured values of a job."""

    save_s: float
    """Time that training stops for one save."""
    step_s: float
    """Time of one step."""
    between_s: float
    """Mean time between faults of the job, all kinds."""
    rollback: float = 1.0
    """Share of faults that send it back to a checkpoint; the others recover from live ranks and lose at most a step."""
    recovery_s: float = RECOVERY_S
    """Downtime of one fault, without the rollback."""
    overlapped_s: float = 0.0
    """Time that a save is written while training runs; the next save cannot start before."""

    @property
    def fewest(self) -> int:
        """Return the minimum number of steps between two saves that the disk can keep up with."""
        return max(1, math.ceil(ROOM * self.overlapped_s / self.step_s))

    @property
    def back_s(self) -> float:
        """Return the mean time between faults that send the job back to a checkpoint."""
        return self.between_s / self.rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLimits:
    """Minimum and maximum of steps between two saves."""

    least: int
    most: int

    def within(self, steps: int) -> int:
        """Return *steps*, clamped to the limits."""
        return max(self.least, min(self.most, steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Recommended checkpoint interval."""

    steps: int
    seconds: float
    """Training time between two saves."""
    reason: str


def advise(case: IntervalCase, limits: IntervalLimits) -> Advice:
    """Return the interval of *case* with the least loss, in whole steps within *limits*."""
    best = daly(case.save_s, case.back_s)
    below = max(1, math.floor(best / case.step_s))
    wanted = max(case.fewest, min((below, below + 1), key=lambda steps: waste(case, steps).total))
    steps = limits.within(wanted)
    reason = (
        f"a save costs {_time(case.save_s)}, a step {_time(case.step_s)}, and a fault sends the job back to a checkpoint about every "
        f"{_time(case.back_s)}: {_time(best)} of training between two saves lose least"
    )
    if wanted == case.fewest > below:
        reason += f", but each is written for {_time(case.overlapped_s)} while training runs, and the next one waits for that"
    if steps != wanted:
        name, limit = ("least", limits.least) if steps > wanted else ("most", limits.most)
        reason += f"; {wanted:,} steps would be best, but the {name} allowed is {limit:,}"
    return Advice(steps=steps, seconds=steps * case.step_s, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Cost of a checkpoint interval, as shares of all time (0 to 1)."""

    steps: int
    save: float
    """Saves."""
    rollback: float
    """Discarded training: steps since the last save, and interrupted saves."""
    recovery: float
    """Downtime."""
    reason: str

    @property
    def total(self) -> float:
        """Return the share of all time without progress."""
        return self.save + self.rollback + self.recovery


def waste(case: IntervalCase, steps: int) -> Waste:
    """Return the cost of saving every *steps* steps (at least 1).

    Exact for faults that come at a constant rate, also in the middle of saves and recoveries. To get through a length a of training and
    save takes M (exp(a/M) - 1) on average, where M is the mean time between faults that send the job back; each fault, of any kind,
    restarts the recovery, which takes exp(R/M) - 1 of that, where M is the mean time between all faults. If all faults send the job back,
    this is Daly's complete model, M (exp(a/M) - 1) exp(R/M).
    """
    span, mean, down = steps * case.step_s + case.save_s, case.back_s, case.recovery_s
    if span / mean > MOST or down / case.between_s > MOST:
        reason = f"saving every {_times(steps, 'step')} the job never gets from one save to the next"
        return Waste(steps=steps, save=0.0, rollback=1.0, recovery=0.0, reason=reason)
    trained = mean * math.expm1(span / mean)  # including discarded training, for each completed save
    downtime = trained * math.expm1(down / case.between_s)
    total = trained + downtime
    shares = {"save": case.save_s / total, "rollback": (trained - span) / total, "recovery": downtime / total}
    reason = (
        f"saving every {_times(steps, 'step')} spends {_share(shares['save'])} of the time on saves, {_share(shares['rollback'])} on steps "
        f"computed again, and {_share(shares['recovery'])} on recoveries"
    )
    return Waste(steps=steps, **shares, reason=reason)


def table(case: IntervalCase, advice: Advice, limits: IntervalLimits, *, also: Iterable[int] = ()) -> tuple[Waste, ...]:
    """Return the cost of the recommended interval, of others from 0.25 to 4 times as long, and of those in *also*."""
    around = {limits.within(max(1, round(advice.steps * factor))) for factor in (0.25, 0.5, 1, 2, 4)}
    return tuple(waste(case, steps) for steps in sorted(around | {steps for steps in also if steps > 0}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoss:
    """Expected cost of one fault in seconds; a part that was never measured is None."""

    detection: float | None
    """From the fault to the first command: detection, diagnosis, stopping the ranks."""
    rollback: float
    """T0: steps computed again, averaged over all faults, also those without a rollback."""
    reschedule: float | None
    """T1."""
    communication: float | None
    """T2."""
    load: float | None
    """T3."""
    compilation: float | None
    """T4."""
    downtime: float
    """Everything but the rollback: the measured parts, or the assumption."""
    reason: str

    @property
    def total(self) -> float:
        """Return the total cost."""
        return self.rollback + self.downtime


def lost_work(case: IntervalCase, steps: int) -> float:
    """Return the training that a rollback discards: half an interval, slightly less if faults are frequent.

    The mean of an exponential time that is known to end within the interval and its save: M - a / (exp(a/M) - 1).
    """
    span = steps * case.step_s + case.save_s
    ratio = span / case.back_s
    if ratio < 1e-4:  # noqa: PLR2004 (the difference of two large numbers would lose all digits)
        return span * (0.5 - ratio / 12)
    return case.back_s - span / math.expm1(min(ratio, MOST))


def loss(case: IntervalCase, steps: int, parts: dict[str, float]) -> ExpectedLoss:
    """Return the cost of one fault if saves are *steps* apart and a recovery takes *parts*, named as in `ExpectedLoss`."""
    again = lost_work(case, steps)
    measured = [parts.get(name) for name in ("detection", "reschedule", "communication", "load", "compilation")]
    reason = f"T0: a fault that goes back to a checkpoint loses {_time(again)} of steps on average"
    if case.rollback < 1:
        reason += f", and {_share(case.rollback)} of the faults are expected to go back"
    detection, reschedule, communication, load, compilation = measured
    return ExpectedLoss(
        detection=detection,
        rollback=case.rollback * again,
        reschedule=reschedule,
        communication=communication,
        load=load,
        compilation=compilation,
        downtime=case.recovery_s,
        reason=reason,
    )


CHANGE: Final = 0.25
"""Relative difference below which an interval is not changed: the waste is flat near its minimum."""


def differs(present: int, advised: int) -> bool:
    """Return whether *advised* differs enough from the *present* interval to change it."""
    return abs(advised - present) > CHANGE * present


def _times(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 (useful digits)


def _share(part: float) -> str:
    return f"{part * 100:.2g}%" if part < 0.0995 else f"{part * 100:.0f}%"  # noqa: PLR2004 (two digits)


def _time(seconds: float) -> str:
    """Format *seconds* with two or three digits and a unit."""
    for limit, size, unit in ((1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.0f} days" if seconds >= 864_000 else f"{seconds / 86400:.3g} days"  # noqa: PLR2004 (ten of them)
