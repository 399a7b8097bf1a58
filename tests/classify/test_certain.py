"""Which lines take a node out by themselves: those of a kind that says so, each shown by a line that somebody posted or the driver prints.

`certain.tsv` has for each such kind at least one line that acts, and one of the same driver or library that does not, with the address of
the report or of the source that prints it. A kind without them must not be `certain`: then it needs a second signal.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import KERNEL_LOG, TAKES_NODE_OUT, WORKER_OUTPUT, RecommendedAction
from holdfast.detectors.confirmation import acts_alone
from holdfast.detectors.evidence import HangLimits
from holdfast.detectors.log_lines.classification import judge
from holdfast.detectors.log_lines.xids import UNUSABLE, finding, see_xid, xid_of
from holdfast.detectors.nodes.gpu_readings import XidEvent
from holdfast.detectors.signatures.loading import HERE
from tests.each import each

with (Path(__file__).parent / "certain.tsv").open(newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
CERTAIN = sorted(kind.id for kind in CATALOGUE.values() if kind.certain and kind.recommended_action in TAKES_NODE_OUT)
RESET = (46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
RESTART_MACHINE = (79, 151)
RESTART_APP = (
    8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, *range(82, 87), 88, 89, 94,
    *range(96, 106), *range(126, 136), 139,
)  # fmt: skip
"""Immediate actions of NVIDIA's Xid catalogue of 2025-10-29."""


def kind_of_xid(number: int) -> str | None:
    """Return the kind of an Xid with that number, whatever follows it."""
    return judge(f"NVRM: Xid (PCI:0000:4e:00): {number}, pid=1, name=python, text")


@each("row", ROWS)
def test_a_real_line_acts_where_it_proves_the_fault_and_its_neighbour_does_not(row: dict[str, str]) -> None:
    """By the rule itself; in a log whose writer can know of the kind."""
    name = judge(row["line"])
    acts = name is not None and acts_alone(CATALOGUE[name], row["line"])
    assert acts == (row["acts"] == "yes")
    assert row["address"].startswith("https://")
    if acts:
        assert name == row["kind"]


def test_every_kind_that_acts_on_one_line_has_such_lines() -> None:
    """And no other is in the table."""
    for acts in ("yes", "no"):
        assert sorted({row["kind"] for row in ROWS if row["acts"] == acts}) == CERTAIN


@each("name", CERTAIN)
def test_a_kind_that_acts_says_from_where_and_what_to_do(name: str) -> None:
    """Its source, the log of it, an action, and documentation of those who make the device."""
    kind = CATALOGUE[name]
    assert kind.source
    assert kind.logs
    assert kind.action
    assert kind.reference.startswith("https://")


def test_an_xid_recommends_what_its_vendor_does() -> None:
    """A number that is answered by nothing, or by the program's start anew, takes no node out."""
    for number in RESTART_APP:
        assert CATALOGUE[kind_of_xid(number) or ""].recommended_action is RecommendedAction.RESTART, number
    for number in RESET:
        assert CATALOGUE[kind_of_xid(number) or ""].recommended_action is RecommendedAction.RESET_GPU, number
    for number in RESTART_MACHINE:
        assert CATALOGUE[kind_of_xid(number) or ""].recommended_action is RecommendedAction.EVICT, number
    known = {*RESTART_APP, *RESET, *RESTART_MACHINE, 74}  # NVLink
    for number in set(range(1, 180)) - known:
        name = kind_of_xid(number)
        assert name is None or CATALOGUE[name].recommended_action not in TAKES_NODE_OUT | {RecommendedAction.RESTART}, number


@each("row", [row for row in ROWS if xid_of(row["line"])])
def test_an_xid_proves_the_same_as_an_agent_reports_it(row: dict[str, str]) -> None:
    """The agent quotes the GPU, the number and the text, and not the line."""
    xid = xid_of(row["line"])
    assert xid is not None
    found = finding(xid)
    acts = found is not None and CATALOGUE[found.kind].recommended_action in TAKES_NODE_OUT and CATALOGUE[found.kind].proves(found.quote)
    assert acts == (row["acts"] == "yes")


@pytest.mark.parametrize(
    ("number", "kind", "alone"),
    [
        (0, "gpu-recovery-none", False),
        *((number, "gpu-recovery-reset", number == 1) for number in (1, 6)),
        *((number, "gpu-recovery-reboot", number == 2) for number in (2, 7)),
        *((number, "gpu-recovery-drain", number != 5) for number in (3, 4, 5)),
    ],
)
def test_each_recovery_that_the_driver_asks_for_is_known(number: int, kind: str, alone: bool) -> None:  # noqa: FBT001 (a row of the table)
    """By the numbers of NVML_GPU_RECOVERY_ACTION; those that nobody posted need a second signal."""
    line = f"NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x{number} (Some Action)"
    assert judge(line) == kind
    assert acts_alone(CATALOGUE[kind], line) == alone


@pytest.mark.parametrize(("number", "kind"), [(19013, "nvswitch-fatal"), (12003, "nvswitch-fatal"), (20034, "nvswitch-link-fault")])
def test_what_the_switchs_driver_calls_fatal_is_never_quiet(number: int, kind: str) -> None:
    """Numbers that the guide ignores or does not have included; without the word they are what the tables say."""
    line = f"nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): {number}, Fatal, Link 28 something"
    assert judge(line) == kind
    assert acts_alone(CATALOGUE[kind], line)
    without = judge(line.replace("Fatal", "Non-fatal"))
    assert without is None or not acts_alone(CATALOGUE[without], line.replace("Fatal", "Non-fatal"))


@pytest.mark.parametrize("table", ["xid.toml", "nvswitch.toml"])
def test_the_vendors_tables_name_their_edition(table: str) -> None:
    """With a date, so that somebody can see what is new since."""
    head = (HERE / table).read_text().partition("component")[0]
    assert any(word.strip(",.").count("-") == 2 and word[:2] == "20" for word in head.split())


def test_kinds_that_leave_a_gpu_useless_are_numbers_that_ask_for_a_reset() -> None:
    """A rank on it waits for ever, so the agent does not wait for its timeout."""
    assert {kind_of_xid(number) for number in (*RESET, *RESTART_MACHINE)} >= UNUSABLE


def test_an_instance_of_a_divided_gpu_is_its_gpu() -> None:
    """The driver adds the instance to the address of the GPU."""
    xid = xid_of("NVRM: Xid (PCI:0000:4e:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No")
    assert xid is not None
    assert (xid.code, xid.bus) == (94, "0000:4e:00.0")
    fault = see_xid(XidEvent(xid=xid, at=1.0, node="n0"), HangLimits())
    assert fault is not None
    assert fault.kind == "gpu-memory-contained"


def test_the_kernel_log_is_where_such_lines_of_devices_are_believed() -> None:
    """A rank may print anything; only CUDA's own errors count in its output."""
    assert {name for name in CERTAIN if KERNEL_LOG not in CATALOGUE[name].logs} == {"cuda-uncorrectable-ecc", "cuda-nvlink"}
    assert {name for name in CERTAIN if WORKER_OUTPUT in CATALOGUE[name].logs} == {"cuda-uncorrectable-ecc", "cuda-nvlink"}
