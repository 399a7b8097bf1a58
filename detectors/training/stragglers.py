"""Performance faults: one slow rank, slow links, slow data loading, or a job that became slower.

Ranks are compared with peers that do the same work, by medians over blocks of steps and over ranks, long enough to ignore single slow
steps. A rank is slow if its own work takes long *and* its peers wait for it; the links are slow if all ranks wait although no rank's own
work takes longer than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, FaultKind, RecommendedAction, fault_kind
from holdfast.detectors.evidence import HangLimits, Sample, StepBreakdown, StepBreakdowns, StepTimes
from holdfast.detectors.training.robust_stats import middle, quantile
from holdfast.plurals import plural

LONG: Final = 8
"""Number of newest blocks of steps that must all agree."""
SLOWER: Final = 1.3
"""Minimum ratio of a rank's own work to its peers' (our choice; Greyhound and the MegaScale report use about 1.1 on dedicated GPUs)."""
TALK: Final = 2.0
"""Minimum ratio of the communication time to the earlier one (our choice)."""
NOTICEABLE: Final = 0.1
"""Minimum fraction of the step time that is lost (our choice)."""
WAITED_FOR: Final = 0.5
"""Minimum fraction of a straggler's excess that its peers wait; otherwise it does not slow them down (our choice)."""
DATA: Final = 0.3
"""Minimum fraction of a step that waits for data (our choice)."""

WARM: Final = 8
"""Warm-up steps of a generation to ignore."""
BASE: Final = 64
"""Number of steps after the warm-up that are the baseline."""
RECENT: Final = 96
"""Number of newest steps to compare: more than a straggler needs, as that is the more specific fault."""
DROP: Final = 1.3
"""Minimum ratio of the step time to the baseline (our choice)."""
MOST: Final = 0.75
NEARLY_ALL: Final = 0.85
"""Minimum fraction of the newest steps above the `MOST` quantile of the baseline (our choice)."""
NOISES: Final = 4.0
"""Minimum distance of the newest median above the baseline, in deviations of the baseline (our choice)."""


def see_step_breakdowns(seen: StepBreakdowns, _limits: HangLimits) -> list[Fault]:
    """Return the slow ranks, else slow links and slow data loading."""
    if not settled(seen):
        return []
    now = {rank: some[-LONG:] for rank, some in seen.blocks.items()}
    slow = list(_slow_ranks(seen, now))
    return slow or [*_slow_links(seen, now), *_slow_data(seen, now)]


def see_step_times(seen: StepTimes, _limits: HangLimits) -> Fault | None:
    """Report a job that became slower for long."""
    times = [seconds for _, seconds in seen.steps]
    base, recent = times[:BASE], times[-RECENT:]
    if len(times) < BASE + RECENT:
        return None
    (before, noise), now = middle(base), median(recent)
    usual = quantile(base, MOST)
    above = sum(seconds > usual for seconds in recent) / RECENT
    if now <= DROP * before or now <= before + NOISES * noise or above < NEARLY_ALL:
        return None
    step = seen.steps[-RECENT][0]
    quote = (
        f"steps take {now:.3g} s, the first ones took {before:.3g} s (medians of {RECENT} and {BASE}); so since step {step} at the latest"
    )
    return Fault(kind=DROPPED.id, at=seen.at, step=step, quote=quote, signature=DROPPED.id)


def cost_of(seen: StepBreakdowns, rank: int) -> tuple[float, float] | None:
    """Return the current step time in seconds, and the part that the others wait for *rank* (medians); None if unknown."""
    now = {other: some[-LONG:] for other, some in seen.blocks.items() if some}
    if rank not in now or len(now) < 2:  # noqa: PLR2004 (a single rank has no peers)
        return None
    rest = [some for other, some in now.items() if other != rank]
    peers = [other for role in seen.roles if rank in role for other in role if other != rank and other in now]
    usual, _ = _usual(seen, rank, peers)
    own, data = median([timing.own for timing in now[rank]]), median([timing.data for timing in now[rank]])
    usual_data = median([median([timing.data for timing in some]) for some in rest])
    excess = own + data - (own if usual is None else usual) - usual_data
    waited = median([median([timing.talk for timing in some]) for some in rest]) - median([timing.talk for timing in now[rank]])
    return median([_step(some) for some in now.values()]), max(0.0, min(excess, waited))


def settled(seen: StepBreakdowns) -> bool:
    """Return whether every rank has reported enough steps."""
    return bool(seen.blocks) and all(len(some) >= LONG for some in seen.blocks.values())


