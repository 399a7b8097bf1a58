"""Reschedule: agree on the next membership, or wait for the nodes it needs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from prefect import task
from prefect.cache_policies import NO_CACHE

from detectors.evidence import StartTrouble
from holdfast.control import runs
from holdfast.control.lineup import Lineup
from holdfast.control.run import Run
from holdfast.errors import NodeTrouble, WorldError
from policies.ladder import Rung
from policies.placement import Membership, members_after, place
from policies.states import Event
from tasks import takeover
from tasks.turn import Turn

KNOCK: Final = 1.0
"""Seconds between two looks for nodes that are back."""


@task(task_run_name="reschedule {job}", cache_policy=NO_CACHE)
def reschedule(job: str) -> Turn:
    """Give every rank a node."""
    run = runs.of(job)
    assert run.incident is not None
    decision = run.incident.decision
    assert decision is not None
    if decision.rung is Rung.TAKE_OVER:
        return takeover.reschedule(run, decision)
    after = members_after(run.regular(), decision)
    if decision.rung is Rung.WAIT_FOR_CAPACITY and len(after) < decision.need:
        return Turn(Event.SHORT, f"{len(after)} of {decision.need} node(s) are there")
    try:
        agree(run, place(after, run.spec.nodes.ranks), because=decision.because)
    except NodeTrouble as error:
        run.board.evidence.append(StartTrouble(node=error.node, at=time.time(), why=str(error)))
        return Turn(Event.FAULTED, str(error))
    return Turn(Event.PLACED, f"generation {run.generation} on {', '.join(after)}")


def agree(run: Run, membership: Membership, *, because: str) -> None:
    """Begin the next generation with *membership*: rank 0's node gives a port, everybody learns where everybody is."""
    first = next(iter(membership))
    port = int(run.fleet.channel(first).order("port")["port"])
    number = run.newest + 1
    every = run.choose_every(f"generation {number}", len(membership))
    lineup = Lineup.fresh(number, membership, (run.fleet.source.address(first), port), every=every)
    run.enter_generation(number, membership, lineup=lineup, because=because)


@task(task_run_name="wait for capacity for {job}", cache_policy=NO_CACHE)
def wait_for_capacity(job: str) -> Turn | None:
    """Wait until the nodes that the decision needs are there: lost ones that came back, or any free one."""
    run = runs.of(job)
    incident = run.incident
    assert incident is not None
    assert incident.decision is not None
    held = run.regular()
    limit = run.spec.deadlines.wait_for_capacity.total_seconds()
    slice_end = time.monotonic() + 300.0
    while time.monotonic() < slice_end:
        have = members_after(held, incident.decision)
        alive = run.fleet.alive()
        ready = [node for node in have if node in alive]
        found = [node for node in alive if node not in have]
        if len(ready) + len(found) >= incident.decision.need:
            more = found[: max(0, len(held) - len(ready))]
            gone = tuple(node for node in held if node not in ready)
            incident.decision = replace(incident.decision, drop=gone, add=tuple(n for n in ready if n not in held) + tuple(more))
            incident.lap("wait", time.time())
            return Turn(Event.GAINED, f"{', '.join(found) or 'enough nodes'} came back")
        if run.stop_asked:
            return Turn(Event.STOP_ASKED, "a person asked the job to stop")
        if time.time() - incident.rung_at > limit:
            incident.tried.append(Rung.WAIT_FOR_CAPACITY)
            incident.lap("wait", time.time())
            return Turn(Event.FAULTED, f"no capacity came within {limit:.0f} s")
        knock(run, missing=incident.decision.need - len(ready))
    return None


def knock(run: Run, *, missing: int) -> None:
    """Try to bring up free nodes, then go on listening for a second."""
    free = [node for node in run.fleet.free() if node not in run.fleet.alive()][:missing]
    for node, answer in run.fleet.each(free, run.fleet.bring_up).items():
        if not isinstance(answer, WorldError):
            assert run.incident is not None
            run.incident.lost.discard(node)
            run.stand(node, "healthy", "it answers, and its agent is up")
    until = time.monotonic() + KNOCK
    while time.monotonic() < until and not run.stop_asked:
        run.pump()
