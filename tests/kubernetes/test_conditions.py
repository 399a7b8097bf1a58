"""What the conditions of a Kubernetes node mean: which act, which are shown, and which are old."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import pytest

from holdfast.agent.monitor.node_conditions import MAX_REASONS, ConditionWatch
from holdfast.classify.explanation import explain_report
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import (
    CATALOGUE_ACTIONS,
    KERNEL_LOG,
    NODE_CONDITIONS,
    NODE_EVENTS,
    Fault,
    RecommendedAction,
    RecommendedActions,
)
from holdfast.detectors.confirmation import confirmed, why_it_acts
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import NOT_REQUESTED, HangLimits, LogLine, Unknown
from holdfast.detectors.log_lines.kernel_lines import finding_of
from holdfast.detectors.nodes.health import judge
from holdfast.detectors.nodes.probe_result import NodeProbe
from holdfast.detectors.nodes.readings import KernelLine, KernelReading, KubernetesReading, NodeCondition, NodeEvent, NodeReading
from holdfast.policies.nodes.node_health import assess_health
from tests.each import each_named

EVICT, DRAIN, MONITOR, RECORD = RecommendedAction.EVICT, RecommendedAction.DRAIN, RecommendedAction.MONITOR, RecommendedAction.RECORD
XID_79: Final = "NVRM: Xid (PCI:0000:ef:00): 79, pid=123456, name=python3, GPU has fallen off the bus."
OFF_BUS: Final = f"ErrorCode:79 PCI:0000:ef:00 GPU_UUID:GPU-b5f21324 kernel: [16450076.435595] {XID_79} Recommended Action=RESTART_BM;"
"""As NVSentinel writes it."""
HUNG: Final = "task python3:20744 blocked for more than 120 seconds."
"""As node-problem-detector cuts it out of the kernel log."""


def reading(*conditions: NodeCondition, at: float = 1000.0, **facts: object) -> NodeReading:
    """Return a reading of a node with these conditions."""
    found = replace(KubernetesReading(conditions=conditions, labels={}), **facts)  # type: ignore[arg-type]
    return NodeReading(node="n0", at=at, kubernetes=found)


def condition(type_: str, message: str = "", *, status: str = "True", since: float | None = 900.0) -> NodeCondition:
    """Return a condition."""
    return NodeCondition(type=type_, status=status, message=message, since=since)


def faults(*conditions: NodeCondition) -> list[Fault]:
    """Return the faults of a node with these conditions."""
    return judge(reading(*conditions))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A condition that is True, and what follows."""

    type: str
    message: str
    kind: str
    acts: bool = False
    device: str = ""


CASES: Final = {
    "an Xid of NVSentinel's": Case(type="SysLogsXIDError", message=OFF_BUS, kind="gpu-off-bus", acts=True, device="GPU 0000:ef:00.0"),
    "its number, as NVSentinel's guide has it": Case(
        type="SysLogsXIDError", message="[79] GPU has fallen off the bus - RecommendedAction: RESTART_BM", kind="gpu-off-bus", acts=True
    ),
    "only its number": Case(
        type="GpuXidError",
        message="ErrorCode:79 GPU:0 XID error occurred Recommended Action=RESTART_VM;",
        kind="gpu-off-bus",
        acts=True,
        device="GPU 0",
    ),
    "an Xid that restarts the application": Case(
        type="SysLogsXIDError",
        message="ErrorCode:94 PCI:0000:17:00 kernel: [1.2] NVRM: Xid (PCI:0000:17:00): 94, pid=7, name=python3, Contained ECC error. "
        "Recommended Action=CONTACT_SUPPORT;",
        kind="gpu-memory-contained",
    ),
    "an Xid that means nothing": Case(
        type="SysLogsXIDError",
        message="ErrorCode:14 PCI:0000:17:00 kernel: [1.2] NVRM: Xid (PCI:0000:17:00): 14, pid=7 Recommended Action=NONE;",
        kind="node-monitor-warning",
    ),
    "an SXid": Case(
        type="SysLogsSXIDError",
        message="ErrorCode:24007 NVSWITCH:0 PCI:0000:c3:00.0 NVLINK:30 GPU:1 GPU_UUID:GPU-1 kernel: [123.456791] nvidia-nvswitch0: SXid "
        "(PCI:0000:c3:00.0): 24007, Fatal, Link 30 sourcetrack timeout error Recommended Action=CONTACT_SUPPORT;",
        kind="nvswitch-fatal",
        acts=True,
        device="0000:c3:00.0",
    ),
    "a GPU that is gone": Case(
        type="SysLogsGPUFallenOff",
        message="ErrorCode:GPU_FALLEN_OFF_BUS PCI:0000:b3:00.0 NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:2330) installed in this "
        "system has fallen off the bus and is not responding to commands. Recommended Action=RESTART_BM;",
        kind="gpu-off-bus",
        acts=True,
    ),
    "a verdict of DCGM's": Case(
        type="GpuMemWatch",
        message="ErrorCode:DCGM_FR_FAULTY_MEMORY GPU:4 PCI:0000:c4:00.0 GPU memory failure Recommended Action=RESTART_VM;",
        kind="node-monitor-fatal",
        device="GPU 0000:c4:00.0",
    ),
    "fatal without a message": Case(type="GpuNvlinkWatch", message="", kind="node-monitor-fatal", device="GpuNvlinkWatch"),
    "a network card's driver": Case(type="SysLogsNICDriverError", message="mlx5 says something", kind="node-condition"),
    "a monitor that does not work": Case(type="DCGMError", message="no connection", kind="node-monitor-warning"),
    "maintenance": Case(type="CSPMaintenance", message="on Tuesday", kind="kubernetes-node-cordoned"),
    "a task that was stuck once": Case(
        type="KernelDeadlock", message="task docker:20744 blocked for more than 120 seconds.", kind="task-hung"
    ),
    "a file system": Case(
        type="ReadonlyFilesystem",
        message="EXT4-fs (sda1): Remounting filesystem read-only",
        kind="filesystem-read-only",
        device="sda1",
    ),
    "a service": Case(type="FrequentKubeletRestart", message="Found 5 matching logs", kind="node-condition"),
    "the kubelet's": Case(type="MemoryPressure", message="kubelet has insufficient memory available", kind="node-condition"),
    "one that nobody knows": Case(type="GPUProblem", message="GPU has fallen off the bus", kind="node-condition-other"),
}  # fmt: skip


