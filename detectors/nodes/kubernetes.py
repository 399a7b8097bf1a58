"""Faults in the conditions and events of a Kubernetes node: what node-problem-detector, NVSentinel and the kubelet report of it.

Types of conditions are listed: which status is bad depends on the type, and clusters have types of their own that are `True` on a healthy
node. What a monitor quotes of the kernel log is judged as that line is, and proves as much. An event is what a monitor saw of a problem
that does not last; those of other programs, and normal ones, are none of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from holdfast.detectors.catalogue import CATALOGUE, KERNEL_LOG, NODE_EVENTS, Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import Sample, Unknown
from holdfast.detectors.nodes.findings import FaultFinding, ReadingPair
from holdfast.detectors.nodes.readings import KernelLine, KubernetesReading, NodeCondition, NodeEvent, NodeReading

PROBLEM_DETECTOR: Final = frozenset({
    "KernelDeadlock", "ReadonlyFilesystem", "XfsShutdown", "CperHardwareErrorFatal", "FrequentKubeletRestart", "FrequentDockerRestart",
    "FrequentContainerdRestart", "FrequentUnregisterNetDevice", "KubeletUnhealthy", "KubeProxyUnhealthy", "ContainerRuntimeUnhealthy",
    "DiskBadBlock", "CorruptDockerOverlay2", "NTPProblem",
})  # fmt: skip
"""Conditions in the configurations that node-problem-detector brings along; `True` is bad."""
KUBELET: Final = frozenset({"MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"})
"""Conditions that the kubelet or the network's plug-in sets; `True` is bad."""
NVSENTINEL: Final = re.compile(
    r"Gpu(?:Mem|Thermal|Pcie|Power|Inforom|Sm|Nvlink|Mcu|Pmu|Driver|Cpuset|AllWatch)\w*|GpuXidError|SysLogs\w+|NVSwitch(?:FatalError|Down)"
)
"""Checks of NVSentinel that become conditions when they find what is fatal (`isFatal`); `True` is bad."""
NVSENTINEL_OTHER: Final = frozenset({"NVSwitchNonFatalError", "DCGMError", "SyslogError"})
"""Those that say that a monitor, or nothing serious, has failed."""
MAINTENANCE: Final = "CSPMaintenance"
"""The check of NVSentinel for maintenance that a cloud announces."""
READY: Final = "Ready"
NORMAL: Final = "Normal"
_READS_KERNEL: Final = re.compile(r"(?:[\w.-]+-)?kernel-monitor(?:-[\w.-]+)?|readonly-monitor|syslog-health-monitor")
"""Monitors whose events quote the kernel log, of node-problem-detector and of NVSentinel."""
_MONITOR: Final = re.compile(r"[\w.-]*monitor(?:-[\w.-]+)?|(?:[\w.-]+-)?health-checker|abrt-\w+")
"""Sources of events of node-problem-detector, in its configurations, and of NVSentinel."""
_NVSENTINEL_REASON: Final = "IsNotHealthy"
"""How the reason of an event of NVSentinel ends; the name of its check comes before."""
KUBELET_EVENTS: Final = frozenset({"SystemOOM", "EvictionThresholdMet", "FreeDiskSpaceFailed", "ImageGCFailed", "ContainerGCFailed"})
"""Events of the kubelet that say that its node is short of something; others are about pods, or about its own start."""
_BAD_NAME: Final = re.compile(
    r"Unhealthy|NotHealthy|NotReady|Problem|Error|Fail|Fault|Fatal|Deadlock|Down\b|Shutdown|Broken|Degraded|Frequent|Corrupt|Pressure|Exhausted"
    r"|Unavailable|Lost|Hang|Hung|Stuck|Bad[A-Z]"
)
"""Names of other conditions that say that something is wrong."""
_CODE: Final = re.compile(r"(?:ErrorCode:|^\[)(?P<code>[\w.-]+)")
"""The first error code of NVSentinel, in either form that it writes."""
_ADVICE: Final = re.compile(r"[ .-]*Recommended ?Action\s?[=:] ?\w+[;. ]*$")
_PCI: Final = re.compile(r"\bPCI:(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)")
_GPU: Final = re.compile(r"\bGPU:(?P<index>\d+)\b")
_XID_CHECKS: Final = frozenset({"SysLogsXIDError", "GpuXidError"})
_NIC_CHECK: Final = "SysLogsNICDriverError"
DEBUG: Final = 7
"""The level of a line of which the log's own level is not known: only a signature makes a fault of it."""
NODE: Final = "node"
_TAKEN: Final = re.compile(r"/node-health-status=Unschedulable|/nvsentinel-state=\w")
"""Labels that say that the node is to be replaced, rebooted or drained."""


