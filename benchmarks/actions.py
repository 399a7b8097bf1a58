"""How long the flow takes from an event to the orders of an action that answers it, and from an action that failed to the next one's.

One job under a real flow suffers one real fault after another; its policy file, which the flow reads anew, says before each which action is
to answer. Times come from the history: `fault_at` is when the observer of a fault (agent or rank) saw it, orders count as sent when the
agents have answered them. A wait, a question and the end have no orders: there it is the job's move.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.controlled import ControlledJob, kill_at_start, power_off_at_start
from holdfast.history import approvals, models, queries
from holdfast.history.approvals import KEEP, ApprovalAnswer

WANTED: Final = 3
NODES: Final[dict[str, Any]] = {"nnodes": "2:3", "nproc_per_node": 1, "spare_nodes": 5, "hot_spares": 0}
REPLACED: Final = 3
"""Spares that replace a node one by one; the other two are for a replacement that fails."""
IN_FORCE: Final = "holds from the next decision on"
"""What the flow says of a policy file that it has reread."""
QUIET: Final = 3
"""Steps without a fault before the next one."""
GENEROUS: Final = (
    "max_restarts_in_place: 10000\nmax_recoveries: 10000\nmax_recoveries_without_progress: 10000\n"
    "recurring: {times: 0, process_times: 0}\nflapping: {times: 0}\ncorrelated: {min_nodes: 0, min_share: 0%}\n"
)
ENDS: Final = {"wait-for-capacity": "WAITING", "request-approval": "WAITING", "fail": "FAILED"}
"""Actions without orders, and the state that the job comes to."""


@dataclass
class Times:
    """What was measured, in seconds, by action; a failed action is named with the one that followed it."""

    orders: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From the event, as its observer saw it, to the orders."""
    in_flow: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The same from the moment at which the flow's task began that explains and decides (`detected_at`)."""
    injected: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The same from the injection."""
    following: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From the fault that ended an attempt to the orders of the next action."""
    shrunk: list[float] = field(default_factory=list)
    """From the event until all ranks that are left have made a step."""
    missed: list[str] = field(default_factory=list)
    """Faults that another action answered than the one that was to."""


