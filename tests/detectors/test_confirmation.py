"""When a fault acts: a measured value, a line that can only mean this fault, or a second, independent signal. Everything else is shown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, KERNEL_LOG, TAKES_NODE_OUT, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.confirmation import confirmed, why_it_acts
from holdfast.detectors.diagnosis import PastFailure, diagnose, see
from holdfast.detectors.evidence import HangLimits, LogLine, Progress, WorkerException, WorkerExit
from holdfast.detectors.log_lines.outputs import said
from holdfast.policies.recovery.case import Case
from tests.detectors.evidence_of import a_rank

LINK = "mlx5_core 0000:9a:00.0 ens5f0np0: Link down"
LOCKUP = "watchdog: BUG: soft lockup - CPU#9 stuck for 26s! [python:7712]"
XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus."
FROM_LOGS = [one for one in CATALOGUE.values() if one.recommended_action in TAKES_NODE_OUT and one.logs]
CERTAIN = [one for one in FROM_LOGS if one.certain]


def line(text: str, node: str = "n0", log: str = KERNEL_LOG, rank: int | None = None, at: float = 1.0) -> Fault:
    """Return the fault that a line of a log is taken for."""
    (fault,) = see([LogLine(text=text, at=at, node=node, log=log, rank=rank)], HangLimits())
    return fault


def crash(node: str = "n0", rank: int = 0, why: str = "Connection reset by peer") -> WorkerExit:
    """Return the end of a worker whose peer is gone, or that failed by itself."""
    return WorkerExit(
        node=node, rank=rank, at=2.0, code=1, raised=WorkerException(type="RuntimeError", message=why, peer_lost="peer" in why)
    )


def leaving(*faults: Fault) -> tuple[str, ...]:
    """Return the nodes that an incident with these faults takes out, where there are spares for all."""
    return Case(now=3.0, diagnosis=diagnose(faults), members=("n0", "n1"), spares=("s0", "s1")).unfit


def test_of_all_kinds_from_logs_only_those_that_say_so_act_on_one_line() -> None:
    """Each of them is proven by its own sample; no other is, whatever its sample says."""
    for kind in FROM_LOGS:
        text = re.sub(r"^.*?: (?=[^:]*: )", "", kind.in_logs) if kind.in_logs else kind.unhealthy.evidence.text
        fault = Fault(kind=kind.id, at=0.0, node="n0", quote=text, source="kernel log on n0")
        acts = CATALOGUE_ACTIONS.of(fault) in TAKES_NODE_OUT
        assert acts == (bool(kind.certain) and KERNEL_LOG in kind.logs), kind.id
    assert 25 < len(CERTAIN) < 40
    assert len(FROM_LOGS) > 160


@pytest.mark.parametrize(
    "text", [LINK, LOCKUP, "clocksource: timekeeping watchdog on CPU9: Marking clocksource 'tsc' as unstable because of skew"]
)
def test_a_line_that_a_healthy_node_may_write_takes_no_node_out(text: str) -> None:
    """Neither alone, nor beside a failure that it does not explain."""
    fault = line(text)
    assert fault.entry.recommended_action in TAKES_NODE_OUT
    assert CATALOGUE_ACTIONS.of(fault) is RecommendedAction.MONITOR
    elsewhere = see([crash(node="n1", rank=1, why="shape mismatch")], HangLimits())
    assert leaving(fault, *elsewhere) == ()


def test_a_second_signal_confirms_it() -> None:
    """The link of a node is down, and its rank has lost its peer: the node leaves, and the record says why."""
    fault, lost = line(LINK), see([crash()], HangLimits())
    assert leaving(fault, *lost) == ("n0",)
    signals = confirmed([fault, *lost])
    assert why_it_acts(fault, RecommendedActions(confirmed=signals)) == "confirmed by worker-peer-lost (exception report of rank 0)"


def test_more_of_the_same_log_is_no_second_signal() -> None:
    """A driver that writes ten lines has still only one thing to say."""
    assert confirmed([line(LINK), line(LINK.replace("9a", "9b")), line(LOCKUP)]) == {}


def test_what_a_rank_prints_about_its_node_is_shown() -> None:
    """It may print anything: the same line in the kernel log acts, and the rank's own exit does not make it true."""
    printed = line(XID, log="log", rank=0)
    assert printed.source == "worker output of rank 0"
    assert CATALOGUE_ACTIONS.of(printed) is RecommendedAction.MONITOR
    assert confirmed([printed, *see([crash()], HangLimits())]) == {}
    assert CATALOGUE_ACTIONS.of(line(XID)) is RecommendedAction.EVICT