def cost_of_links(seen: StepBreakdowns) -> float:
    """Return the increase of the communication time per step in seconds (the minimum over ranks, medians)."""
    if not settled(seen) or any(len(seen.first.get(rank, ())) < LONG for rank in seen.blocks):
        return 0.0
    before, now = _talk(seen.first), _talk({rank: some[-LONG:] for rank, some in seen.blocks.items()})
    return max(0.0, now - before)


def _talk(blocks: Mapping[int, Sequence[StepBreakdown]]) -> float:
    """Return the minimum communication time over ranks: the last rank waits for nobody, so it is the time of the transfer itself."""
    return min(median([timing.talk for timing in some]) for some in blocks.values())


# -- ranks --------------------------------------------------------------------------------------------------------------

_Now = Mapping[int, Sequence[StepBreakdown]]


def _slow_ranks(seen: StepBreakdowns, now: _Now) -> Iterator[Fault]:
    """Yield the ranks whose own work takes longer than their peers', or than before, and for which the others wait."""
    step = median([_step(some) for some in now.values()])
    for rank, some in now.items():
        peers = [other for role in seen.roles if rank in role for other in role if other != rank and other in now]
        usual, words = _usual(seen, rank, peers)
        if usual is None or sum(timing.own > SLOWER * usual for timing in some) < len(some) - 1:  # one block may be an exception
            continue
        own = median([timing.own for timing in some])
        excess = own - usual
        waits = median([timing.talk for timing in some])
        others = [median([timing.talk for timing in there]) for other, there in now.items() if other != rank]
        if excess < NOTICEABLE * step or not others or median(others) - waits < WAITED_FOR * excess:
            continue
        quote = f"the own work of rank {rank} on {seen.nodes[rank]} takes {own:.3g} s a step, {words}; "
        quote += f"the others wait {median(others):.3g} s a step for it, it waits {waits:.3g} s: its computing is slow, not its links"
        yield _fault(COMPUTE, seen, rank, quote)


def _usual(seen: StepBreakdowns, rank: int, peers: Sequence[int]) -> tuple[float | None, str]:
    """Return the expected own work time of *rank*: that of its *peers*; without any, its earlier one, scaled by the others' change."""
    if peers:
        usual = median([median([timing.own for timing in seen.blocks[peer][-LONG:]]) for peer in peers])
        return usual, f"that of its {plural(len(peers), 'peer')} {usual:.3g} s"
    first = seen.first.get(rank, ())
    if len(first) < LONG:
        return None, ""
    before = median([timing.own for timing in first])
    changes = [
        median([timing.own for timing in seen.blocks[other][-LONG:]]) / max(1e-9, median([timing.own for timing in there]))
        for other, there in seen.first.items()
        if other != rank and other in seen.blocks and len(there) >= LONG
    ]
    usual = before * max(1.0, median(changes) if changes else 1.0)
    return usual, f"it took {before:.3g} s, and no other rank does the same work"


# -- links and data -----------------------------------------------------------------------------------------------------


def _slow_links(seen: StepBreakdowns, now: _Now) -> Iterator[Fault]:
    """Report slow links: all ranks wait longer than before although no rank's own work takes longer."""
    if len(now) < 2 or any(len(seen.first.get(rank, ())) < LONG for rank in now):  # noqa: PLR2004 (a single rank has no links)
        return
    before, least = _talk({rank: seen.first[rank] for rank in now}), _talk(now)
    step = median([_step(some) for some in now.values()])
    grew = [
        median([timing.own for timing in some]) / max(1e-9, median([timing.own for timing in seen.first[one]])) for one, some in now.items()
    ]
    lasting = all(sum(timing.talk > TALK * before for timing in some) >= len(some) - 1 for some in now.values())
    if not lasting or least - before < NOTICEABLE * step or max(grew) > SLOWER:
        return
    quote = (
        f"communication takes {least:.3g} s a step, it took {before:.3g} s (the least that any rank waits), while the ranks' own work takes"
    )
    quote += f" {median(grew):.2f} times as long as it did: links are slow, not computing"
    yield Fault(kind=LINKS.id, at=seen.at, step=seen.step, quote=quote, signature=LINKS.id)