class Actions:
    """One job that comes to every action, some of them several times."""

    def __init__(self, place: Path, environment: dict[str, str], times: Times) -> None:
        self.times, self.policy, self._runs = times, place / "policy.yaml", False
        place.mkdir(parents=True)
        self.rule("retry-step", "replace-ranks", "restart-workers")
        self.job = ControlledJob(
            place,
            environment,
            count=WANTED + NODES["spare_nodes"],
            args=["--pace", "0", "--rest", "0.03"],
            policy=str(self.policy),
            checkpoint={"interval": 0},
            **NODES,
        )

    def rule(self, *actions: str, more: str = "") -> None:
        """Say which actions there are from now on, none of the others is tried; return once that is in force."""
        text, beside, before = f"{GENEROUS}actions: [{', '.join(actions)}]\n{more}", self.policy.with_suffix(".new"), self._in_force()
        if self.policy.exists() and self.policy.read_text() == text:
            return
        beside.write_text(text)
        beside.replace(self.policy)
        if self._runs:
            self.job.until(lambda: self._in_force() > before, f"the word that {self.policy.name} holds")

    def _in_force(self) -> int:
        """Return how often the flow has said that a changed policy holds."""
        if not self._runs:
            return 0
        return sum(IN_FORCE in one.text for one in queries.job_events(self.job.history, self.job.row.id))

    def play(self, turns: int) -> None:
        """Come to every action; to those that leave the job as it was *turns* times."""
        job = self.job
        try:
            job.until(lambda: job.chaos.step() > 0 and job.at_work(), "the first step", seconds=180)
            self._runs = True
            for _ in range(turns):
                self.ordinary()
            self.replaced()
            self.narrow()
            self.asked()  # now that the job has as few nodes as it may have
            job.until(lambda: len(job.chaos.ranks()) == WANTED and job.at_work(), "the job to be as wide as it was")
            for _ in range(turns):
                self.stranded()
            self.over()
        finally:
            job.close()

    # -- what is done to the job --------------------------------------------------------------------------------------

    def ordinary(self) -> None:
        """Answer a fault in the ways that leave the job on its nodes; twice so that the first attempt fails."""
        self.rule("retry-step", "restart-workers")
        self.answered("retry-step", lambda: self.job.trouble(1, "cut_connections()"))
        self.rule("replace-ranks", "restart-workers")
        self.answered("replace-ranks", lambda: self.job.chaos.kill(1))
        self.rule("restart-workers")
        self.answered("restart-workers", lambda: self.job.chaos.kill(1))
        self.rule("replace-ranks", "restart-workers")
        self.job.trouble_next(1, kill_at_start())
        self.answered("replace-ranks", lambda: self.job.chaos.kill(1))

    def replaced(self) -> None:
        """Give the place of a node to a spare one, and once to one that loses power while it takes it."""
        self.rule("replace-node", "restart-workers")
        for _ in range(REPLACED):
            self.answered("replace-node", lambda: self.job.chaos.kill(1))
        self.job.trouble_next(1, power_off_at_start(self.job.nodes))
        self.answered("replace-node", lambda: self.job.chaos.kill(1))

    def narrow(self) -> None:
        """Go on with a node less, as there is no spare left."""
        self.rule("shrink-restart")
        one = self.answered("shrink-restart", lambda: self.job.chaos.kill(1))
        if one.action == "shrink-restart" and one.downtime_s is not None:
            self.times.shrunk.append(one.downtime_s)

    def stranded(self) -> None:
        """Wait for capacity, also after a restart that failed."""
        self.rule("wait-for-capacity")
        self.answered("wait-for-capacity", lambda: self.job.chaos.kill(1))
        self.rule("restart-workers", "wait-for-capacity")
        self.job.trouble_next(1, kill_at_start())
        self.answered("restart-workers", lambda: self.job.chaos.kill(1))

    def asked(self) -> None:
        """Ask a person; once, for a node that one has kept is not asked about again."""
        self.rule("restart-workers", "wait-for-capacity", more="recommended_actions: {worker-sigkill: evict}\n")
        self.answered("request-approval", lambda: self.job.chaos.kill(1), then=self.reply)

    def reply(self) -> None:
        """Have a person keep the node that the job asks about."""
        (asked,) = self.job.until(lambda: approvals.pending_approvals(self.job.history), "the question")
        approvals.answer(self.job.history, asked.number, ApprovalAnswer(answer=KEEP, by="the benchmark"), now=time.time())

    def over(self) -> None:
        """Leave the job no action but the last."""
        self.rule("retry-step")
        self.answered("fail", lambda: self.job.chaos.kill(1))
        self.job.ends()

    # -- what came of it ----------------------------------------------------------------------------------------------

    def answered(self, action: str, act: Callable[[], float], then: Callable[[], None] = lambda: None) -> models.Incident:
        """Do *act* to a job that is at work, wait for the end of the incident, and note its times; *action* is to answer first."""
        job = self.job
        job.goes_on(QUIET)
        known, at = len(job.incidents()), act()
        job.until(lambda: len(job.incidents()) > known, f"an incident for {action}")
        then()
        job.until(lambda: all(one.closed_at for one in job.incidents()), f"the end of the incident for {action}")
        if action != "fail":
            job.goes_on(1)
        one = job.incidents()[known]
        self.note(action, one, at)
        return job.incidents()[known]

    def note(self, action: str, one: models.Incident, injected: float) -> None:
        """Take an incident's times from the history."""
        history = self.job.history
        decided = queries.decisions(history, incident_id=one.id)
        faults = queries.faults(history, incident_id=one.id)
        moves = queries.transitions(history, self.job.row.id)
        if decided[0].action != action:
            self.times.missed.append(f"{action}: {decided[0].action}, because {decided[0].reason}")
            return
        for place, decision in enumerate(decided):
            until = decided[place + 1].at if place + 1 < len(decided) else float("inf")
            sent = ordered(decision, one, moves, until)
            if sent is None:
                continue
            if not place:
                self.times.orders[action].append(sent - one.fault_at)
                self.times.in_flow[action].append(sent - one.detected_at)
                self.times.injected[action].append(sent - injected)
                continue
            before = decided[place - 1]
            if before.action == "request-approval":  # a person has answered: nothing failed
                continue
            new = [fault.at for fault in faults if before.at < fault.at <= decision.at]
            faulted = [move.at for move in moves if move.event == "faulted" and before.at < move.at <= decision.at]
            self.times.following[f"{before.action} -> {decision.action}"].append(sent - min([*new, *faulted]))


def ordered(decision: models.DecisionRecord, one: models.Incident, moves: list[models.JobTransition], until: float) -> float | None:
    """Return when the orders of *decision* had gone out; nothing when it did not come to that before the next one."""
    if decision.action in ENDS:
        return next((move.at for move in moves if move.after == ENDS[decision.action] and decision.at <= move.at < until), None)
    sent = [order["at"] for order in (one.facts or {}).get("orders", ()) if decision.at <= order["at"] < until]
    return sent[0] if sent else None