@each_named("case", CASES)
def test_a_condition_is_judged_as_what_it_quotes(case: Case) -> None:
    """A line that proves a fault in the kernel log proves it here; all else needs a second signal, or is only shown."""
    (fault,) = faults(condition(case.type, case.message))
    assert fault.kind == case.kind
    assert fault.source == f"{NODE_CONDITIONS} on n0"
    assert (CATALOGUE_ACTIONS.of(fault) in {EVICT, DRAIN, RecommendedAction.RESET_GPU}) == case.acts
    assert case.type in fault.quote
    if case.device:
        assert fault.device == case.device


@each_named("case", CASES)
@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_a_condition_that_is_not_true_is_no_fault(case: Case, status: str) -> None:
    """Whatever its message quotes: it is over, or was never so."""
    assert faults(condition(case.type, case.message, status=status)) == []


@pytest.mark.parametrize("type_", ["SysctlChanged", "EtcdIsVoter", "MountPropagation", "GpuReady", "Schedulable"])
def test_conditions_that_clusters_have_of_their_own_are_no_faults(type_: str) -> None:
    """They are True on a healthy node."""
    assert faults(condition(type_, "all is well"), condition("Ready")) == []


def test_a_kubelet_that_is_silent_is_shown_and_no_reason_to_leave() -> None:
    """Its node may train on: the agent that reports it does run there."""
    for status in ("Unknown", "False"):
        (fault,) = faults(condition("Ready", "Kubelet stopped posting node status.", status=status))
        assert (fault.kind, CATALOGUE_ACTIONS.of(fault)) == ("kubernetes-node-not-ready", MONITOR)


