"""What a node's reader and the judge make of the answers of `dcgmi`, by a program that prints them: no GPU and no DCGM are here.

Recorded are the report of healthy GPUs (DCGM issue 263), the discovered GPUs (DCGM issue 229) and the messages of the host engine's log
(DCGM issue 270). Reports of faults are made here as `dcgmi/Health.cpp` and `dcgmi/DcgmiOutput.cpp` make them, from the formats of messages
in `dcgmlib/dcgm_errors.h`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, DCGM, NODE_CONDITIONS, TAKES_NODE_OUT, Fault
from holdfast.detectors.codec import packed, unpacked
from holdfast.detectors.confirmation import confirmed
from holdfast.detectors.evidence import NOT_REQUESTED, Unknown
from holdfast.detectors.nodes.dcgm import ERRORS
from holdfast.detectors.nodes.health import judge, unknown_signals
from holdfast.detectors.nodes.probe_result import NodeProbe
from holdfast.detectors.nodes.readings import DcgmReading, KubernetesReading, NodeCondition, NodeReading
from holdfast.policies.nodes.node_health import assess_health
from holdfast.probe.readers import dcgm
from holdfast.probe.readers.dcgm import read_dcgm
from holdfast.probe.readers.local import read_node
from tests.each import each_named
from tests.mentions import mentions

Tree = Callable[[dict[str, str]], Path]

HEALTHY = """{
        "body" :
        {
                "Overall Health" :
                {
                        "value" : "Healthy"
                }
        },
        "header" :
        [
                "Health Monitor Report"
        ]
}
"""
DISCOVERED = """4 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: <<<NULL>>>                                                     |
|        | PCI Bus ID: 00000000:4C:00.0                                         |
|        | Device UUID: GPU-d6a2c177-4cd8-8d01-0310-79f2720f37de                |
+--------+----------------------------------------------------------------------+
| 1      | Name: <<<NULL>>>                                                     |
|        | PCI Bus ID: 00000000:5D:00.0                                         |
|        | Device UUID: GPU-75c4ee16-a840-6f6c-9a7b-5ed8f41598b8                |
+--------+----------------------------------------------------------------------+
0 NvSwitches found.
+-----------+
| Switch ID |
+-----------+
| 0         |
+-----------+
"""
NO_WATCHES = "Error: Health watches not enabled. Please enable watches. \n"
NO_ENGINE = """Error: unable to establish a connection to the specified host: localhost
Error: Unable to connect to host engine. Host engine connection invalid/disconnected.
"""
DBE = "Detected 1 volatile double-bit ECC error(s) in GPU 1. Drain the GPU and reset it or reboot the node."
PENDING = "A pending retired page has been detected in GPU 1. Monitor - this GPU can still perform workload"
REMAP_FAILED = "GPU 3735928559 had uncorrectable memory errors and row remapping failed. Run a field diagnostic on the GPU."
UNCONTAINED = "GPU had an uncontained error (XID 95) Drain the GPU and reset it or reboot the node."
LINK_DOWN = "GPU 1's NvLink link 3 is currently down Check DCGM and system logs for errors. Reset GPU. Restart DCGM."
THERMAL = (
    "Detected clocks event due to thermal violation in GPU 1. Verify that the cooling on this machine is functional, including external, "
    "thermal material interface, fans, and any other components."
)
POWER = "Detected clocks event due to power violation in GPU 1. Monitor the power conditions. This GPU can still perform workload."
GPU_1 = "GPU 0000:5d:00.0"


def report(health: str, *messages: str, system: str = "Memory system", entity: str = "1", group: str = "GPU") -> str:
    """Return what `dcgmi` prints of one device, with its texts broken at 54 letters."""
    text, parts = ", ".join(messages), []
    while text:
        cut = len(text) if len(text) <= 54 else text.rindex(" ", 0, 55)
        parts.append(text[:cut].rstrip(",."))  # a comma or a full stop at the end of a part gets lost
        text = text[cut:].lstrip()
    one = {"children": {"Errors": {"children": {system: {"overflow": parts, "value": health}}}}, "value": health}
    return json.dumps(
        {"body": {group: {"children": {entity: one}}, "Overall Health": {"value": health}}, "header": ["Health Monitor Report"]}
    )


@dataclass(frozen=True)
class Host:
    """A node's root folder, in which a host engine runs, and a `dcgmi` that prints what a test says."""

    root: Path

    def prints(self, health: str, discovery: str = DISCOVERED, *, status: int = 0, first: str = "") -> None:
        """Have `dcgmi` print these; *first*: commands before that."""
        (self.root / "health").write_text(health)
        (self.root / "discovery").write_text(discovery)
        program = self.root / "usr/bin/dcgmi"
        program.write_text(f'#!/bin/sh\n{first}\necho "$@" >> {self.root}/asked\ncat "{self.root}/$1"\nexit {status}\n')
        program.chmod(0o755)

    def asked(self) -> list[str]:
        """Return the arguments of all calls."""
        return (self.root / "asked").read_text().splitlines()

    def faults(self, *, before: NodeReading | None = None) -> list[Fault]:
        """Return the faults of a reading."""
        return judge(self.reading(), before)

    def reading(self) -> NodeReading:
        """Return a reading, as it is sent."""
        return NodeReading(node="n0", at=0.0, dcgm=unpacked(DcgmReading, json.loads(json.dumps(packed(read_dcgm(self.root))))))