@pytest.mark.parametrize(
    "text",
    [
        "mlx5_core 0000:1a:00.0: device's health compromised - reached miss count",
        "mlx5_core 0000:1a:00.0: Unable to change power state from D3cold to D0, device inaccessible",
    ],
)
def test_a_network_card_that_failed_takes_its_node_out_if_a_rank_lost_a_peer(text: str) -> None:
    """Of a card that no rank uses it is shown."""
    (fault,) = see([LogLine(text=text, at=1.0, node="n0", log=KERNEL_LOG)], HangLimits())
    assert CATALOGUE_ACTIONS.of(fault) is RecommendedAction.MONITOR
    assert leaving(fault, *see([crash(node="n1", rank=1, why="shape mismatch")], HangLimits())) == ()
    assert leaving(fault, *see([crash()], HangLimits())) == ("n0",)


@pytest.mark.parametrize(
    ("text", "acts"),
    [
        ("nvidia-nvswitch2: SXid (PCI:0000:87:00.0): 22003, Fatal, Link 18 Minion Halt", True),
        ("nvidia-nvswitch2: SXid (PCI:0000:87:00.0): 22003, Non-fatal, Link 18 Minion Halt", False),
        ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#0_DIMM#1", True),
        ("EDAC MC1: 0 UE memory read error on CPU_SrcID#1_MC#1_Chan#0_DIMM#1", False),
        ("{2}[Hardware Error]: event severity: fatal", True),
        ("{2}[Hardware Error]: event severity: recoverable", False),
        ("mce: [Hardware Error]: CPU 61: Machine Check Exception: 5 Bank 1: bd80000000100134", True),
        ("mce: [Hardware Error]: CPU 61: Machine Check Exception: 5 Bank 1: 9d80000000100134", False),
        ("nvidia 0000:5d:00.0: Unable to change power state from D3cold to D0, device inaccessible", True),
        ("snd_hda_intel 0000:5d:00.1: Unable to change power state from D3cold to D0, device inaccessible", False),
        ("[   12.0] NVRM: The NVIDIA probe routine failed for 1 device(s).", False),
        ("NVRM: None of the NVIDIA devices were initialized.", True),
        ("[ 5.0] amdgpu 0000:30:00.0: amdgpu: probe of 0000:30:00.0 failed with error -22", False),
        ("[ 5.0] amdgpu 0000:30:00.0: amdgpu: probe of 0000:30:00.0 failed with error -12", False),
        ("[   12.0] amdgpu 0000:03:00.0: amdgpu: Fatal error during GPU init", True),
    ],
)
def test_severity_count_and_device_in_the_line_decide(text: str, *, acts: bool) -> None:
    """The bit that says that an error was not corrected, a count above zero, the words fatal and non-fatal, a device that ranks use."""
    faults = see([LogLine(text=text, at=1.0, node="n0", log=KERNEL_LOG)], HangLimits())
    assert any(CATALOGUE_ACTIONS.of(fault) in TAKES_NODE_OUT for fault in faults) == acts


def test_a_gpu_that_no_rank_uses_takes_no_node_out() -> None:
    """Whoever reports it: it is shown, and neither confirms nor is confirmed."""
    for lost in (line(XID), replace(line(XID), source="GPU driver events of n0")):
        idle = replace(lost, idle=True)
        assert leaving(lost) == ("n0",)
        assert leaving(idle) == ()
        assert CATALOGUE_ACTIONS.of(idle) is RecommendedAction.MONITOR
        assert why_it_acts(idle, CATALOGUE_ACTIONS) == "no: no rank of the job uses that device"
        assert confirmed([idle, *see([crash()], HangLimits())]) == {}
        assert confirmed([line(LOCKUP), idle]) == {}


WATCHDOG = "[default0]:[rank12]:[E817 17:40:34.227531918 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12]"
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("printed", "acts"),
    [
        (f"RuntimeError: {ECC}", True),
        (f"[rank3]: torch.AcceleratorError: {ECC}", True),
        (f"2026-03-01 12:30:01,123 [rank3]: {ECC}", True),
        (f"  what():  {ECC}", True),
        (f"{WATCHDOG} Process group watchdog thread terminated with exception: {ECC}", True),
        (f"[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: {ECC}", True),
        ("torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution", True),
        (f"dataset sample 812: RuntimeError: {ECC}", False),
        (f"[812/9000] answer: {ECC}", False),
        (f"The user saw: {ECC}", False),
        ("prompt: CUDA error: uncorrectable NVLink error detected during the execution", False),
    ],
)
def test_a_cuda_error_acts_where_a_line_begins_with_it(printed: str, *, acts: bool) -> None:
    """Behind the tags of a rank, a time, or the name of an exception; a program may print the words of it in its data."""
    wrong = WorkerException(type="ValueError", message="bad sample")
    end = WorkerExit(node="n0", rank=0, at=2.0, code=1, step=7, raised=wrong, output=f"step 7\n{printed}\n")
    (fault,) = said([end])
    assert fault.kind in {"cuda-uncorrectable-ecc", "cuda-nvlink"}
    assert leaving(*see([end], HangLimits()), fault) == (("n0",) if acts else ())


