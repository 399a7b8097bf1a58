"""Lines of usual logs as a reviewer of the signatures wrote them, from memory of the formats: none is copied from a real log.

They show no rates, as their author saw the verdicts; the corpus and the public lines do that. Each row says what has to become of the line:
``none``, ``shown``, or ``acts`` (a node is left because of it alone). Lines that were judged wrongly at first led to better signatures.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from holdfast.classify.classifier import classify_text
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import TAKES_NODE_OUT, WORKER_OUTPUT, Fault
from holdfast.detectors.confirmation import acts_alone
from holdfast.detectors.log_lines.classification import judge
from tests.each import each

with (Path(__file__).parent / "from_memory.tsv").open(newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@each("row", ROWS)
def test_a_line_of_a_usual_log_is_judged_as_its_row_says(row: dict[str, str]) -> None:
    """By the rule itself: its kind, and whether it alone takes a node out."""
    name = judge(row["line"])
    verdict = "none" if name is None else "acts" if acts_alone(CATALOGUE[name], row["line"]) else "shown"
    assert (verdict, name or "") == (row["verdict"], row["kind"])


def test_the_fast_matcher_agrees() -> None:
    """On all of them as one log."""
    found = {one.line: one.kind for one in classify_text("\n".join(row["line"] for row in ROWS))}
    assert found == {number: row["kind"] for number, row in enumerate(ROWS, 1) if row["kind"]}


def test_there_are_lines_of_many_logs_and_of_each_verdict() -> None:
    """So that each of the tests above could fail."""
    assert len(ROWS) > 250
    assert len({row["source"] for row in ROWS}) >= 20
    assert {row["verdict"] for row in ROWS} == {"none", "shown", "acts"}


@pytest.mark.parametrize(
    "said", ["Volatile Uncorrectable ECC Error : 0", "will retry on: uncorrectable ECC error", "no uncorrectable ECC errors detected"]
)
def test_a_report_that_a_worker_prints_of_a_healthy_gpu_proves_nothing(said: str) -> None:
    """Only CUDA's own error in its output does: every line that begins with what a program says of a check would reset a healthy GPU."""

    def proves(line: str) -> bool:
        name = judge(line)
        if name is None or CATALOGUE[name].recommended_action not in TAKES_NODE_OUT:
            return False
        return Fault(kind=name, at=0.0, node="node-0", rank=0, quote=line, source=f"{WORKER_OUTPUT} of rank 0").is_proven

    assert proves("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    assert not proves(said)