def gpu_on_bus(address: str) -> dict[str, str]:
    """Return the files by which the kernel lists a GPU."""
    place = f"sys/bus/pci/devices/{address}"
    return {f"{place}/vendor": "0x10de", f"{place}/class": "0x030200"}


@pytest.fixture
def host(tree: Tree) -> Host:
    """Give a node with two GPUs and a host engine."""
    stat = f"77 (nv-hostengine) S 1 {' '.join(['0'] * 17)} 100"
    root = tree({"proc/77/stat": stat, "proc/77/cmdline": "/usr/bin/nv-hostengine\0-n\0", "usr/bin/dcgmi": "", **gpu_on_bus("0000:4c:00.0"),
                 **gpu_on_bus("0000:5d:00.0")})  # fmt: skip
    return Host(root)


# -- the report --------------------------------------------------------------------------------------------------------


def test_healthy_gpus_are_no_fault_and_the_host_engine_is_only_asked(host: Host) -> None:
    """One call, which sets nothing."""
    host.prints(HEALTHY)
    assert read_dcgm(host.root) == DcgmReading(overall="Healthy", gpus={})
    assert host.faults() == []
    assert set(host.asked()) == {"health --check --json"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A report, and what follows."""

    report: str
    kind: str
    acts: bool = False
    device: str = GPU_1


REPLAYS = "Detected more than 8 PCIe replays per minute for GPU 1 : 99999 Reconnect PCIe card."
INFOROM = "A corrupt InfoROM has been detected in GPU 1. Flash the InfoROM to clear this corruption."
NVLINK = "Detected 2 nvlink_replay_error_count_total NvLink errors on GPU 1's NVLink (should be 0) Run a field diagnostic on the GPU."
NVSWITCH = "Detected fatal errors on NvSwitch 1 link 0 Run a field diagnostic on the GPU."
CASES = {
    "a double-bit error": Case(report=report("Failure", DBE), kind="gpu-ecc-uncorrectable", acts=True),
    "with a warning beside it": Case(report=report("Failure", PENDING, DBE), kind="gpu-ecc-uncorrectable", acts=True),
    "the same, as a warning": Case(report=report("Warning", DBE), kind="node-monitor-warning"),
    "a row that cannot be replaced": Case(report=report("Failure", REMAP_FAILED), kind="gpu-row-remap-failed", acts=True),
    "retired pages": Case(
        report=report("Failure", "64 or more retired pages have been detected in GPU 1. Run a field diagnostic on the GPU."),
        kind="gpu-pages-retired",
        acts=True,
    ),
    "a pending page": Case(report=report("Warning", PENDING), kind="node-monitor-warning"),
    "an Xid 95, of whenever": Case(report=report("Failure", UNCONTAINED), kind="node-monitor-fatal"),
    "a link, perhaps of a card without any": Case(report=report("Failure", LINK_DOWN, system="NVLINK system"), kind="node-monitor-warning"),
    "heat": Case(report=report("Warning", THERMAL, system="Thermal system"), kind="gpu-thermal-throttle"),
    "heat, in older words": Case(
        report=report("Warning", "Detected clock throttling due to thermal violation in GPU 1. Verify that", system="Thermal system"),
        kind="gpu-thermal-throttle",
    ),
    "replays": Case(report=report("Warning", REPLAYS, system="PCIe system"), kind="pcie-replays"),
    "InfoROM": Case(report=report("Warning", INFOROM, system="InfoROM system"), kind="gpu-inforom"),
    "NVLink": Case(report=report("Failure", NVLINK, system="NVLINK system"), kind="nvlink-errors"),
    "an NVSwitch": Case(
        report=report("Failure", NVSWITCH, system="Internal error", group="NvSwitch"), kind="node-monitor-fatal", device="DCGM NvSwitch 1"
    ),
    "a GPU that is not on the bus": Case(
        report=report("Failure", DBE.replace("GPU 1", "GPU 3"), entity="3"), kind="node-monitor-warning", device="DCGM GPU 3"
    ),
    "two GPUs in one report": Case(report=report("Failure", DBE, entity="0"), kind="node-monitor-warning", device="DCGM GPU 0"),
    "an instance of a GPU": Case(report=report("Failure", DBE, group="GPU_I"), kind="node-monitor-warning", device="DCGM GPU_I 1"),
    "words that nobody knows": Case(report=report("Failure", "The car is red?"), kind="node-monitor-warning"),
    "a failure beside a known warning": Case(
        report=report("Failure", THERMAL, "The car is red?", system="Thermal system"), kind="node-monitor-warning"
    ),
    "a failure without words": Case(
        report=HEALTHY.replace("Healthy", "Failure"), kind="node-monitor-fatal", device="DCGM"
    ),
}  # fmt: skip
"""The last is what DCGM 2 prints of a GPU with one incident."""


@each_named("case", CASES)
def test_an_incident_is_judged_by_its_message_and_acts_on_a_failed_gpu_of_the_node(host: Host, case: Case) -> None:
    """As a reading of NVML would: a failure that DCGM calls a reason to isolate or reset the GPU; all else is shown."""
    host.prints(case.report)
    found = {one.kind: one for one in host.faults()}
    assert case.kind in found, found
    fault = found[case.kind]
    assert (fault.device, fault.source) == (case.device, f"{DCGM} on n0")
    assert (CATALOGUE_ACTIONS.of(fault) in TAKES_NODE_OUT) == case.acts
    assert not any(CATALOGUE_ACTIONS.of(one) in TAKES_NODE_OUT for one in found.values() if one is not fault)


@each_named(
    "printed",
    {
        "power": report("Warning", POWER, system="Power system"),
        "no IMEX daemon": report("Failure", "IMEX daemon status is -3 (not READY)", system="NVLINK system"),
    },
)
def test_what_dcgm_reports_of_healthy_nodes_is_no_fault(host: Host, printed: str) -> None:
    """A GPU that works hard reaches its power limit; without a multi-node NVLink domain no IMEX daemon runs (aicr issue 2641)."""
    host.prints(printed)
    kinds = {one.kind for one in host.faults()}
    assert not kinds, kinds


def test_each_error_has_a_kind_of_the_catalogue() -> None:
    """Or none, on purpose."""
    assert {one.kind for one in ERRORS if one.kind} <= CATALOGUE.keys()


def test_an_error_count_that_has_not_grown_is_old(host: Host) -> None:
    """As for counters that NVML has: two errors are news after one."""
    host.prints(report("Failure", DBE))
    before = host.reading()
    assert [one.kind for one in judge(before)] == ["gpu-ecc-uncorrectable"]
    assert host.faults(before=before) == []
    host.prints(report("Failure", DBE.replace("Detected 1", "Detected 2")))
    assert [one.kind for one in host.faults(before=before)] == ["gpu-ecc-uncorrectable"]


def test_a_verdict_of_dcgm_and_of_nvsentinel_are_one_signal(host: Host) -> None:
    """NVSentinel asks DCGM; an Xid 95 in the kernel log is another."""
    host.prints(report("Failure", UNCONTAINED))
    (verdict,) = host.faults()
    condition = NodeCondition(
        type="GpuMemWatch", status="True", message="ErrorCode:DCGM_FR_UNCONTAINED_ERROR GPU:1 GPU had an uncontained error"
    )
    (other,) = judge(NodeReading(node="n0", at=0.0, kubernetes=KubernetesReading(conditions=(condition,), labels={})))
    assert (other.kind, other.source) == (verdict.kind, f"{NODE_CONDITIONS} on n0")
    assert confirmed([verdict, other]) == {}


# -- what can go wrong -------------------------------------------------------------------------------------------------


def why(root: Path) -> str:
    """Return why nothing can be read."""
    found = read_dcgm(root)
    assert isinstance(found, Unknown), found
    return found.why


def test_without_watches_the_user_is_told_what_to_run(host: Host) -> None:
    """Nothing is set: other programs may rely on what the host engine does. The node is as healthy as without DCGM."""
    host.prints(NO_WATCHES, status=255)
    assert mentions(why(host.root), "dcgmi health --set a")
    assert set(host.asked()) == {"health --check --json"}
    healthy = NodeReading(node="n0", at=0.0, dcgm=DcgmReading(overall="Healthy", gpus={}))
    now = NodeReading(node="n0", at=60.0, dcgm=Unknown(why(host.root)))
    assert [where for where, _ in unknown_signals(now)] == ["dcgm"]
    assert assess_health(NodeProbe(node="n0", at=60.0, seconds=0.1, found=now), None, healthy).status == "healthy"


@each_named(
    "printed",
    {
        "no connection": NO_ENGINE,
        "a message": "Error: Unable to check health watches. Return: API version mismatch\n",
        "nothing": "",
        "no JSON": "{not json",
        "cut": HEALTHY[:90],
        "another object": '{"a": 1}',
        "a list": "[1]",
        "strange values": '{"body": {"Overall Health": {"value": 7}}}',
        "strange devices": '{"body": {"Overall Health": {"value": "Failure"}, "GPU": ["x"]}}',
        "strange messages": report("Failure", DBE).replace('"overflow": ["', '"overflow": [["x"], "'),
        "deep": '{"a":' * 100_000,
        "bytes": "\x00\x01",
    },
)
def test_what_is_no_report_is_a_reason_and_no_fault(host: Host, printed: str) -> None:
    """From whatever version; what it says is quoted."""
    host.prints(printed, status=1)
    assert mentions(why(host.root), "dcgmi")
    assert host.asked() == ["health --check --json"]


def test_texts_around_the_report_and_a_status_do_not_matter(host: Host) -> None:
    """`dcgmi discovery` exits with 223 where a module is switched off, and has said all (kempnerpulse issue 15)."""
    host.prints("Warning: a library is old\n" + report("Failure", DBE), status=223)
    assert [one.device for one in host.faults()] == [GPU_1]


@each_named("discovery", {"nothing": "", "garbage": "| GPU ID |\n| x\n||||\n| 1 | PCI Bus ID: none |"})
def test_a_gpu_whose_address_is_not_known_is_shown(host: Host, discovery: str) -> None:
    """And no node is left for it."""
    host.prints(report("Failure", DBE), discovery)
    (fault,) = host.faults()
    assert (fault.kind, fault.device) == ("node-monitor-warning", "DCGM GPU 1")


def test_a_dcgmi_that_hangs_or_never_stops_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs for minutes while a GPU that degrades is busy (NVSentinel issue 1748)."""
    monkeypatch.setattr(dcgm, "SECONDS", 1)
    host.prints(HEALTHY, first=f"echo $$ > {host.root}/pid; exec sleep 600")
    assert mentions(why(host.root), "no answer")
    with pytest.raises(ProcessLookupError):
        os.kill(int((host.root / "pid").read_text()), 0)
    monkeypatch.setattr(dcgm, "SECONDS", 20)
    host.prints(HEALTHY, first="exec yes")
    assert mentions(why(host.root), "more than")


def test_a_program_that_cannot_be_run_is_a_reason(host: Host) -> None:
    """It is another machine's, or not for everybody."""
    assert mentions(why(host.root), "cannot be run")


def test_nothing_is_asked_without_a_host_engine_or_its_program(host: Host, tree: Tree) -> None:
    """And nothing said."""
    host.prints(HEALTHY)
    (host.root / "proc/77/stat").write_text(f"77 (sshd) S 1 {' '.join(['0'] * 17)} 100")
    assert read_dcgm(host.root) is NOT_REQUESTED
    (host.root / "proc/77/stat").write_text(f"77 (nv-hostengine) S 1 {' '.join(['0'] * 17)} 100")
    (host.root / "usr/bin/dcgmi").unlink()
    assert read_dcgm(host.root) is NOT_REQUESTED
    assert not (host.root / "asked").exists()


@each_named(
    "command",
    {
        "socket": ("nv-hostengine\0-n\0-d\0/run/dcgm.sock\0", "--host unix:///run/dcgm.sock"),
        "port": ("nv-hostengine\0--port\x005556\0", "--host localhost:5556"),
        "neither": ("nv-hostengine\0-d\0", ""),
    },
)
def test_a_host_engine_is_asked_where_it_listens(host: Host, command: tuple[str, str]) -> None:
    """By its own command line."""
    (host.root / "proc/77/cmdline").write_text(command[0])
    host.prints(HEALTHY)
    read_dcgm(host.root)
    assert host.asked() == [f"health --check --json {command[1]}".rstrip()]


def test_a_reading_of_the_whole_node_has_what_dcgm_says(host: Host) -> None:
    """By the program that runs on nodes."""
    host.prints(report("Failure", DBE))
    found = read_node("n0", root=host.root).dcgm
    assert isinstance(found, DcgmReading), found
    assert found.gpus == {"0": "0000:4c:00.0", "1": "0000:5d:00.0"}
