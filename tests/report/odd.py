"""Histories that are not as one would wish: empty, cut short, broken, enormous, or full of strangers' text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from holdfast.history.models import Incident, Job, Lease, Phase, StepRecord
from holdfast.history.store import History
from tests.report import filled

HOSTILE: Final = (
    '</pre><script>alert("x")</script><img src=http://evil.example/a.png onerror=alert(1)> {{ 7*7 }} $\\alpha$ \x1b[31m\x00 \u202egnp'
)


SPIKE: Final = 9.5
"""The one bad loss of a long run."""


def nothing(history: History) -> Job:
    """Write a job that was submitted, and no more."""
    return filled.script(history).write()


def unmanaged(history: History) -> Job:
    """Write a job whose script reports nothing, and whose node was lost."""
    on = filled.launched(history, spec={"name": "bytes-gpt", "command": ["bash", "train.sh"], "nnodes": 2, "nproc_per_node": 2})
    on.clock += 40
    filled.lost_node(on, 1)
    on.clock += 300
    on.move("finished", "COMPLETED", "every worker exited 0")
    return on.write()


def unmanaged_steps(history: History) -> Job:
    """Write a job that reports steps and no loss."""
    on = filled.launched(history)
    on.train(200, loss=False)
    filled.killed(on)
    on.train(300, loss=False)
    on.move("stop-asked", "CANCELLED", "asked to stop by ada")
    return on.write()


def one_step(history: History) -> Job:
    """Write a job that ended after its first step."""
    on = filled.launched(history)
    on.train(1)
    on.move("finished", "COMPLETED", "every worker said that all its steps are done")
    return on.write()


def broken_losses(history: History) -> Job:
    """Write a job whose loss became NaN and infinite, and once enormous."""
    on = filled.launched(history)
    on.train(300)
    for row in on.rows:
        if isinstance(row, StepRecord):
            spoilt = {120: math.inf, 200: 60.0}.get(row.step, math.nan if row.step > 260 else None)
            row.loss = row.loss if spoilt is None else spoilt
    return on.write()


def no_finite_loss(history: History) -> Job:
    """Write a job whose every loss is NaN."""
    on = filled.launched(history)
    on.train(50)
    for row in on.rows:
        if isinstance(row, StepRecord):
            row.loss = math.nan
    return on.write()


def recovering(history: History) -> Job:
    """Write a job in the middle of its second recovery."""
    on = filled.launched(history)
    on.train(122)
    filled.killed(on)
    on.train(180)
    reason = "no rank made progress for 2.4 s"
    on.suffer(2, [on.fault("job-hang", "job", root=True, evidence={"quote": reason})], detect=2.4, reason=reason)
    return on.write()


def running(history: History) -> Job:
    """Write a job that its controller runs."""
    on = filled.launched(history)
    on.train(122)
    filled.killed(on)
    on.train(180)
    on.add(
        Lease(job_id=on.job.id, epoch=1, holder="a", host="h", pid=1, pid_started=1.0, expires_at=filled.BEGAN + 1e9,
              flow_run_url="http://127.0.0.1:4200/runs/flow-run/1")
    )  # fmt: skip
    return on.write()


def failed(history: History) -> Job:
    """Write a job that its own script broke, with text from strangers wherever there can be any."""
    on = filled.launched(history, spec={"name": "bytes-gpt", "script": HOSTILE, "policy": HOSTILE, "nodes": HOSTILE})
    on.train(40)
    on.record_event(HOSTILE)
    on.stand(HOSTILE, "lost", HOSTILE)
    evidence = {"detail": HOSTILE + "\n" + HOSTILE, HOSTILE: [HOSTILE]}
    fault = on.fault("user-error", HOSTILE, recommended_action="user-error", attributed_to="user_code", root=True, evidence=evidence)
    incident = on.suffer(1, [fault], detect=0.03, reason=HOSTILE)
    on.decide(incident, "fail", HOSTILE, HOSTILE, act={HOSTILE: HOSTILE}, passed_over={HOSTILE: HOSTILE})
    incident.kind, incident.outcome, incident.closed_at = HOSTILE, "failed", on.clock
    on.save(seconds=0.1, problem=HOSTILE, reason=HOSTILE)
    on.gather_ranks({HOSTILE: [0]}, HOSTILE)
    on.add(Phase(job_id=on.job.id, incident_id=incident.id, position=0, name=HOSTILE, seconds=1.0))
    on.move("failed", "FAILED", HOSTILE)
    return on.write()


def many_incidents(history: History, number: int = 60) -> Job:
    """Write a job that came through *number* incidents, one of which waited a day for capacity."""
    on = filled.launched(history)
    on.step_seconds = 2.0
    for each in range(1, number + 1):
        on.train(each * 60, save_every=20)
        filled.killed(on, each)
        if each == number // 2:
            _wait_a_day(on)
    on.train(number * 60 + 100)
    return on.write()


def _wait_a_day(on: filled.Script) -> None:
    incident = next(row for row in reversed(on.rows) if isinstance(row, Incident))
    phase = next(row for row in on.rows if isinstance(row, Phase) and row.incident_id == incident.id and row.name == "reschedule")
    phase.seconds += 86_400
    incident.downtime_s = (incident.downtime_s or 0) + 86_400
    on.clock += 86_400


def many_nodes(history: History, number: int = 300) -> Job:
    """Write a job on *number* nodes, of which one is replaced."""
    on = filled.script(history, spec={"name": "wide", "command": ["train"], "nnodes": number, "nproc_per_node": 8})
    ranks = {f"gpu-cluster-a-rack-{node // 16:02d}-node-{node:04d}": [node * 8 + rank for rank in range(8)] for node in range(number)}
    for node in ranks:
        on.stand(node, "healthy", "its agent answers")
    on.gather_ranks(ranks, f"first start: {number} of {number} nodes")
    on.move("started", "RUNNING", "every worker made its first step", seconds=31)
    on.train(400)
    lost = next(iter(ranks))
    on.stand(lost, "lost", "does not answer")
    incident = on.suffer(1, [on.fault("node-lost", f"node {lost}", root=True)], detect=0.1, reason="node-lost")
    moved = {("gpu-cluster-a-rack-99-node-9999" if node == lost else node): held for node, held in ranks.items()}
    on.recover(incident, moved, back_to=350, times=(0.1, 0.01, 1.2, 4.1, 2.2, 3.9, 5.0), reason="one spare for one lost node")
    on.train(900)
    return on.write()


def long_run(history: History, steps: int = 1_000_000) -> Job:
    """Write a job of a great many steps with one spike, a rollback in the middle, and a clock of months."""
    on = filled.launched(history)
    on.step, on.step_seconds = steps // 2 - 500, 5.0
    middle = on.step
    on.clock = filled.BEGAN + 60 + middle * 5.0
    filled.killed(on)
    rows = [_row(on.job.id, 1, step, filled.BEGAN + 60 + step * 5.0) for step in range(1, middle + 1)]
    resumed = on.clock
    rows += [_row(on.job.id, 2, step, resumed + (step - middle + 22) * 5.0) for step in range(middle - 21, steps + 1)]
    rows[steps * 7 // 9]["loss"] = SPIKE
    on.clock = rows[-1]["at"]
    on.move("finished", "COMPLETED", "every worker said that all its steps are done", seconds=1.0)
    job = on.write()
    with history.session() as session:
        session.connection().execute(StepRecord.__table__.insert(), rows)  # type: ignore[attr-defined]  # SQLModel hides its table
    return job


def _row(job: str, generation: int, step: int, at: float) -> dict[str, Any]:
    loss = 2.2 + 6 * (step + 30) ** -0.35 + 0.03 * math.sin(step * 12.9898) * math.sin(step * 78.233)
    return {"job_id": job, "generation": generation, "step": step, "at": at, "seconds": 5.0, "loss": loss}


ODD: Final[dict[str, Callable[[History], Job]]] = {
    "nothing": nothing,
    "unmanaged": unmanaged,
    "unmanaged_steps": unmanaged_steps,
    "one_step": one_step,
    "broken_losses": broken_losses,
    "no_finite_loss": no_finite_loss,
    "recovering": recovering,
    "running": running,
    "failed": failed,
    "many_incidents": many_incidents,
    "many_nodes": many_nodes,
}