def _node(*conditions: tuple[str, str, str], unschedulable: bool = False) -> Sample:
    found = tuple(NodeCondition(type=type_, status=status, message=message) for type_, status, message in conditions)
    return Sample(NodeReading(node="n0", at=0.0, kubernetes=KubernetesReading(conditions=found, unschedulable=unschedulable, labels={})))


def _events(*events: tuple[str, str, str]) -> Sample:
    found = tuple(NodeEvent(type="Warning", source=source, reason=reason, message=message, last=0.0) for source, reason, message in events)
    return Sample(NodeReading(node="n0", at=0.0, kubernetes=KubernetesReading(conditions=(), labels={}, events=found)))


_define = partial(
    fault_kind,
    component="scheduler",
    source="node conditions in Kubernetes",
    attributed_to=Attribution.NODE,
    reference="https://kubernetes.io/docs/reference/node/node-status/",
)
NOT_READY: Final = _define(
    id="kubernetes-node-not-ready",
    title="Kubernetes considers a node not ready",
    recommended_action=RecommendedAction.MONITOR,
    action="check its kubelet, and its connection to the API server: Kubernetes evicts the pods of a node that stays so for minutes",
    unhealthy=_node((READY, "Unknown", "Kubelet stopped posting node status.")),
    healthy=_node((READY, "True", "kubelet is posting ready status")),
    weight=60,
    confused_with=("kubernetes-node-lost",),
)
CORDONED: Final = _define(
    id="kubernetes-node-cordoned",
    title="A node gets no new pods in Kubernetes, or is to be maintained",
    recommended_action=RecommendedAction.RECORD,
    action="leave the node when that does not interrupt training",
    unhealthy=_node((READY, "True", ""), unschedulable=True),
    healthy=_node((READY, "True", "")),
    weight=40,
)
OTHER: Final = _define(
    id="node-condition-other",
    title="A condition of a Kubernetes node that Holdfast does not know sounds like a problem",
    component="node",
    recommended_action=RecommendedAction.RECORD,
    action="find out which monitor sets it, and what it means",
    unhealthy=_node(("RaidBatteryProblem", "True", "battery of controller 0 is failing")),
    healthy=_node(("SysctlChanged", "True", '{"unmanaged": {"kernel.cad_pid": "1"}}')),
    weight=20,
    confused_with=("node-condition",),
)
EVENT: Final = fault_kind(
    id="node-event",
    title="A monitor of a Kubernetes node reports a problem that does not last",
    component="node",
    source="node events in Kubernetes",
    recommended_action=RecommendedAction.RECORD,
    attributed_to=Attribution.NODE,
    action="look at what the monitor quotes, and whether it comes again",
    reference="https://github.com/kubernetes/node-problem-detector#problem-api",
    unhealthy=_events(
        (
            "docker-monitor",
            "CorruptDockerImage",
            "Error trying v2 registry: failed to register layer: rename a b: file exists",
        )
    ),
    healthy=_events(("deployment-controller", "ScalingReplicaSet", "Scaled up replica set web-5d to 3")),
    weight=20,
    confused_with=("node-condition",),
)
CONDITION: Final = "node-condition"
FATAL: Final = "node-monitor-fatal"
WARNING: Final = "node-monitor-warning"
"""Kinds of `signatures/node_monitors.toml`."""


def judge_kubernetes(pair: ReadingPair[KubernetesReading]) -> Iterator[FaultFinding]:
    """Find what its cluster reports of a node: conditions that are bad now, a kubelet that is silent, a cordon, recent events."""
    yield from judge_conditions(pair.now)
    yield from judge_events(pair.now)


def judge_conditions(now: KubernetesReading) -> Iterator[FaultFinding]:
    """Find what is so now."""
    for one in now.conditions:
        if one.type == READY:
            if one.status != "True":
                yield FaultFinding(kind=NOT_READY.id, part=NODE, quote=_words(one), at=one.since)
        elif one.status == "True":
            yield from _of(one)
    yield from _cordon(now)


def judge_events(now: KubernetesReading) -> Iterator[FaultFinding]:
    """Find what monitors reported of the node lately: each with the time of its last report, the newest first."""
    if not isinstance(now.events, Unknown):
        for one in reversed(now.events):
            if one.type != NORMAL and (found := _of_event(one)) is not None:
                yield found


