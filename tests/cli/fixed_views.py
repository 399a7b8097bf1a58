"""Views of jobs with every value fixed, and what a terminal of a given size shows of them."""

from __future__ import annotations

import dataclasses
import io
import math
import time
from collections.abc import Sequence

from rich.console import Console

from holdfast.cli.changes import JobChange
from holdfast.cli.frame import Frame
from holdfast.cli.job_view import JobView
from holdfast.cli.node_view import JobNode, JobNodes
from holdfast.history.models import Checkpoint, DecisionRecord, Generation, Incident, Job, JobTransition, Snapshots, StepRecord

HINT = "Ctrl-C stops the job · closing the terminal does not"


def noon() -> float:
    """Return today's noon: a time of day is written without its date on its own day."""
    return time.mktime((*time.localtime()[:3], 12, 0, 0, 0, 0, -1))


def drawn(view: JobView, columns: int, lines: int, *, events: Sequence[JobChange] = (), notice: str = "") -> list[str]:
    """Return the picture of *view* on a terminal of that size, without colours."""
    console = Console(file=io.StringIO(), width=columns, height=lines, force_terminal=True, color_system=None, highlight=False)
    console.print(Frame(view, hint=HINT, notice=notice, events=events))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def event(text: str, seconds: float) -> JobChange:
    """Return a note of the job, so long after noon."""
    return JobChange(event="note", at=noon() + seconds, text=text, record={})


def a_training_job(*, nodes: int = 2, ranks: int = 2, name: str = "byte-gpt") -> JobView:
    """Return a job in its 42nd minute: all is well, an incident lies behind it, a spare node has two hot spares."""
    zero = noon()
    at = zero + 2520
    job = Job(id="1", name=name, cluster={"name": "lab"}, directory="/jobs", at=zero)
    names = [f"gpu-{number:02d}" for number in range(1, nodes + 1)]
    held = {node: list(range(ranks * place, ranks * (place + 1))) for place, node in enumerate(names)}
    members = [JobNode(name=node, ranks=held[node], condition="healthy") for node in names]
    spare = JobNode(name=f"gpu-{nodes + 1:02d}", hot_spares=2, condition="healthy")
    steps = [
        StepRecord(job_id="1", generation=2, step=step, at=at - (6000 - step) * 0.4, seconds=0.4, loss=2 + 2 / math.sqrt(step - 5890))
        for step in range(5900, 6001)
    ]
    return JobView(
        job=job,
        at=at,
        move=transition("RUNNING", "every worker made its first step", zero + 910),
        generation=Generation(id="g2", job_id="1", number=2, at=zero + 909, world_size=nodes * ranks, ranks=held),
        until=20_000,
        steps=steps,
        checkpoint=Checkpoint(job_id="1", at=at - 40, step=5900, generation=2, path="/jobs/step-5900", seconds=1.0),
        snapshots=Snapshots(job_id="1", generation=2, at=at - 0.5, step=5998, age_steps=2, age_s=0.9, replica_step=5990, interval_steps=2),
        incidents=[an_incident(1, "node-lost", "node gpu-09", zero + 900, closed=True)],
        nodes=JobNodes(members=members, spares=[spare]),
    )


def transition(after: str, reason: str, at: float) -> JobTransition:
    """Return a transition of the job's state."""
    return JobTransition(job_id="1", at=at, before="", event="", after=after, reason=reason, generation=2)


def an_incident(number: int, kind: str, subject: str, at: float, *, closed: bool = False) -> Incident:
    """Return an incident, detected after 1.2 s."""
    one = Incident(
        id=f"i{number}", job_id="1", number=number, kind=kind, target=subject, fault_at=at, detected_at=at + 1.2, generation_before=2
    )
    one.action = "replace-node"
    if closed:
        one.closed_at, one.outcome, one.downtime_s, one.steps_lost, one.generation_after = at + 9, "recovered", 8.4, 12, 2
    return one


def a_recovering_job(*, nodes: int = 2, ranks: int = 2, phase: int = 3, name: str = "byte-gpt") -> JobView:
    """Return the same job while the loss of its first node is recovered from, in the phase of that place (of five)."""
    view = a_training_job(nodes=nodes, ranks=ranks, name=name)
    assert view.generation is not None
    fault = view.at - 4.0
    one = an_incident(2, "node-lost", "node gpu-01", fault)
    states = ("DIAGNOSING", "DECIDING", "ISOLATING", "RESCHEDULING", "RESUMING")
    begun = (1.2, 1.35, 1.36, 1.6, 2.1)
    moves = [transition(state, f"the reason of {state}", fault + begun[place]) for place, state in enumerate(states[: phase + 1])]
    reason = "gpu-01 does not answer over SSH and its agent is gone; its ranks start again on gpu-03, and all others go back to step 5,998"
    decision = DecisionRecord(job_id="1", incident_id="i2", at=fault + 1.36, action="replace-node", rule="ReplaceNode()", reason=reason)
    lost, *others = view.nodes.members
    broken = JobNode(
        name=lost.name, ranks=lost.ranks, condition="lost", reason="its agent is unreachable for 3.1 s, and so is the node", is_bad=True
    )
    if nodes > 3:
        others[40] = JobNode(name=others[40].name, ranks=others[40].ranks, condition="suspect", reason="gpu-thermal on GPU 3", is_bad=True)
    return dataclasses.replace(
        view,
        move=moves[-1],
        transitions=moves,
        incidents=[*view.incidents, one],
        decision=decision if phase > 1 else None,
        nodes=JobNodes(members=[broken, *others], spares=view.nodes.spares),
    )
