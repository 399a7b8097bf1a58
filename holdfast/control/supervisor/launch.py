"""Bring a job to work: borrow nodes and look at them, agree on the first membership, start the workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.control.faults.diagnosis_inputs import compile_log_patterns
from holdfast.control.recovery.restart import agree, start_workers
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.watch import SLICE, ending, watch
from holdfast.errors import NodeError, NotEnoughNodes, OperatorError, WorldError
from holdfast.report.wording import plural, some
from holdfast.spec.check import gpu_problems, short_of_gpus
from policies.placement import place
from policies.states import Event, Transition

REASONS: Final = 4
"""Most reasons that are told when there are too few nodes: hundreds may show as many fingerprints."""


def begin(run: JobController) -> Transition | None:
    """Try once to bring the job to work; None where that is to be tried again, or took longer than a slice."""
    if not run.generations.state.all_started() or not run.generations.members:
        try:
            if (turn := borrow(run)) is not None or not run.nodes.allocations.has_enough_nodes():
                return turn
            members = gather(run)
        except NotEnoughNodes as error:
            if not run.nodes.allocations.may_retry_launch():
                return Transition(Event.GAVE_UP, str(error))
            run.log.record_event(f"the launch waits for other nodes: {error}")
            return None
        except OperatorError as error:
            return Transition(Event.GAVE_UP, str(error))
        try:
            agree(run, place(members, run.spec.nodes.ranks), reason="launch")
        except NodeError as error:  # before any rank ran it is no incident: the node is let go, and the next turn gathers anew
            run.agents.drop(error.node)
            run.log.record_event(f"{error.node} is left out of the launch: {error}")
            return None
        start_workers(run)
        compile_log_patterns()
    return watch(run, seconds=SLICE, until=run.generations.begun)


def borrow(run: JobController) -> Transition | None:
    """Wait for nodes that are lent until there are enough to start on, or a slice is over; raise `OperatorError` when none ever come."""
    until, told = time.monotonic() + SLICE, ""
    while not run.nodes.allocations.has_enough_nodes() and time.monotonic() < until:
        run.pump()
        if (turn := ending(run)) is not None:
            return turn
        if isinstance(run.nodes.allocations.refused, OperatorError):
            raise run.nodes.allocations.refused
        if (words := run.nodes.allocations.describe()) != told and not run.nodes.allocations.has_enough_nodes():
            told = words
            run.log.record_event(f"waiting for {plural(run.spec.nodes.wanted, 'node')}: {words}")
    return None


def gather(run: JobController) -> tuple[str, ...]:
    """Bring up agents on as many nodes as the job wants, spares included; return those that will hold ranks.

    Nodes that something speaks against are used only where there are no others.
    """
    nodes = run.spec.nodes
    every, refused = nodes.wanted + nodes.spare, []
    run.nodes.preflight.remember()
    candidates = run.nodes.preflight.by_preference(run.nodes.free())
    while missing := _missing(run, every, candidates):
        batch, candidates = candidates[:missing], candidates[missing:]
        run.nodes.preflight.begin(batch)
        answers = run.agents.each(batch, run.agents.bring_up)
        refused += [f"{node}: {answer}" for node, answer in answers.items() if isinstance(answer, WorldError)]
        run.nodes.preflight.finish()
        candidates = run.nodes.preflight.by_preference(candidates)
    order = run.agents.source.names()
    alive = set(run.agents.alive())
    ready = run.nodes.preflight.by_preference(run.nodes.eligibility.usable(node for node in order if node in alive))
    missing_for = [*refused, *run.nodes.eligibility.left_out(), *without_gpus(run), *reasons(run.agents.unusable_nodes)]
    if len(ready) < nodes.wanted:
        raise NotEnoughNodes(nodes.wanted, len(ready), run.cluster.name, "; ".join(missing_for))
    for words in run.nodes.eligibility.news(order):
        run.log.record_event(words)
    ready, surplus = ready[:every], ready[every:]
    _tell_of_unhealthy(run, ready, order)
    for node in surplus:
        run.agents.drop(node)
    short = every - len(ready)
    if short:
        run.log.record_event(
            f"{short} of {nodes.spare} spare node(s) could not be had" + (f": {'; '.join(missing_for)}" if missing_for else "")
        )
    run.faults.network_check.begin(ready)
    return tuple(ready[: nodes.wanted])


def without_gpus(run: JobController) -> list[str]:
    """Say which local nodes have too few GPUs of their own, and what to do when that leaves the job too few nodes."""
    short = short_of_gpus(run.spec, run.cluster)
    words = [f"{some(sorted(short))} with fewer GPUs of its own than {run.spec.nodes.ranks} rank(s)"] if short else []
    return words + [one.cure for one in gpu_problems(run.spec, run.cluster)]


def reasons(nodes: Mapping[str, str]) -> Iterator[str]:
    """Yield each reason once, with the nodes that it speaks of; of many reasons the first."""
    found: dict[str, list[str]] = {}
    for node, why in nodes.items():
        found.setdefault(why, []).append(node)
    yield from (f"{some(held)}: {why}" for why, held in itertools.islice(found.items(), REASONS))
    if len(found) > REASONS:
        yield f"and so on, {len(nodes)} nodes in all"


def _missing(run: JobController, every: int, candidates: list[str]) -> int:
    """Return how many more nodes to bring up: as many as there are too few, and for unhealthy ones as long as there are better ones."""
    alive = run.agents.alive()
    better = sum(not run.nodes.preflight.objection(node) for node in candidates)
    unhealthy = sum(bool(run.nodes.preflight.objection(node)) for node in alive)
    return max(0, min(len(candidates), max(every - len(alive), min(better, every - len(alive) + unhealthy))))


def _tell_of_unhealthy(run: JobController, ready: list[str], order: list[str]) -> None:
    """Record how the nodes of the launch stand, which were passed over for others, and which are used for want of others."""
    for node in ready:
        why = run.nodes.preflight.objection(node)
        sound = run.nodes.preflight.is_healthy(node)
        run.log.record_node_status(node, "healthy" if sound else "suspect", "its agent is up" if sound else why)
    place = {node: number for number, node in enumerate(order)}
    well = [place[node] for node in ready if not run.nodes.preflight.objection(node)]
    used = set(ready)
    passed = [node for node in order[: max(well, default=0)] if node not in used]
    for why, nodes in run.nodes.preflight.news(passed).items():
        run.log.record_event(f"{', '.join(nodes)} passed over: {why}")
    for why, nodes in run.nodes.preflight.news(ready[: run.spec.nodes.wanted]).items():
        run.log.record_event(f"{', '.join(nodes)}: {why}. There is no better node, so the job runs there")
