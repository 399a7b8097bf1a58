"""Faults of the loss: NaN or infinite, a spike, bitwise constant while training continues, or replicas that differ."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import groupby
from math import isfinite
from statistics import median
from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction, fault_kind
from holdfast.detectors.evidence import FrozenParameters, HangLimits, LossHistory, NonFiniteLoss, ReplicaDigests, Sample
from holdfast.detectors.training.robust_stats import jitter

WINDOW: Final = 64
"""Number of losses before a spike to compare it with."""
NEAR: Final = 16
"""Number of newest losses for the current median, as the loss decreases over time."""
LEAST: Final = 24
"""Minimum number of losses for a comparison."""
PERSIST: Final = 3
"""Minimum number of consecutive high losses: one odd batch is no spike."""
DEVIATIONS: Final = 8.0
"""Minimum distance of a spike above the median, in standard deviations of the noise (our choice)."""
RISE: Final = 0.3
"""Minimum distance of a spike above the median, as a fraction of the median, for losses with little noise (our choice)."""
FROZEN: Final = 64
"""Consecutive steps with a bitwise equal loss that mean that the model no longer learns (our choice)."""
USUAL_RUNS: Final = 4
"""A loss that is logged every n-th step repeats in between: a run must be this many times the longest run so far (our choice)."""
GONE: Final = 3
"""Consecutive non-finite losses that mean that the parameters themselves are non-finite (our choice)."""
MAJORITY: Final = 3
"""Minimum number of replicas to tell which one is wrong."""
CHECKS: Final = 3
"""Consecutive checks with bitwise equal parameters."""


def see_non_finite_loss(seen: NonFiniteLoss, _limits: HangLimits) -> Fault:
    """Report a non-finite loss immediately."""
    quote = f"the loss of rank {seen.rank} is {seen.loss} at step {seen.step}" + (", on this rank alone" if seen.alone else "")
    quote += f"; {seen.good}" if seen.good else ""
    return Fault(
        kind=NOT_FINITE.id,
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.step,
        quote=quote,
        signature=f"{NOT_FINITE.id} since step {seen.step}",
    )


def see_losses(seen: LossHistory, _limits: HangLimits) -> list[Fault]:
    """Return the faults in the newest losses."""
    return [fault for fault in (_lost(seen), _spike(seen), _frozen(seen)) if fault is not None]


def _lost(seen: LossHistory) -> Fault | None:
    """Detect that the newest losses are non-finite after finite ones: then so are the parameters."""
    bad = len(seen.losses) - max((place + 1 for place, (_, loss) in enumerate(seen.losses) if isfinite(loss)), default=len(seen.losses))
    if bad < GONE:
        return None
    (good, loss), (first, _) = seen.losses[-bad - 1], seen.losses[-bad]
    quote = f"the loss has been NaN or infinite for {bad} steps in a row, since step {first}; at step {good} it was {loss:.6g}"
    return Fault(kind=LOST.id, at=seen.at, step=first, quote=quote, signature=f"{LOST.id} since step {first}")


def _spike(seen: LossHistory) -> Fault | None:
    """Detect that all newest losses are far above the earlier ones."""
    finite = [(step, loss) for step, loss in seen.losses if isfinite(loss)]
    high, usual = finite[-PERSIST:], [loss for _, loss in finite[-PERSIST - WINDOW : -PERSIST]]
    if len(usual) < LEAST:
        return None
    center, noise = median(usual[-NEAR:]), jitter(usual)
    limit = max(center + DEVIATIONS * noise, center + RISE * abs(center), *usual)
    if any(loss <= limit for _, loss in high):
        return None
    since, worst = high[0][0], max(loss for _, loss in high)
    quote = f"the loss jumped from {center:.4g} (median of {NEAR} steps, noise {noise:.2g}) to {worst:.4g}, since step {since}"
    return Fault(kind=SPIKE.id, at=seen.at, step=since, quote=quote, signature=f"{SPIKE.id} since step {since}")


def _frozen(seen: LossHistory) -> Fault | None:
    """Detect that the newest losses are bitwise equal, for much longer than ever before."""
    runs = [(value, [step for step, _ in some]) for value, some in groupby(seen.losses, key=lambda one: one[1])]
    if len(runs) < 2 or not isfinite(runs[-1][0]):  # noqa: PLR2004 (a loss that never changed is a constant)
        return None
    (value, steps), before = runs[-1], runs[:-1]
    longest = max(len(some) for _, some in before)
    if len(steps) < max(FROZEN, USUAL_RUNS * longest) or len(before) < PERSIST:
        return None
    quote = f"steps go on and the loss has been {value!r} to the bit for {len(steps)} steps, since step {steps[0]}"
    return Fault(kind=ZOMBIE.id, at=seen.at, step=steps[0], quote=quote, signature=f"{ZOMBIE.id} since step {steps[0]}")


def see_frozen_parameters(seen: FrozenParameters, _limits: HangLimits) -> Fault | None:
    """Report a rank whose optimizer does not change the parameters."""
    if len(seen.steps) < CHECKS:
        return None
    return Fault(
        kind=ZOMBIE.id,
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.steps[0],
        quote=f"steps go on and no parameter has changed from step {seen.steps[0]} to step {seen.steps[-1]} ({len(seen.steps)} checks)",
        signature=f"{ZOMBIE.id} parameters",
    )


_FALLING: Final = tuple((step, 3.0 - 0.01 * step + 0.02 * (step % 5)) for step in range(1, 91))


_define = partial(
    fault_kind,
    recommended_action=RecommendedAction.MONITOR,
    attributed_to=Attribution.USER_CODE,
    healthy=Sample(LossHistory(at=0.0, losses=_FALLING)),
)
NOT_FINITE: Final = _define(
    id="loss-not-finite",
    title="The loss or its gradient is NaN or infinite",
    component="user code",
    source="losses that ranks report",
    action="roll back to the named checkpoint; check the data and the learning rate; suspect a GPU if only one rank is affected",
    unhealthy=Sample(NonFiniteLoss(node="n1", rank=1, at=0.0, step=4102, loss=float("nan"))),
    weight=30,
    confused_with=("loss-spike", "gradient-nan-one-rank"),
)
LOST: Final = _define(
    id="loss-diverged",
    title="The loss stays NaN or infinite: the parameters are corrupted",
    component="user code",
    source="losses that rank 0 reports",
    recommended_action=RecommendedAction.RESTART,
    action="check the batch and the gradient of the named step, and the learning rate; the job rolls back automatically, and "
    "stops if that does not help",
    unhealthy=Sample(LossHistory(at=0.0, losses=(*_FALLING, *((step, float("nan")) for step in range(91, 95))))),
    healthy=Sample(LossHistory(at=0.0, losses=(*_FALLING, (91, float("nan")), (92, 2.1)))),
    weight=45,
    confused_with=("loss-not-finite", "silent-corruption"),
)
SPIKE: Final = _define(
    id="loss-spike",
    title="The loss jumped",
    component="performance",
    source="losses that rank 0 reports",
    action="monitor; roll back to an earlier checkpoint if it does not decrease",
    unhealthy=Sample(LossHistory(at=0.0, losses=(*_FALLING, *((step, 6.9) for step in range(91, 94))))),
    weight=25,
    confused_with=("loss-not-finite",),
)
ZOMBIE: Final = _define(
    id="training-frozen",
    title="Training continues without progress: the loss, or every parameter, stays bitwise equal",
    component="job",
    source="losses and digests of parameters that ranks report",
    action="check the parameters passed to the optimizer, the learning rate, and whether the data still changes",
    unhealthy=Sample(LossHistory(at=0.0, losses=(*_FALLING, *((step, 2.1) for step in range(91, 160))))),
    weight=28,
    confused_with=("job-hang",),
)


# -- replicas that differ -------------------------------------------------------------------------------------------------


def see_replica_digests(seen: ReplicaDigests, _limits: HangLimits) -> list[Fault]:
    """Report the ranks whose parameters differ from the majority of replicas; without a majority only that they differ."""
    counts = Counter(seen.digests.values())
    if len(counts) < 2:  # noqa: PLR2004 (all agree)
        return []
    (usual, most), every = counts.most_common(1)[0], len(seen.digests)
    wrong = sorted(rank for rank, digest in seen.digests.items() if digest != usual)
    if every < MAJORITY or 2 * most <= every:
        return [_differ(seen, len(counts))]
    return [_corrupt(seen, rank, usual, most) for rank in wrong]


def _differ(seen: ReplicaDigests, kinds: int) -> Fault:
    ranks = ", ".join(map(str, sorted(seen.digests)))
    quote = f"after step {seen.step} the copies of the parameters on ranks {ranks} are of {kinds} kinds"
    quote += _tensor(seen, *_differing_pair(seen))
    quote += f"; no majority says which is right{_last_equal(seen)}"
    return Fault(kind=DIFFER.id, at=seen.at, step=seen.step, quote=quote, signature=DIFFER.id)


def _differing_pair(seen: ReplicaDigests) -> tuple[int, int]:
    """Return two ranks that differ."""
    first = min(seen.digests)
    return first, min(rank for rank, digest in seen.digests.items() if digest != seen.digests[first])


def _corrupt(seen: ReplicaDigests, rank: int, usual: str, most: int) -> Fault:
    node, correct = seen.nodes[rank], min(one for one, digest in seen.digests.items() if digest == usual)
    quote = f"after step {seen.step} rank {rank} on {node} has other parameters than its {most} equal copies"
    quote += _tensor(seen, rank, correct) + _last_equal(seen)
    signature = f"{CORRUPT.id} rank {rank}"
    return Fault(kind=CORRUPT.id, at=seen.at, node=node, rank=rank, step=seen.step, quote=quote, signature=signature)


def _tensor(seen: ReplicaDigests, one: int, other: int) -> str:
    """Return the first tensor in which two ranks differ."""
    mine, theirs = seen.sums.get(one, {}), seen.sums.get(other, {})
    wrong = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if not wrong:
        return ""
    return f", first in '{wrong[0]}'" + (f" and in {len(wrong) - 1} more of {len(mine)} tensors" if len(wrong) > 1 else "")


def _last_equal(seen: ReplicaDigests) -> str:
    """Return the last step at which they were equal, and the checkpoint to roll back to."""
    if seen.equal_at is None:
        return ""
    return f"; they were equal after step {seen.equal_at}" + (f", {seen.good}" if seen.good else "")


def _sample(*digests: str) -> Sample:
    nodes = {rank: f"n{rank}" for rank in range(len(digests))}
    return Sample(ReplicaDigests(at=0.0, step=128, nodes=nodes, digests=dict(enumerate(digests))))


CORRUPT: Final = fault_kind(
    id="silent-corruption",
    title="A repeated step gave a different result on the same rank, or replicas of a state differ",
    component="gpu",
    source="digests of parameters that ranks report",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.GPU,
    action="remove the GPU; roll back to a checkpoint before the difference",
    unhealthy=_sample("a1", "a1", "b2"),
    healthy=_sample("a1", "a1", "a1"),
    weight=85,
    confused_with=("copies-differ", "gradient-nan-one-rank"),
)
DIFFER: Final = fault_kind(
    id="copies-differ",
    title="Replicas of a state differ, without a majority to tell which is right",
    component="job",
    source="digests of parameters that ranks report",
    recommended_action=RecommendedAction.MONITOR,
    attributed_to=Attribution.GPU,
    action="stop the job, run it from the checkpoint before the difference with more replicas or on other nodes, and compare",
    unhealthy=_sample("a1", "b2"),
    healthy=_sample("a1", "a1"),
    weight=70,
    confused_with=("silent-corruption",),
)