def test_a_cordon_is_recorded_with_what_says_why() -> None:
    """By `kubectl cordon`, or a label of a service that replaces nodes; a taint alone may be there to keep other pods away."""
    hyperpod = {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReplacement"}
    assert (
        judge(reading(taints=("nvidia.com/gpu=present:NoSchedule",), labels={"sagemaker.amazonaws.com/node-health-status": "Schedulable"}))
        == []
    )
    for found in (reading(unschedulable=True, taints=("nvidia.com/gpu-xid-error=true:NoSchedule",)), reading(labels=hyperpod)):
        (fault,) = judge(found)
        assert (fault.kind, CATALOGUE_ACTIONS.of(fault)) == ("kubernetes-node-cordoned", RECORD)
    (fault,) = judge(reading(unschedulable=True, taints=("nvidia.com/gpu-xid-error=true:NoSchedule",), labels=hyperpod))
    assert "gpu-xid-error" in fault.quote
    assert "PendingReplacement" in fault.quote


def test_each_device_of_a_condition_is_a_fault_of_its_own() -> None:
    """NVSentinel adds them to one message; one that was cut off at its end is no device."""
    second = OFF_BUS.replace("ef:00", "18:00")
    assert [one.device for one in faults(condition("SysLogsXIDError", OFF_BUS + second))] == ["GPU 0000:ef:00.0", "GPU 0000:18:00.0"]


def in_kernel_log(text: str) -> Fault:
    """Return the fault of a line of the node's kernel log."""
    (fault,) = see([LogLine(text=text, at=1000.0, node="n0", log=KERNEL_LOG)], HangLimits())
    return fault


def test_a_condition_and_the_line_that_it_quotes_are_one_signal() -> None:
    """A monitor reads the same kernel log; a hang of the job's is a second one."""
    (hung,) = faults(condition("KernelDeadlock", "task docker:20744 blocked for more than 120 seconds."))
    (line,) = see(
        [LogLine(text="INFO: task docker:20744 blocked for more than 120 seconds.", at=1000.0, node="n0", log=KERNEL_LOG)], HangLimits()
    )
    assert hung.kind == line.kind
    assert confirmed([hung, line]) == {}
    (verdict,) = faults(condition("GpuMemWatch", "ErrorCode:DCGM_FR_FAULTY_MEMORY GPU:4 Recommended Action=RESTART_VM;"))
    (read_only,) = see(
        [LogLine(text="EXT4-fs (sda1): Remounting filesystem read-only", at=1000.0, node="n0", log=KERNEL_LOG)], HangLimits()
    )
    assert confirmed([verdict, line, read_only]) == {}
    assert "condition does not prove it" in why_it_acts(verdict, CATALOGUE_ACTIONS)
    gone = in_kernel_log(XID_79)
    found = confirmed([verdict, gone])
    assert found[verdict.key].startswith("gpu-off-bus")
    assert RecommendedActions(confirmed=found).of(verdict) is EVICT
    assert confirmed([verdict, replace(gone, node="n1")]) == {}


def test_a_line_that_proves_a_fault_is_not_hidden_by_a_condition_that_does_not() -> None:
    """Of the same kind, of the same part."""
    text = "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    lines = KernelReading(lines=(KernelLine(sequence=1, microseconds=1, level=3, text=text.format("Fatal")),))
    found = replace(reading(condition("SysLogsSXIDError", text.format("Non-fatal"))), kernel=lines)
    (fault,) = judge(found)
    assert fault.is_proven


def test_the_page_of_an_incident_says_what_a_condition_was_recognised_by() -> None:
    """Its type, and the line that it quotes if there is one."""
    for type_, message, named in (("SysLogsXIDError", OFF_BUS, True), ("GpuMemWatch", "GPU memory failure", False)):
        (fault,) = faults(condition(type_, message))
        explanation = explain_report(fault.kind, fault.source, fault.quote, "", fault.entry.recommended_action)
        assert explanation is not None
        assert "node condition" in explanation.matched
        assert ("xid.toml" in explanation.matched) == named


# -- events ------------------------------------------------------------------------------------------------------------


def event(source: str, reason: str, message: str, *, type_: str = "Warning", count: int = 1, last: float = 950.0) -> NodeEvent:
    """Return an event."""
    return NodeEvent(type=type_, source=source, reason=reason, message=message, count=count, last=last)


XID_79_EVENT: Final = event("syslog-health-monitor", "SysLogsXIDErrorIsNotHealthy", OFF_BUS, type_="SysLogsXIDError")
HUNG_EVENT: Final = event("kernel-monitor", "TaskHung", HUNG, count=3)
EVENTS: Final = {
    "a line of the kernel log": (HUNG_EVENT, "task-hung"),
    "a line that would prove it": (XID_79_EVENT, "gpu-off-bus"),
    "by another program": (event("deployer", "TaskHung", XID_79), ""),
    "by the kubelet": (event("kubelet", "SystemOOM", "System OOM encountered, victim process: python3, pid: 77"), "node-event"),
    "of its own start": (event("kubelet", "InvalidDiskCapacity", "invalid capacity 0 on image filesystem"), ""),
    "by a service's monitor": (event("docker-monitor", "CorruptDockerImage", "Error trying v2 registry: failed"), "node-event"),
    "of the kernel, unknown": (event("kernel-monitor", "Strange", "nothing that is known"), "node-event"),
    "a GPU that is watched": (
        event("gpu-health-monitor", "GpuThermalWatchIsNotHealthy", "ErrorCode:DCGM_FR_THERMAL GPU:0 hot", type_="GpuThermalWatch"),
        "node-monitor-warning",
    ),
    "a normal one": (replace(XID_79_EVENT, type="Normal"), ""),
}  # fmt: skip


@each_named("case", EVENTS)
def test_an_event_of_a_monitor_is_judged_as_what_it_quotes(case: tuple[NodeEvent, str]) -> None:
    """By monitors that read the kernel log, and takes no node out, whatever it quotes.

    All else of monitors is shown; other programs and normal events say nothing of a fault.
    """
    one, kind = case
    found = judge(reading(events=(one,)))
    assert [fault.kind for fault in found] == ([kind] if kind else [])
    for fault in found:
        assert CATALOGUE_ACTIONS.of(fault) not in {EVICT, DRAIN, RecommendedAction.RESET_GPU}
        assert one.reason in fault.quote
        assert (f"({one.count} times)" in fault.quote) == (one.count > 1)
        assert fault.source == f"{NODE_EVENTS} on n0"


def test_a_condition_an_event_and_a_line_of_the_kernel_log_are_one_fault() -> None:
    """They quote one line; of the events of one fault the newest is shown."""
    lines = KernelReading(lines=(KernelLine(sequence=1, microseconds=1, level=3, text=f"INFO: {HUNG}"),))
    older = replace(HUNG_EVENT, count=1, last=800.0)
    found = replace(reading(condition("KernelDeadlock", HUNG), events=(older, HUNG_EVENT)), kernel=lines)
    assert [fault.kind for fault in judge(found)] == ["task-hung"]
    (newest,) = judge(reading(events=(older, HUNG_EVENT)))
    assert "3 times" in newest.quote
    explanation = explain_report(newest.kind, newest.source, newest.quote, "", newest.entry.recommended_action)
    assert explanation is not None
    assert "node event" in explanation.matched


def test_an_event_is_news_once_for_each_time_that_it_is_reported() -> None:
    """With its own time; what was reported last before the job is old."""
    watch = ConditionWatch(900.0)

    def news_of(at: float, *events: NodeEvent) -> list[tuple[str, float]]:
        return [(one.kind, began) for one, began in watch.news(KubernetesReading(conditions=(), labels={}, events=events), at)]

    old = event("kernel-monitor", "KernelOops", "BUG: unable to handle kernel NULL pointer dereference at 0000000000000008", last=899.0)
    assert news_of(930.0, old) == []
    assert news_of(990.0, old, HUNG_EVENT) == [("task-hung", 950.0)]
    assert news_of(1050.0, old, HUNG_EVENT) == []
    assert news_of(1110.0, old, replace(HUNG_EVENT, count=4, last=1100.0)) == [("task-hung", 1100.0)]
    assert news_of(1170.0, replace(XID_79_EVENT, last=9999.0)) == [("gpu-off-bus", 1170.0)], "the reporter's clock is ahead"


def test_a_line_that_the_kernel_log_has_is_not_reported_again() -> None:
    """An event of a quarter of an hour later is another one; and a line that proves less hides nothing."""
    watch = ConditionWatch(900.0)
    line = finding_of(KernelLine(sequence=1, microseconds=1, level=3, text=f"INFO: {HUNG}"))
    assert line is not None
    watch.saw_line(line, 948.0)
    quoted = KubernetesReading(conditions=(condition("KernelDeadlock", HUNG, since=949.0),), labels={}, events=(HUNG_EVENT,))
    assert watch.news(quoted, 990.0) == []
    again = replace(quoted, events=(replace(HUNG_EVENT, last=1848.0),))
    assert [began for _, began in watch.news(again, 1890.0)] == [1848.0]
    text = "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    less = finding_of(KernelLine(sequence=1, microseconds=1, level=3, text=text.format("Non-fatal")))
    assert less is not None
    watch.saw_line(less, 1948.0)
    event_of_more = event(
        "syslog-health-monitor", "SysLogsSXIDErrorIsNotHealthy", text.format("Fatal"), type_="SysLogsSXIDError", last=1950.0
    )
    assert watch.news(replace(again, events=(event_of_more,)), 1990.0) == [], "an event proves nothing"
    more = condition("SysLogsSXIDError", text.format("Fatal"), since=1950.0)
    assert [one.kind for one, _ in watch.news(replace(again, conditions=(more,), events=()), 2050.0)] == [less.kind]


# -- a node's health ---------------------------------------------------------------------------------------------------


def health(found: NodeReading, before: NodeReading | None = None) -> str:
    """Return a node's health by its newest reading."""
    earlier = assess_health(NodeProbe(node="n0", at=before.at, seconds=0.1, found=before)) if before is not None else None
    return assess_health(NodeProbe(node="n0", at=found.at, seconds=0.1, found=found), earlier, before).status


def test_a_check_refuses_a_node_by_a_condition_however_old_it_is() -> None:
    """A condition is a state: it is so now. One that proves nothing makes the node no worse than degraded."""
    assert health(reading(condition("SysLogsXIDError", OFF_BUS, since=5.0), at=1e6)) == "unhealthy"
    assert health(reading(condition("FrequentKubeletRestart", since=5.0), at=1e6)) == "degraded"
    assert health(reading(condition("Ready"), at=1e6)) == "healthy"


def test_an_api_server_that_does_not_answer_says_nothing_of_the_nodes() -> None:
    """A node stays what it was: neither is a healthy one unknown, nor is the fault of another over."""
    gone = Unknown("the API server does not answer")
    assert health(NodeReading(node="n0", at=1060.0, kubernetes=gone), reading(condition("Ready"))) == "healthy"
    assert health(NodeReading(node="n0", at=1060.0, kubernetes=gone), reading(condition("SysLogsXIDError", OFF_BUS))) == "unhealthy"


# -- while a job runs --------------------------------------------------------------------------------------------------


def news(watch: ConditionWatch, at: float, *conditions: NodeCondition) -> list[tuple[str, float]]:
    """Return what is new in a sample: kinds, and when they began."""
    found = reading(*conditions).kubernetes
    return [(one.kind, began) for one, began in watch.news(found, at)]


def test_what_was_so_before_the_job_is_old_and_what_comes_is_reported_once() -> None:
    """With its own time; again after it was over."""
    watch = ConditionWatch(1000.4)
    old, new = condition("GpuMemWatch", since=999.0), condition("SysLogsXIDError", OFF_BUS, since=1065.0)
    assert news(watch, 1003.0, old) == []
    assert news(watch, 1063.0, old) == []
    assert news(watch, 1123.0, old, new) == [("gpu-off-bus", 1065.0)]
    assert news(watch, 1183.0, old, new) == []
    assert news(watch, 1243.0, old) == []
    assert news(watch, 1303.0, old, new) == [("gpu-off-bus", 1243.0)], "its reporter kept the first time; it began since the last sample"


def test_what_came_between_the_start_and_the_first_sample_is_new() -> None:
    """Times of the API are whole seconds; one without a time may be old."""
    for since, expected in ((1000.0, 1), (1002.0, 1), (999.0, 0), (None, 0)):
        watch = ConditionWatch(1000.9)
        assert len(news(watch, 1003.0, condition("SysLogsXIDError", OFF_BUS, since=since))) == expected


def test_a_new_device_of_a_condition_that_is_old_is_new() -> None:
    """Its message has another entry; the time of the condition does not change with it."""
    watch = ConditionWatch(1000.0)
    assert news(watch, 1003.0, condition("SysLogsXIDError", OFF_BUS, since=5.0)) == []
    both = OFF_BUS + OFF_BUS.replace("ef:00", "18:00")
    assert news(watch, 1063.0, condition("SysLogsXIDError", both, since=5.0)) == [("gpu-off-bus", 1003.0)]


def test_a_reporters_clock_that_is_ahead_gives_no_time_to_come() -> None:
    """It is taken for the time of the sample."""
    watch = ConditionWatch(1000.0)
    assert news(watch, 1003.0) == []
    assert news(watch, 1063.0, condition("SysLogsXIDError", OFF_BUS, since=9999.0)) == [("gpu-off-bus", 1063.0)]


def test_what_cannot_be_read_is_said_once() -> None:
    """And forgets nothing: what is there when it can be read again is judged by what was there before."""
    watch = ConditionWatch(1000.0)
    old, refused = condition("SysLogsXIDError", OFF_BUS, since=5.0), Unknown("forbidden")
    assert watch.unreadable(NOT_REQUESTED) is None
    assert news(watch, 1003.0, old) == []
    assert watch.unreadable(refused) == "forbidden"
    assert watch.unreadable(refused) is None
    assert watch.news(refused, 1063.0) == []
    assert news(watch, 1123.0, old) == []
    without = KubernetesReading(conditions=(), labels={}, events=Unknown("no events for you"))
    assert watch.unreadable(without) == "no events for you"
    assert watch.unreadable(without) is None
    reasons = [watch.unreadable(Unknown(f"reason {number}")) for number in range(100)]
    assert sum(one is not None for one in reasons) == MAX_REASONS - 2


def test_every_kind_that_a_condition_can_be_is_in_the_catalogue() -> None:
    """Three of them are defined with the log lines of monitors."""
    assert {case.kind for case in CASES.values()} <= CATALOGUE.keys()
