"""Launch a job: wait for nodes, check them, agree on the first membership, start the workers."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.control.faults.diagnosis import compile_log_patterns
from holdfast.control.recovery.restart import begin_generation, start_workers
from holdfast.control.supervisor.controller import SLICE, JobController, ending, watch
from holdfast.errors import LeaseUnconfirmed, NodeError, NotEnoughNodes, OperatorError, WorldError
from holdfast.log import note
from holdfast.plurals import plural
from holdfast.policies.nodes.placement import place
from holdfast.policies.states import Event, Transition
from holdfast.report.text.wording import listing
from holdfast.spec.check import gpu_problems, short_of_gpus

log = logging.getLogger("holdfast.control")

REASONS: Final = 4
"""Most reasons that are reported when there are too few nodes: each of hundreds may have its own."""


def begin(run: JobController) -> Transition | None:
    """Try once to launch the job; return None where that is to be tried again, or took longer than a slice."""
    if not run.generations.state.all_started() or not run.generations.members:
        try:
            if (turn := wait_for_allocation(run)) is not None or not run.nodes.allocations.has_enough_nodes():
                return turn
            members = gather(run)
        except (NotEnoughNodes, LeaseUnconfirmed) as error:
            if isinstance(error, LeaseUnconfirmed):  # a problem of this controller, such as a busy database, and not of the nodes
                note(log, "launch.waits", level=logging.WARNING, job=run.job.name, why=error)
            elif run.nodes.allocations.may_retry_launch():
                run.log.record_event(f"the launch waits for other nodes: {error}")
            else:
                return Transition(Event.FAILED, str(error))
            return None
        except OperatorError as error:
            return Transition(Event.FAILED, str(error))
        try:
            begin_generation(run, place(members, run.generations.ranks_per_node), reason="launch")
        except NodeError as error:  # before any rank ran it is no incident: the node is released, and the next try chooses again
            run.agents.drop(error.node)
            run.log.record_event(f"{error.node} is left out of the launch: {error}")
            return None
        start_workers(run)
        compile_log_patterns()
    return watch(run, seconds=SLICE, until=run.generations.begun)


def wait_for_allocation(run: JobController) -> Transition | None:
    """Wait until enough nodes are allocated to the job, or a slice is over; raise `OperatorError` when none will come."""
    until, reported = time.monotonic() + SLICE, ""
    while not run.nodes.allocations.has_enough_nodes() and time.monotonic() < until:
        run.pump()
        if (turn := ending(run)) is not None:
            return turn
        if isinstance(run.nodes.allocations.refused, OperatorError):
            raise run.nodes.allocations.refused
        if (text := run.nodes.allocations.describe()) != reported and not run.nodes.allocations.has_enough_nodes():
            reported = text
            run.log.record_event(f"waiting for {plural(run.spec.max_nodes, 'node')}: {text}")
    return None


def gather(run: JobController) -> tuple[str, ...]:
    """Bring up agents on as many nodes as the job wants, spares included; return those that will hold ranks.

    Suspect nodes are used only where there are no others. Raise `NotEnoughNodes`, or `LeaseUnconfirmed` if that is why there are too few.
    """
    spec, unconfirmed = run.spec, list[LeaseUnconfirmed]()
    every, refused = spec.max_nodes + spec.spare_nodes, []
    run.nodes.preflight.remember()
    if not run.agents.alive():
        run.nodes.rank_count.forget()
    candidates = run.nodes.preflight.by_preference(run.nodes.free())
    while missing := _missing(run, every, candidates):
        batch, candidates = candidates[:missing], candidates[missing:]
        run.nodes.preflight.begin(batch)
        answers = run.agents.each(batch, run.agents.bring_up)
        run.nodes.rank_count.settle(answers)
        refused += [f"{node}: {answer}" for node, answer in answers.items() if isinstance(answer, WorldError)]
        unconfirmed += [answer for answer in answers.values() if isinstance(answer, LeaseUnconfirmed)]
        run.nodes.preflight.finish()
        candidates = run.nodes.preflight.by_preference(candidates)
    order = run.agents.source.names()
    alive = set(run.agents.alive())
    ready = run.nodes.preflight.by_preference(run.nodes.eligibility.usable(node for node in order if node in alive))
    missing_for = [*refused, *run.nodes.eligibility.left_out(), *without_gpus(run), *reasons(run.agents.unusable_nodes)]
    if len(ready) < spec.max_nodes:
        if unconfirmed:
            raise unconfirmed[0]
        raise NotEnoughNodes(spec.max_nodes, len(ready), run.cluster.name, "; ".join(missing_for))
    for text in run.nodes.eligibility.news(order):
        run.log.record_event(text)
    ready, surplus = ready[:every], ready[every:]
    _record_node_choice(run, ready, order)
    for node in surplus:
        run.agents.drop(node)
    short = every - len(ready)
    if short:
        of = f"of {spec.spare_nodes}"
        unavailable = plural(short, f"spare node {of} is not available", f"spare nodes {of} are not available")
        run.log.record_event(unavailable + (f": {'; '.join(missing_for)}" if missing_for else ""))
    run.faults.network_check.begin(ready)
    return tuple(ready[: spec.max_nodes])


def without_gpus(run: JobController) -> list[str]:
    """Describe which local nodes have too few GPUs of their own, and what to do when that leaves the job too few nodes."""
    short = short_of_gpus(run.spec, run.cluster)
    found = []
    if short:
        whose = "its own" if len(short) == 1 else "their own"
        found = [f"{listing(sorted(short))} with fewer than {plural(run.spec.ranks_per_node, 'GPU')} of {whose}"]
    return found + [one.cure for one in gpu_problems(run.spec, run.cluster)]


def reasons(nodes: Mapping[str, str]) -> Iterator[str]:
    """Yield each reason once, with its nodes; of many reasons the first."""
    found: dict[str, list[str]] = {}
    for node, why in nodes.items():
        found.setdefault(why, []).append(node)
    yield from (f"{listing(affected)}: {why}" for why, affected in itertools.islice(found.items(), REASONS))
    if len(found) > REASONS:
        yield f"and so on, {len(nodes)} nodes in all"


def _missing(run: JobController, every: int, candidates: list[str]) -> int:
    """Return how many more nodes to bring up: those that are missing, and one for each unhealthy node while better ones are left."""
    alive = run.agents.alive()
    better = sum(not run.nodes.preflight.objection(node) for node in candidates)
    unhealthy = sum(bool(run.nodes.preflight.objection(node)) for node in alive)
    return max(0, min(len(candidates), max(every - len(alive), min(better, every - len(alive) + unhealthy))))


def _record_node_choice(run: JobController, ready: list[str], order: list[str]) -> None:
    """Record the status of the nodes of the launch, which were passed over, and which are used for lack of better ones."""
    for node in ready:
        why = run.nodes.preflight.objection(node)
        sound = run.nodes.preflight.is_healthy(node)
        run.log.record_node_status(node, "healthy" if sound else "suspect", "its agent is up" if sound else why)
    place = {node: number for number, node in enumerate(order)}
    healthy = [place[node] for node in ready if not run.nodes.preflight.objection(node)]
    used = set(ready)
    passed = [node for node in order[: max(healthy, default=0)] if node not in used]
    for why, nodes in run.nodes.preflight.news(passed).items():
        run.log.record_event(f"{', '.join(nodes)} passed over: {why}")
    for why, nodes in run.nodes.preflight.news(ready[: run.spec.max_nodes]).items():
        run.log.record_event(f"{', '.join(nodes)}: {why}. There is no better node, so the job runs there")
