"""Chaos runs that were recorded (`benchmarks.handling --only chaos`), and what the simulator predicts of them.

It gets the list of faults: what was hit, and when, in training or how long after the fault before. The phase times come from other runs.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from statistics import fmean, median
from typing import Any, Final

from holdfast.policies.recovery.case import IN_PROCESS, RecoveryAction
from holdfast.simulator.causes import Cause, Symptom
from holdfast.simulator.engine import simulate
from holdfast.simulator.fault_sources import ControllerAway, NodeFault, PacedEvent, SimulatedEvent
from holdfast.simulator.history_times import FAILED, HistoryTimes, MeasuredRecovery, times_of
from holdfast.simulator.phase_times import PhaseTime
from holdfast.simulator.scenario import Scenario
from holdfast.simulator.systems import SYSTEMS, LostAttempts, RecoverySystem
from holdfast.spec.policy import PolicyFile, policy_of

DATA: Final = "data/chaos_runs.json.gz"
STUCK: Final = "hangs-at-first-step"
OTHERS: Final = 5
"""Runs that a prediction is calibrated with."""
DRAWS: Final = 20
"""Simulations of each run, with other phase times; the prediction is their mean."""
SLACK: Final = 0.1
"""Seconds from the hit to what is known as the time of the fault."""
RETURNED: Final = 1.0
"""Seconds until a node whose agent ended is of use again."""
SEVERAL: Final = ("two-ranks-killed", "all-ranks-killed", "killed-in-recovery")
"""Kinds that hit several ranks one after the other: the second one may hit an attempt to replace the first."""
GONE: Final = ("agent-killed", "node-cut-off", "node-power-cut")
"""Kinds that take a node away: an attempt to replace its ranks may fail, and its snapshots are gone."""
_KILLED: Final = Cause(name="killed rank", kind="worker-sigkill", of_process=True)
_STUCK: Final = Cause(name="hang in the first step", kind="job-hang", symptom=Symptom.NO_FIRST_STEP, of_process=True, names_rank=True)
_LOST: Final = Cause(name="lost agent", kind="agent-lost", symptom=Symptom.NODE_LOST)


def _stalls(kind: str) -> Cause:
    return Cause(name=kind, kind=kind, symptom=Symptom.HANG, of_process=True, names_rank=True)


CAUSES: Final[Mapping[str, Cause]] = {
    **{name: replace(_KILLED, name=name) for name in ("rank-sigkill", *SEVERAL, "flow-and-rank-killed")},
    "rank-sigsegv": Cause(name="rank-sigsegv", kind="worker-sigsegv", of_process=True),
    "rank-sigabrt": Cause(name="rank-sigabrt", kind="worker-sigabrt", of_process=True),
    "rank-raises": Cause(name="rank-raises", kind="worker-exception", of_process=True),
    "rank-exits": Cause(name="rank-exits", kind="worker-exit-code", of_process=True),
    "rank-stopped": _stalls("worker-stopped"),
    "rank-hangs": _stalls("job-hang"),
    "wrong-collective": _stalls("collective-mismatch"),
    "connections-cut": Cause(name="connections-cut", kind="group-broken", symptom=Symptom.HANG, of_process=True),
    "node-power-cut": Cause(name="node-power-cut", kind="node-lost", symptom=Symptom.NODE_LOST),
    "node-cut-off": _LOST,
    "agent-killed": Cause(name="agent-killed", kind="agent-lost", symptom=Symptom.NODE_LOST),
}
"""What each kind of fault is for the simulator; the other kinds (files, helpers, a slow rank, a stalled agent) interrupt no training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one run cost, and what the simulator predicts of it in each of its simulations."""

    seed: int
    downtime: float
    """Seconds."""
    predicted_downtimes: tuple[float, ...]
    steps: int
    """Steps that were computed again."""
    predicted_steps: tuple[int, ...]

    @property
    def downtime_error(self) -> float:
        """Return the relative error of the mean of the predicted downtimes; of less than a second, the error in seconds."""
        return abs(fmean(self.predicted_downtimes) - self.downtime) / max(1.0, self.downtime)

    @property
    def steps_error(self) -> float:
        """Return the relative error of the mean of the predicted steps; of a run without any, their number."""
        return abs(fmean(self.predicted_steps) - self.steps) / max(1, self.steps)


def recorded() -> Mapping[str, Any]:
    """Return the record in the package: `policy`, `timeouts`, `checkpoint_steps`, and `runs` as the benchmark has them."""
    found: Mapping[str, Any] = json.loads(gzip.decompress((resources.files("holdfast.simulator") / DATA).read_bytes()))
    return found


def predictions(record: Mapping[str, Any], draws: int = DRAWS) -> Iterator[Prediction]:
    """Yield the prediction of each run in *record* by phase times from `OTHERS` others."""
    policy = policy_of(PolicyFile.model_validate(record["policy"]), name="chaos")
    for run in record["runs"]:
        known = _others(run, record["runs"])
        system = replace(
            _measured(calibrated(known)),
            lost_attempts=_lost_attempts(known),
            snapshot_lags=_snapshot_lags([one for one in record["runs"] if one is not run]),
        )
        scenario, events = _scenario(run, record), list(_events(run, _absences(known)))
        made = [simulate(scenario, system, number, events=events, policy=policy).jobs["training"] for number in range(draws)]
        yield Prediction(
            seed=run["seed"],
            downtime=run["downtime_s"],
            predicted_downtimes=tuple(one.downtime_total for one in made),
            steps=run["steps_recomputed"],
            predicted_steps=tuple(one.steps_lost for one in made),
        )


def _others(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs that calibrate *run*: those whose steps took most nearly as long, as other work slowed some of them down."""
    return sorted((one for one in runs if one is not run), key=lambda one: abs(one["step_s"] - run["step_s"]))[:OTHERS]


