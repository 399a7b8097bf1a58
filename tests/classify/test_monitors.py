"""Reports of other monitors: node-problem-detector, NVSentinel, DCGM, NCCL's RAS and Slurm, as they print or document them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from holdfast.classify.classifier import classify_text
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import KERNEL_LOG, SYSTEM_LOG, TAKES_NODE_OUT
from holdfast.detectors.confirmation import acts_alone, confirmed
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import HangLimits, LogLine
from holdfast.detectors.log_lines.classification import judge
from tests.each import each

with (Path(__file__).parent / "monitors.tsv").open(newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus."


@each("row", ROWS)
def test_a_report_is_recognised_and_one_that_all_is_well_is_no_fault(row: dict[str, str]) -> None:
    """Each with the address where it is posted or documented."""
    assert (judge(row["line"]) or "") == row["kind"]
    assert row["address"].startswith("https://")


def test_the_fast_matcher_agrees() -> None:
    """On all of them as one log."""
    found = {one.line: one.kind for one in classify_text("\n".join(row["line"] for row in ROWS))}
    assert found == {number: row["kind"] for number, row in enumerate(ROWS, 1) if row["kind"]}


def test_no_report_of_a_monitor_acts_by_itself() -> None:
    """It may be about another node, or of long ago."""
    assert not any(acts_alone(CATALOGUE[row["kind"]], row["line"]) for row in ROWS if row["kind"])


def test_a_report_counts_beside_another_signal_on_the_node() -> None:
    """A monitor calls a GPU broken; alone that is shown, and beside the kernel's own line about the GPU it is confirmed."""
    text = next(row["line"] for row in ROWS if row["kind"] == "node-monitor-fatal")
    (report,) = see([LogLine(text=text, at=1.0, node="n0", log=SYSTEM_LOG)], HangLimits())
    (xid,) = see([LogLine(text=XID, at=2.0, node="n0", log=KERNEL_LOG)], HangLimits())
    assert report.entry.recommended_action in TAKES_NODE_OUT
    assert confirmed([report]) == {}
    assert confirmed([report, xid])[report.key].startswith("gpu-off-bus")
    assert confirmed([report, replace(xid, node="n1")]) == {}