def _of_event(one: NodeEvent) -> FaultFinding | None:
    """Return the fault of a line of the kernel log that an event quotes, or that a monitor reports something; None if it is no monitor."""
    name = f"event {one.reason} of {one.source}{f' ({one.count} times)' if one.count > 1 else ''}"
    if _READS_KERNEL.fullmatch(one.source) and (found := _quoted(name, one.message, one.last)) is not None:
        return replace(found, source=NODE_EVENTS)
    if one.reason.endswith(_NVSENTINEL_REASON):
        check = one.reason.removesuffix(_NVSENTINEL_REASON)
        kind, part = WARNING, _device(one.message) or check
    elif _MONITOR.fullmatch(one.source) or (one.source == "kubelet" and one.reason in KUBELET_EVENTS):
        kind, part = EVENT.id, one.reason
    else:
        return None
    return FaultFinding(
        kind=kind, part=part, quote=f"{name}: {one.message or 'it does not say what'}"[:500], at=one.last, source=NODE_EVENTS
    )


def _of(one: NodeCondition) -> Iterator[FaultFinding]:
    """Find what a condition that is `True` reports."""
    if one.type in PROBLEM_DETECTOR:
        yield _quoted(one.type, one.message, one.since) or FaultFinding(kind=CONDITION, part=one.type, quote=_words(one), at=one.since)
    elif one.type in KUBELET:
        yield FaultFinding(kind=CONDITION, part=one.type, quote=_words(one), at=one.since)
    elif one.type == MAINTENANCE:
        yield FaultFinding(kind=CORDONED.id, part=one.type, quote=_words(one), at=one.since)
    elif one.type in NVSENTINEL_OTHER:
        yield FaultFinding(kind=WARNING, part=one.type, quote=_words(one), at=one.since)
    elif NVSENTINEL.fullmatch(one.type):
        # It has an entry for each device, or for each kind of error.
        for entry in [text.strip() for text in one.message.split(";") if text.strip()] or [""]:
            yield _of_gpu(one, entry)
    elif _BAD_NAME.search(one.type):
        yield FaultFinding(kind=OTHER.id, part=one.type, quote=_words(one), at=one.since)


def _of_gpu(one: NodeCondition, entry: str) -> FaultFinding:
    """Find what one entry of a condition of NVSentinel reports: a line of the kernel log, an Xid, or only that it is fatal."""
    from holdfast.detectors.log_lines import xids  # noqa: PLC0415 (a thousand signatures: only who has such a condition reads them)

    if (found := _quoted(one.type, entry, one.since)) is not None:
        return found
    device, code, kind = _device(entry) or one.type, _CODE.search(entry), FATAL
    if xids.xid_of(entry) is not None:
        kind = WARNING  # NVSentinel may be set to call an Xid fatal that says nothing of the GPU
    elif one.type in _XID_CHECKS and code is not None and code["code"].isdecimal():
        kind = xids.kind_of(int(code["code"])) or WARNING
    elif one.type == _NIC_CHECK:
        kind = CONDITION
    return FaultFinding(kind=kind, part=device, quote=f"{one.type}: {entry}"[:500], at=one.since)


def _quoted(name: str, text: str, at: float | None) -> FaultFinding | None:
    """Return the fault of the line of the kernel log that *text* quotes, as the log itself has it; None if it quotes none that is known."""
    from holdfast.detectors.log_lines.kernel_lines import finding_of  # noqa: PLC0415 (as above)

    found = finding_of(KernelLine(sequence=0, microseconds=0, level=DEBUG, text=_ADVICE.sub("", text)))
    if found is None or KERNEL_LOG not in CATALOGUE[found.kind].logs:
        return None
    part = found.part if found.part != NODE else _device(text) or NODE
    return replace(found, part=part, quote=f"{name}: {found.quote}"[:500], at=at)


def _device(entry: str) -> str:
    """Return the device that an entry names, as readings name GPUs; empty if it names none."""
    if (found := _PCI.search(entry)) is not None:
        bus = found["bus"].lower()
        return f"GPU {bus}" if "." in bus else f"GPU {bus}.0"
    return f"GPU {found['index']}" if (found := _GPU.search(entry)) is not None else ""


def _words(one: NodeCondition) -> str:
    """Return a condition as a line."""
    return f"{one.type} is {one.status}: {one.message or one.reason or 'it does not say why'}"[:500]


def _cordon(now: KubernetesReading) -> Iterator[FaultFinding]:
    """Find a cordon, and a label by which a repair service says that it takes the node, with all that may say why."""
    labels = [f"{name}={value}" for name, value in sorted(now.labels.items())]
    taken = [one for one in labels if _TAKEN.search(one)]
    if now.unschedulable or taken:
        words = [*(["it is cordoned (spec.unschedulable)"] if now.unschedulable else []), *labels, *now.taints]
        yield FaultFinding(kind=CORDONED.id, part=NODE, quote="; ".join(words)[:500])
