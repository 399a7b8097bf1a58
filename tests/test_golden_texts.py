"""Texts that people read, whole, each made by the call that makes it.

All other tests assert events, fields, and what a text names; a change of wording is a change here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.accounting.attribution import attribute
from holdfast.accounting.losses import FailureCosts
from holdfast.detectors.catalogue import Fault
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.errors import (
    AllocationRequired,
    BadSetting,
    CapacityTimeout,
    HistoryTooOld,
    JobAlreadyRunning,
    LeaseUnconfirmed,
    NodeLost,
    NotEnoughNodes,
    ProtocolMismatch,
)
from holdfast.policies.checkpoint_interval import IntervalCase, IntervalLimits, advise
from holdfast.policies.nodes.burn_in import explain_still_isolated, outcome
from holdfast.policies.nodes.cordons import (
    CordonChanged,
    CordonedFault,
    NeedsPerson,
    Node,
    OperatorRequest,
    Owner,
    QuarantineLimits,
    describe,
)
from holdfast.policies.nodes.quarantine import cordon, quarantine
from holdfast.policies.nodes.required_checks import parts_to_test
from holdfast.policies.recovery.case import HotSpare
from holdfast.policies.recovery.escalation import POLICIES, decide
from holdfast.report.cost_table import sentence
from holdfast.runtime.snapshots.copy_schedule import Profile, SnapshotLimits, plan
from holdfast.runtime.telemetry.wait_windows import WaitWindow
from tests.accounting.timelines import generation_span, incident_span, job_timeline
from tests.policies.cases import NOW, a_case, a_diagnosis

ASK = OperatorRequest(owner=Owner(name="job gpt"), reason="gpu-off-bus: Xid 79", at=1.0)
ANN = OperatorRequest(owner=Owner(name="ann@desk", person=True), reason="new fan", at=2.0)
WARD = QuarantineLimits(size=8, isolated=0)


def _cordoned(request: OperatorRequest) -> str:
    change = cordon(Node(name="a"), request) if request is ANN else quarantine(Node(name="a"), request, WARD)
    assert isinstance(change, CordonChanged)
    return describe(change.node)


def _needs_approval() -> str:
    answer = quarantine(Node(name="a"), ASK, QuarantineLimits(size=4, isolated=1))
    assert isinstance(answer, NeedsPerson)
    return answer.why


def _lost_rank() -> str:
    case = a_case(
        blocked_reason="", ranks={"a": (0,), "b": (1,), "c": (2,)}, roles=((0, 1, 2),), hot_spares=(HotSpare(id=8, node="s", role=0),)
    )
    root = Fault(kind="worker-sigkill", at=NOW, node="a", rank=0, quote="seen")
    return decide(POLICIES["balanced"], replace(case, diagnosis=replace(a_diagnosis(), root=root))).decision.reason


def _untested_gpu() -> str:
    gpu = Check(name="gpu", mark=CheckMark.SKIPPED, words="no NVIDIA device is visible", needed=False)
    found = outcome("node-0", (gpu,), parts_to_test([CordonedFault(kind="cuda-uncorrectable-ecc")]))
    return explain_still_isolated(found, "quarantined")


def _snapshots(limits: SnapshotLimits) -> str:
    profile = Profile()
    for _ in range(8):
        profile.add(0.1, [WaitWindow(0.0, 0.01, "pipeline", 1)])
    return plan(profile, [2**20] * 40, 1e9, limits).reason


def _costs() -> str:
    steps = [*((1, step, float(step), 1.0) for step in range(1, 21)), *((2, step, step + 15.0, 1.0) for step in range(11, 31))]
    spans = [generation_span(1, 0.0), generation_span(2, 24.0)]
    timeline = job_timeline(45.0, spans, steps, back_to={2: 10}, incidents=[incident_span(1, 20.0, 25.0, 2)])
    return sentence(FailureCosts.of(timeline, attribute(timeline)))


def _passed_over() -> str:
    passed = decide(POLICIES["patient"], a_case("node-lost", lost="a")).passed_over
    return "\n".join(f"{rule}: {why}" for rule, why in passed.items())


TEXTS: dict[str, tuple[Callable[[], str], str]] = {
    "restart": (
        lambda: decide(POLICIES["balanced"], a_case()).decision.reason,
        "worker-sigkill of node a: what was seen; restart 1 of 3 within 3600 s",
    ),
    "passed over": (
        _passed_over,
        (
            "StopForUserError: no user error\n"
            "StopWithoutProgress: a is lost, which is not the script's fault\n"
            "StopWhenSpent: 0 of 20 recoveries used\n"
            "ExcuseWhenCorrelated: node-lost came on 1 node(s) within 600 s, not on 3\n"
            "LeaveWhenRecurring: node-lost for time 1 within 86400 s on a, of 6\n"
            "LeaveWhenFlapping: node-lost came 1 time(s) within 600 s on a, of 8\n"
            "RollBack: the loss has not diverged\n"
            "RetryStep: the job's process groups are not Holdfast's own\n"
            "ReplaceRanks: the job's process groups are not Holdfast's own\n"
            "RestartWorkers: a cannot hold ranks\n"
            "ReplaceNode: 0 spare(s) for 1 node(s)\n"
            "RequestApproval: no node that still works would be isolated without approval"
        ),
    ),
    "spare": (
        lambda: decide(POLICIES["balanced"], a_case("gpu-off-bus", spares=("s",))).decision.reason,
        "gpu-off-bus of node a: what was seen; s replaces a",
    ),
    "hot spare": (
        _lost_rank,
        "worker-sigkill of node a: what was seen; rank 0 continues in hot spare 8 on s, the other 2 stay in their processes",
    ),
    "quarantined": (
        lambda: _cordoned(ASK),
        "quarantined by job gpt (cordon 1): gpu-off-bus: Xid 79; `holdfast node return a --reason ...` returns it to service",
    ),
    "cordoned": (
        lambda: _cordoned(ANN),
        "cordoned by ann@desk (cordon 1): new fan; `holdfast node uncordon a --reason ...` returns it to service",
    ),
    "approval": (
        _needs_approval,
        "1 of the cluster's 4 node(s) are out of service, and programs may isolate 1",
    ),
    "not tested": (
        _untested_gpu,
        (
            "node-0 stays quarantined: no check could exercise the GPU (no NVIDIA device is visible). Repair the driver or "
            "the card, or return it by hand with `holdfast node return node-0 --reason ...`."
        ),
    ),
    "snapshots seldom": (
        lambda: _snapshots(SnapshotLimits(overhead=0.01)),
        "41.9 ms of copying do not fit into 10 ms of windows: a snapshot every 34 steps keeps the cost at 1.0%",
    ),
    "snapshots pause": (
        lambda: _snapshots(SnapshotLimits(policy="pause", pause=0.05)),
        "41.9 ms of copying do not fit into 10 ms of windows: training pauses 33.6 ms for each snapshot, as the policy allows",
    ),
    "interval": (
        lambda: advise(IntervalCase(save_s=1, step_s=1, between_s=20_000), IntervalLimits(least=1, most=10_000)).reason,
        (
            "a save costs 1 s, a step 1 s, and a fault sends the job back to a checkpoint about every 5.56 h: 3.32 min of "
            "training between two saves lose least"
        ),
    ),
    "costs": (
        _costs,
        "5.00 s of downtime, 10 steps lost, ETTR 66.7%",
    ),
    "running": (
        lambda: str(JobAlreadyRunning("gpt", "ann's controller")),
        (
            "job 'gpt' is already running, controlled by ann's controller. Watch it with `holdfast status gpt`, stop it "
            "with `holdfast stop gpt`, detach its controller with `holdfast detach gpt`, or give this job another name."
        ),
    ),
    "nodes": (
        lambda: str(NotEnoughNodes(4, 1, "lab", "node-1: quarantined")),
        (
            "the job needs 4 node(s), but cluster 'lab' has 1 free (node-1: quarantined). Lower `nnodes` or "
            "`spare_nodes`, or add nodes to the cluster; `holdfast node ls` lists them."
        ),
    ),
    "timeout": (
        lambda: str(CapacityTimeout("lab", 2, 1, "200 ms", "node-1: quarantined")),
        "after 200 ms cluster 'lab' has 1 free node(s) of the 2 required (node-1: quarantined)",
    ),
    "allocation": (
        lambda: str(AllocationRequired("waiting for free nodes", "hpc")),
        (
            "waiting for free nodes is not available for cluster 'hpc' of kind slurm: its nodes are reachable only within a "
            "job. `holdfast node ls --cluster CLUSTER_FILE` shows what Slurm reports; describe the same machines with `kind: ssh` for "
            "the rest."
        ),
    ),
    "setting": (
        lambda: str(BadSetting("HOLDFAST_SIGTERM", "leave", ("stop", "detach"))),
        "HOLDFAST_SIGTERM is 'leave'; it must be stop or detach",
    ),
    "history": (
        lambda: str(HistoryTooOld("history.db", "its schema revision is 0100")),
        (
            "history history.db was written by an older Holdfast: its schema revision is 0100. Nothing was changed. Move it "
            "away, or name another history in HOLDFAST_HISTORY; the Holdfast that wrote it can still read it."
        ),
    ),
    "node": (
        lambda: str(NodeLost("node-1", "it is switched off")),
        "node node-1 is lost: it is switched off",
    ),
    "protocol": (
        lambda: str(ProtocolMismatch("node-1", "the Holdfast there speaks protocol 2, this one 1")),
        (
            "node node-1 cannot be used: the Holdfast there speaks protocol 2, this one 1: `holdfast node bootstrap "
            "--cluster CLUSTER_FILE` installs this version there"
        ),
    ),
    "lease": (
        lambda: str(LeaseUnconfirmed("node-1", "no agent confirms this controller")),
        "nothing is stopped or started on node node-1: no agent confirms this controller",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_reads(name: str) -> None:
    """Word by word."""
    made, text = TEXTS[name]
    assert made() == text