def _measured(times: HistoryTimes) -> RecoverySystem:
    """Return Holdfast with nothing but measured times: an action that did not come takes as long as the one most like it."""
    system = replace(times, enough=1).applied_to(SYSTEMS["holdfast-groups"])
    restart, switch = system.plans[RecoveryAction.RESTART_WORKERS], system.plans[RecoveryAction.REPLACE_RANKS]
    plans = {
        action: plan if action in times.recoveries else replace(plan, phases=(switch if action in IN_PROCESS else restart).phases)
        for action, plan in system.plans.items()
    }
    pause = PhaseTime(low=switch.seconds(0.0), source="other chaos runs: a planned change takes as long as a replacement")
    return replace(system, name="measured", plans=plans, cold={}, migrate=pause, grow=pause)


def calibrated(runs: Sequence[Mapping[str, Any]]) -> HistoryTimes:
    """Return the phase times in *runs*, without recoveries that waited for a controller or a first step: these are simulated."""
    return times_of(
        MeasuredRecovery(kind=one["kind"], action=one["actions"][-1], decisions=len(one["actions"]), phases=one["phases"])
        for run in runs
        for one in run["incident_list"]
        if one["outcome"] == "recovered" and one["actions"] and not any(begin <= one["at"] <= end for begin, end in _spans(run))
    )


def _lost_attempts(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[LostAttempts]]:
    """Return the failed attempts in the incidents of each kind of fault that may need several."""
    found = defaultdict[str, list[LostAttempts]](list)
    for run in runs:
        for one in run["incident_list"]:
            before = [fault for fault in run["fault_list"] if fault["hits"] and fault["hits"][0]["at"] <= one["at"] + 0.05]
            if before and before[-1]["kind"] in (*SEVERAL, *GONE) and one["actions"]:
                escalated = one["actions"][-1] not in {*IN_PROCESS, RecoveryAction.RETRY_STEP}
                found[before[-1]["kind"]].append(LostAttempts(one["phases"].get(FAILED, 0.0), escalated))
    return found


