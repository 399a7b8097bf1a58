"""Every kind of line that can take a node out was posted by somebody: on a report's page, in a mailing list, in a vendor's manual.

`posted_*.tsv` has those lines, each with the address where it was read; those that act by themselves stand in `certain.tsv` too. A kind
that only the source of a driver or a tool prints is shown and takes no node out, until somebody posts such a line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.classify.classifier import classify_text
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import TAKES_NODE_OUT
from holdfast.detectors.evidence import LogLine
from holdfast.detectors.log_lines.classification import judge
from tests.each import each

HERE: Final = Path(__file__).parent
SOURCES: Final = (".c", ".cc", ".cpp", ".h", ".go", ".py", ".rs")
"""Endings of an address that leads to a program's source: what stands there is a format, which its reader filled in."""


def rows_of(*names: str) -> Iterator[dict[str, str]]:
    """Give the rows of the tables whose names fit *names*."""
    for path in sorted(path for name in names for path in HERE.glob(name)):
        with path.open(newline="") as file:
            yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def is_report(address: str) -> bool:
    """Return whether somebody posted a line at *address*: it is neither a source file nor a search in one."""
    page = address.partition("#")[0]
    return not page.endswith(SOURCES) and "/search?" not in page


POSTED: Final = list(rows_of("posted_*.tsv"))
OTHERS: Final = [
    *(row["line"] for row in rows_of("public*.tsv") if row["label"] == "fault"),
    *(row["line"] for row in rows_of("certain.tsv") if row["acts"] == "yes" and is_report(row["address"])),
    *(row["line"] for row in rows_of("monitors.tsv") if row["kind"]),
]
TAKES_OUT: Final = sorted(
    name for name, kind in CATALOGUE.items() if isinstance(kind.unhealthy.evidence, LogLine) and kind.recommended_action in TAKES_NODE_OUT
)


@each("row", POSTED)
def test_a_posted_line_is_of_its_kind(row: dict[str, str]) -> None:
    """By the rule itself; each with the address where it stands."""
    assert judge(row["line"]) == row["kind"]
    assert row["address"].startswith("https://")


def test_the_fast_matcher_agrees() -> None:
    """On all of them as one log."""
    found = {one.line: one.kind for one in classify_text("\n".join(row["line"] for row in POSTED))}
    assert found == {number: row["kind"] for number, row in enumerate(POSTED, 1)}


def test_every_kind_that_takes_a_node_out_was_posted() -> None:
    """A kind of log lines for which this fails gets a line, or takes no node out."""
    seen = {judge(line) for line in OTHERS} | {row["kind"] for row in POSTED}
    assert [name for name in TAKES_OUT if name not in seen] == []