def test_a_cuda_error_acts_though_a_program_has_quoted_one_before() -> None:
    """The rank itself, or another one of its node."""
    quoted = f"dataset sample 812: RuntimeError: {ECC}"
    ends = [
        WorkerExit(node=node, rank=rank, at=2.0 + rank, code=1, step=7, output=output)
        for node, rank, output in (("n0", 0, quoted), ("n0", 1, f"[rank1]: {ECC}"), ("n1", 2, f"{quoted}\n[rank2]: {ECC}"))
    ]
    assert [(fault.node, fault.rank, fault.is_proven) for fault in said(ends)] == [("n0", 1, True), ("n1", 2, True)]


@pytest.mark.parametrize(
    ("kind", "message", "acts"),
    [
        ("RuntimeError", ECC, True),
        ("torch.AcceleratorError", f"{ECC}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.", True),
        ("ValueError", f"cannot parse sample 812: RuntimeError: {ECC}", False),
    ],
)
def test_an_exception_acts_where_it_is_cudas_error(kind: str, message: str, *, acts: bool) -> None:
    """One that only quotes it is the program's own."""
    end = WorkerExit(node="n0", rank=0, at=2.0, code=1, step=7, raised=WorkerException(type=kind, message=message))
    assert leaving(*see([end], HangLimits()), *said([end])) == (("n0",) if acts else ())


@pytest.mark.parametrize("source", ["kernel log on n0", "GPU driver events on n0"])
def test_a_gpu_on_which_kernels_fail_again_and_again_is_suspect_whoever_reports_them(source: str) -> None:
    """The kernel log and NVML report the same, and which of them is first is chance."""
    gpu = "0000:4e:00.0"
    past = tuple(PastFailure(node="n0", step=at, signature="x", kind="gpu-engine-exception", at=-3600.0 - at, device=gpu) for at in (1, 2))
    third = Fault(kind="gpu-engine-exception", at=1.0, node="n0", quote=f"Xid (PCI:{gpu}): 13", signature="x", source=source, device=gpu)
    diagnosis = diagnose([third, *see([crash(why="CUDA error: unspecified launch failure")], HangLimits())], past)
    assert diagnosis.root.kind == "gpu-suspect"
    assert Case(now=3.0, diagnosis=diagnosis, members=("n0", "n1"), spares=("s0", "s1")).unfit == ("n0",)


def test_who_sets_an_action_decides() -> None:
    """A policy that names a kind asks for its action on any evidence."""
    strict = RecommendedActions(changed={"link-down": RecommendedAction.EVICT})
    assert strict.of(line(LINK)) is RecommendedAction.EVICT
    assert why_it_acts(line(LINK), strict) == "the policy sets its action"


@pytest.mark.parametrize("text", [LINK, LOCKUP])
@pytest.mark.parametrize(("seen_at", "acts"), [(70.0, True), (30.0, False)])
def test_a_hang_confirms_a_line_only_if_the_job_has_not_trained_since(text: str, seen_at: float, *, acts: bool) -> None:
    """The last progress was at 60 s: a line from after that may be why ranks wait; one from half a minute before it was survived."""
    states = {rank: a_rank(f"n{rank}", step=40 - rank, age=20.0 if text == LOCKUP else 8.0) for rank in range(2)}
    now = 80.0 if text == LOCKUP else 68.0
    hang = see([Progress(at=now, ranks=states, step_seconds=(0.3,) * 8)], HangLimits(hang=5.0))
    assert [fault.kind for fault in hang] == ["job-hang"]
    assert hang[0].at == pytest.approx(60.0)
    node = str(hang[0].node)
    fault = line(text, node=node, at=seen_at if text == LOCKUP else seen_at - 9.0)
    diagnosis = diagnose([fault, *hang])
    assert (fault.key in diagnosis.confirmed) == acts
    assert diagnosis.root.kind == (fault.kind if acts else "job-hang")
    assert leaving(fault, *hang) == ((node,) if acts else ())


def test_a_line_about_an_incident_that_is_over_is_not_blamed_again() -> None:
    """The kernel's line on a process that it killed may be reported after that process was replaced; a lasting fault stays a suspect."""
    killed = line("Out of memory: Killed process 10513 (python) total-vm:9000kB, anon-rss:8000kB, file-rss:0kB", at=10.0)
    next_one = see([WorkerExit(node="n1", rank=1, at=12.0, signal=15)], HangLimits())
    assert diagnose([killed, *next_one]).root.kind == "host-out-of-memory"
    past = PastFailure(node="n0", step=7, signature="signal 9", kind="worker-oom-killed", at=10.1)
    assert diagnose([killed, *next_one], (past,)).root.kind == "worker-sigterm"
    again = replace(killed, at=11.5)
    assert diagnose([again, *next_one], (past,)).root.kind == "host-out-of-memory"
    broken = PastFailure(node="n0", step=7, signature="gpu-off-bus", kind="gpu-off-bus", at=10.0)
    assert diagnose([line(XID, at=10.0), *see([crash()], HangLimits())], (broken,)).root.kind == "gpu-off-bus"
