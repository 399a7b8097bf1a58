"""Texts that people read, whole, each made by the call that makes it, or by the command that prints it.

All other tests assert events, fields, and what a text names; a change of wording is a change here and nowhere else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.accounting.attribution import attribute
from holdfast.accounting.losses import FailureCosts
from holdfast.cli.changes import closed_change, opened_change
from holdfast.cli.flow_process import waits_for
from holdfast.cli.recovery_view import Recovery
from holdfast.detectors.catalogue import Fault
from holdfast.errors import (
    AllocationRequired,
    JobAlreadyRunning,
    NotEnoughNodes,
    ProtocolMismatch,
)
from holdfast.history.models import Incident
from holdfast.history.store import History
from holdfast.policies.nodes.cordons import CordonChanged, NeedsPerson, Node, OperatorRequest, Owner, QuarantineLimits, describe
from holdfast.policies.nodes.quarantine import cordon, quarantine
from holdfast.policies.recovery.case import HotSpare
from holdfast.policies.recovery.escalation import POLICIES, decide
from holdfast.report.cost_table import sentence
from holdfast.report.notifications import SETTLE, Notifications
from tests.accounting.timelines import generation_span, incident_span, job_timeline
from tests.cli.conftest import Command, book, here  # noqa: F401 (fixtures)
from tests.cli.fixed_views import noon, transition
from tests.cli.written_history import a_running_job
from tests.policies.cases import NOW, a_case, a_diagnosis
from tests.report.test_notifications import LAB, an_incident, ended

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


def _costs() -> str:
    steps = [*((1, step, float(step), 1.0) for step in range(1, 21)), *((2, step, step + 15.0, 1.0) for step in range(11, 31))]
    spans = [generation_span(1, 0.0), generation_span(2, 24.0)]
    timeline = job_timeline(45.0, spans, steps, back_to={2: 10}, incidents=[incident_span(1, 20.0, 25.0, 2)])
    return sentence(FailureCosts.of(timeline, attribute(timeline)))


def _waiting() -> str:
    return f"waiting for {waits_for('')}"


def _recovery() -> str:
    at = noon()
    one = Incident(
        job_id="j", number=2, kind="worker-sigkill", target="rank 1 on node-1", fault_at=at, detected_at=at + 0.012, generation_before=1
    )
    one.action = "replace-ranks"
    opened = opened_change(one).text
    one.outcome, one.downtime_s, one.steps_lost, one.generation_after, one.closed_at = "recovered", 0.259, 0, 2, at + 0.259
    moves = [transition("DIAGNOSING", "", at + 0.012), transition("ISOLATING", "", at + 0.02), transition("RUNNING", "", at + 0.259)]
    return f"{opened}\n{closed_change(Recovery(incident=one, at=at + 1, transitions=moves)).text}"


def _notification() -> str:
    notifications = Notifications(LAB)
    notifications.opened(an_incident(), 0.0)
    notifications.closed(ended(), 1.0)
    (notification,) = notifications.tick(1.0 + SETTLE)
    return f"{notification.subject}\n{notification.text}"


TEXTS: dict[str, tuple[Callable[[], str], str]] = {
    "waiting": (
        _waiting,
        "waiting for a temporary Prefect server to start, as PREFECT_API_URL is not set; its first start also creates its database",
    ),
    "recovery": (
        _recovery,
        (
            "incident 2: worker-sigkill on rank 1 on node-1, detected after 12 ms; recovery: replace-ranks\n"
            "incident 2 recovered by replace-ranks in 259 ms, no step computed again, now generation 2 "
            "(detect 12 ms, diagnose 8.0 ms, isolate 239 ms)"
        ),
    ),
    "restart": (
        lambda: decide(POLICIES["balanced"], a_case()).decision.reason,
        "worker-sigkill of node a: what was seen; restart 1 of 3 within 3600 s",
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
        "1 node of the cluster's 4 is out of service, and programs may isolate 1",
    ),
    "notification": (
        _notification,
        (
            "[lab/gpt] incident 1: rank 1 on node-1 killed (SIGKILL), recovered in 260 ms\n"
            "14:02:11 UTC: rank 1 on node-1 was killed (SIGKILL); hot spare on node-2 took over; "
            "training again after 260 ms, 0 steps lost.\n\n"
            "Seen: RuntimeError: sizes do not fit in model.py:12\n\n"
            "Action: nothing to do.\n\n"
            "All of it: `holdfast incidents show i1`\n\n"
            "Job gpt on cluster lab, controller on head\nRun: http://ui/runs/flow-run/1\nIncident: http://ui/1"
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
            "the job needs 4 nodes, but cluster 'lab' has 1 free (node-1: quarantined). Lower `nnodes` or "
            "`spare_nodes`, or add nodes to the cluster; `holdfast node ls` lists them."
        ),
    ),
    "allocation": (
        lambda: str(AllocationRequired("waiting for free nodes", "hpc")),
        (
            "waiting for free nodes is not available for cluster 'hpc' of kind slurm: its nodes are reachable only within a "
            "job. `holdfast node ls --cluster CLUSTER_FILE` shows what Slurm reports; describe the same machines with `kind: ssh` for "
            "the rest."
        ),
    ),
    "protocol": (
        lambda: str(ProtocolMismatch("node-1", "the Holdfast there speaks protocol 2, this one 1")),
        (
            "node node-1 cannot be used: the Holdfast there speaks protocol 2, this one 1: `holdfast node bootstrap "
            "--cluster CLUSTER_FILE` installs this version there"
        ),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word by word."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    made, text = TEXTS[name]
    assert made() == text


JOB = "name: a\nscript: train.py\n"
ENDS = {"completed": ("COMPLETED", "all steps are done"), "failed": ("FAILED", "restarted 3 times within 1 h")}
COMMANDS = {
    "status": "status gpt",
    "incident": "incidents show 1 --job gpt",
    "events": "status gpt --events",
    "completed": "status gpt --follow",
    "failed": "status gpt --follow",
    "unknown_job": "status gtp",
    "bad_option": "run --nnodes 0 train.py",
    "missing_script": "run trian.py",
    "bad_job_file": "run bad.yaml",
    "good_job_file": "validate good.yaml",
}
"""Commands, whose outputs are in the files of these names: first the standard output, then the standard error."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_prints(name: str, here: Command, book: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811 (fixtures)
    """Word by word, but for names that are made anew each time; the job was submitted at noon, 45 seconds ago."""
    monkeypatch.setattr(time, "time", lambda: noon() + 45)
    job = a_running_job(book, "gpt", noon())
    if name in ENDS:
        job.move(*ENDS[name], seconds=44, event="finished")
    (tmp_path / "train.py").touch()
    (tmp_path / "good.yaml").write_text(f"{JOB}nnodes: 2\nspare_nodes: 1\nnproc_per_node: 2\n")
    (tmp_path / "bad.yaml").write_text(f"{JOB}nnode: 2\n")
    done = here(*COMMANDS[name].split())
    printed = re.sub(r"\b[0-9a-f]{24}\b", "ID", done.stdout + done.stderr).replace(str(tmp_path), "DIRECTORY")
    assert printed == (Path(__file__).parent / f"golden_texts/{name}.txt").read_text()