def _spans(run: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Yield from when to when faults of *run* are left out: around the absence of its controller, and at hangs in a first step."""
    for hit in _controller_hits(run):
        yield hit["at"] - 1.0, min(_after(run, hit["at"]), default=hit["at"])
    for fault in run["fault_list"]:
        if fault["kind"] == STUCK:
            yield fault["at"] - 0.1, fault["hits"][-1]["at"] + 0.1


def _controller_hits(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (hit for fault in run["fault_list"] for hit in fault["hits"] if not hit["node"])


def _absences(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds that a new controller needs until it has taken over, beside those until somebody started it."""
    spans = list[float]()
    for run in runs:
        for hit in _controller_hits(run):
            spans += [min(back) - hit["at"] - hit["seconds"]] if (back := _after(run, hit["at"])) else []
    return median(spans) if spans else 0.0


def _after(run: Mapping[str, Any], at: float) -> list[float]:
    return [one for one in run["reattached"] if one > at]


def _snapshot_lags(runs: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the steps that each recovery went back which could not go on from live ranks."""
    return tuple(
        one["steps_recomputed"] or 0
        for run in runs
        for one in run["incident_list"]
        if one["actions"] and one["actions"][-1] not in {*IN_PROCESS, RecoveryAction.RETRY_STEP}
    )


def _scenario(run: Mapping[str, Any], record: Mapping[str, Any]) -> Scenario:
    """Return the job of the chaos runs: three ranks on four nodes, one of them spare with a hot spare."""
    checkpoint = {
        "interval": f"{record['checkpoint_steps'] * run['step_s']:.4f}s", "stall": "0s", "overlapped": "0s",
        "snapshot_overhead": "0%",
    }  # fmt: skip
    return Scenario.model_validate(
        {
            "name": f"chaos-{run['seed']}",
            "seed": run["seed"],
            "duration": f"{run['wall_s'] + 120:.1f}s",
            "cluster": {"nodes": 4, "gpus_per_node": 1, "nodes_per_rack": 1, "hot_spares": 1, "warm_up": "2s"},
            "jobs": [{"nnodes": 3, "copies": 3, "step": f"{run['step_s']:.4f}s", "checkpoint": checkpoint, "timeouts": record["timeouts"]}],
            "faults": {"constant_rate": {"per_1000_node_days": 0}},
        }
    )


def _events(run: Mapping[str, Any], away: float) -> Iterator[PacedEvent]:
    """Yield the faults of *run* as the simulator has them.

    A fault that came while the job trained comes after as much training; one that came in an incident as long after the hit before it.
    """
    before, incidents = 0.0, [(one["at"], one["at"] + one["downtime_s"]) for one in run["incident_list"] if one["downtime_s"]]
    for fault in run["fault_list"]:
        for number, hit in enumerate(fault["hits"]):
            event = _event(fault, number, hit, away)
            if event is None:
                continue
            at, during = hit["at"], any(begin + SLACK < hit["at"] < end for begin, end in incidents)
            down = sum(min(end, at) - begin for begin, end in incidents if begin + SLACK < at)
            if number and fault["kind"] == STUCK:
                yield PacedEvent(event, None, 1e-3)
            else:
                yield PacedEvent(event, None, max(0.0, at - before)) if during or number else PacedEvent(event, max(0.0, at - down))
            before = at


def _event(fault: Mapping[str, Any], number: int, hit: Mapping[str, Any], away: float) -> SimulatedEvent | None:
    """Return what the *number*-th *hit* of a *fault* is for the simulator; None where it interrupts no training."""
    if not hit["node"]:
        return ControllerAway(0.0, hit["seconds"] + away)
    if fault["kind"] == STUCK:
        return NodeFault(0.0, 0, _STUCK if number else _KILLED, 0.0, rank=hit["rank"])
    cause = CAUSES.get(fault["kind"])
    if cause is None:
        return None
    rank = next(iter(hit["ranks"]), None)
    return NodeFault(0.0, 0, cause, 0.0 if cause.of_process else hit["seconds"] + RETURNED, rank=rank, spare=rank is None)