def _slow_data(seen: StepBreakdowns, now: _Now) -> Iterator[Fault]:
    """Report ranks that wait for their data."""
    shares = {
        rank: median([timing.data / max(1e-9, timing.own + timing.talk + timing.data) for timing in some]) for rank, some in now.items()
    }
    late = {rank: share for rank, share in shares.items() if share >= DATA}
    if not late:
        return
    nodes = {seen.nodes[rank] for rank in late}
    worst = max(late, key=lambda rank: (late[rank], -rank))
    quote = f"rank {worst} on {seen.nodes[worst]} waits for its data for {late[worst]:.0%} of each step"
    if len(nodes) == 1 and len(late) < len(now) and len(set(seen.nodes.values())) > 1:
        yield _fault(HOST, seen, worst, f"{quote}; ranks on other nodes do not")
    else:
        yield Fault(kind=STALL.id, at=seen.at, step=seen.step, quote=f"{quote}, {len(late)} of {len(now)} ranks do", signature=STALL.id)


def _step(some: Sequence[StepBreakdown]) -> float:
    return median([timing.own + timing.talk + timing.data for timing in some])


def _fault(entry: FaultKind, seen: StepBreakdowns, rank: int, quote: str) -> Fault:
    node = seen.nodes[rank]
    return Fault(kind=entry.id, at=seen.at, node=node, rank=rank, step=seen.step, quote=quote, signature=f"{entry.id} rank {rank}")


# -- kinds --------------------------------------------------------------------------------------------------------------


def _sample(*timings: tuple[float, float, float]) -> Sample:
    def block(one: tuple[float, float, float]) -> tuple[StepBreakdown, ...]:
        return (StepBreakdown(own=one[0], talk=one[1], data=one[2]),) * LONG

    blocks = {rank: block(one) for rank, one in enumerate(timings)}
    nodes, first = {rank: f"n{rank}" for rank in blocks}, dict.fromkeys(blocks, block((0.30, 0.05, 0.0)))
    evidence = StepBreakdowns(
        at=0.0,
        step=100,
        nodes=nodes,
        first=first,
        blocks=blocks,
        roles=(tuple(range(len(timings))),),
    )
    return Sample(evidence)


_WELL: Final = _sample((0.31, 0.05, 0.0), (0.30, 0.06, 0.0), (0.32, 0.05, 0.0))

_define = partial(fault_kind, component="performance", recommended_action=RecommendedAction.MONITOR, healthy=_WELL)
COMPUTE: Final = _define(
    id="straggler-gpu",
    title="One rank computes more slowly than its peers",
    source="compute and communication times that ranks report",
    attributed_to=Attribution.GPU,
    action="check the clocks and temperature of its GPU, and what else runs there; migrate it (`checks.straggler: migrate`)",
    unhealthy=_sample((0.31, 0.25, 0.0), (0.52, 0.04, 0.0), (0.30, 0.26, 0.0)),
    weight=30,
    confused_with=("straggler-network", "straggler-host", "step-slow"),
)
HOST: Final = _define(
    id="straggler-host",
    title="One node loads data more slowly than its peers",
    source="data loading times that ranks report",
    attributed_to=Attribution.NODE,
    action="check the storage and the processors of the node",
    unhealthy=_sample((0.30, 0.25, 0.0), (0.30, 0.04, 0.25), (0.30, 0.25, 0.0)),
    weight=28,
    confused_with=("data-stall", "straggler-gpu"),
)
LINKS: Final = _define(
    id="straggler-network",
    title="Communication takes longer than before, or than elsewhere",
    source="compute and communication times that ranks report",
    attributed_to=Attribution.NETWORK,
    action="check the links between the nodes: rates, errors, other traffic",
    unhealthy=_sample((0.30, 0.25, 0.0), (0.31, 0.24, 0.0), (0.30, 0.25, 0.0)),
    weight=30,
    confused_with=("straggler-gpu", "step-slow"),
)
STALL: Final = _define(
    id="data-stall",
    title="Training waits for its data",
    source="data loading times that ranks report",
    attributed_to=Attribution.STORAGE,
    action="check the storage and the number of loader workers",
    unhealthy=_sample((0.30, 0.05, 0.25), (0.31, 0.04, 0.25), (0.30, 0.05, 0.24)),
    weight=26,
    confused_with=("straggler-host",),
)
DROPPED: Final = _define(
    id="step-slow",
    title="Steps take longer than before",
    source="step times that rank 0 reports",
    attributed_to=Attribution.PROCESS,
    action="look for the rank or node that differs from its peers, and for changes in the script's work since then",
    unhealthy=Sample(StepTimes(at=0.0, steps=tuple((step, 0.3 if step < 80 else 0.45) for step in range(9, 190)))),  # noqa: PLR2004
    healthy=Sample(StepTimes(at=0.0, steps=tuple((step, 0.3 + 0.01 * (step % 7)) for step in range(9, 190)))),
    weight=20,
    confused_with=("straggler-gpu", "straggler-network"),
)
