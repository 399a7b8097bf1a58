"""A value of a table is judged with the header that names what it counts, and only within its table."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from holdfast.classify import classify
from holdfast.classify.classifier import Classifier, classify_text
from holdfast.classify.explanation import explain, explain_report
from holdfast.classify.matcher import NaiveMatcher
from holdfast.detectors.catalogue import CATALOGUE, KERNEL_LOG
from holdfast.detectors.confirmation import acts_alone, confirmed
from holdfast.detectors.diagnosis import see
from holdfast.detectors.evidence import HangLimits, LogLine, WorkerExit
from holdfast.detectors.log_lines.outputs import LINES, said
from holdfast.detectors.log_lines.tables import DEEPEST, FORMATS, LONGEST, MOST_BETWEEN, MOST_OPEN, NAME, OPENS, Tables, header_of
from tests.costs import growth
from tests.each import each

SAID = re.compile(r" *<= (?P<kind>[\w-]+)$")
ROW = "        Pending                           : Yes"
HEAD = "    Remapped Rows"
PENDING = "gpu-row-remap-pending"


@dataclass(frozen=True)
class Case:
    """What a program printed, and what is said of each line that reports a fault."""

    about: str
    lines: list[str]
    kinds: dict[int, str]

    @property
    def text(self) -> str:
        """The lines as one log."""
        return "\n".join(self.lines)


def cases() -> list[Case]:
    """Return the cases of the table."""
    found = []
    for part in (Path(__file__).parent / "tables.txt").read_text().split("\n### ")[1:]:
        about, *lines = part.rstrip("\n").split("\n")
        kinds = {number: said["kind"] for number, line in enumerate(lines, 1) if (said := SAID.search(line))}
        found.append(Case(about, [SAID.sub("", line) for line in lines], kinds))
    return found


CASES = cases()


def kinds(text: str) -> dict[int, str]:
    """Return the faults in *text* by line."""
    return {one.line: one.kind for one in classify_text(text)}


@each("case", CASES)
def test_each_value_is_judged_with_its_header(case: Case) -> None:
    """And what is no fault with it, is none; each case names where its layout is from."""
    assert case.about.split(" | ")[1].startswith("https://")
    assert kinds(case.text) == case.kinds


def test_the_cases_are_many_and_have_every_table() -> None:
    """As many as the claim is worth, with faults and without."""
    assert len(CASES) >= 40
    assert sum(not case.kinds for case in CASES) >= 10
    headers = [header_of(one.text) for case in CASES for one in classify_text(case.text)]
    assert {one.name for one in FORMATS} == {header.split(" > ")[0] for header in headers if header}


@each("case", CASES)
def test_no_table_takes_a_node_out(case: Case) -> None:
    """A count says not since when it counts: it is shown."""
    tables = [one for one in classify_text(case.text) if header_of(one.text)]
    assert not any(acts_alone(CATALOGUE[one.kind], one.text) for one in tables)


def test_all_cases_are_one_log_in_blocks_of_any_size_and_for_either_matcher() -> None:
    """A table that ended says nothing of the next one; that a block ends within a table changes nothing."""
    text = "\n\n".join(case.text for case in CASES) + "\n"
    whole = classify_text(text)
    assert len(whole) == sum(len(case.kinds) for case in CASES)
    assert classify_text(text, NaiveMatcher()) == whole
    source = io.BytesIO(text.encode())
    assert [one for page in classify(lambda _: source.read(100)) for one in page.faults] == whole


@pytest.mark.parametrize("between", ["", "done", "step 100 | loss: 2.31", "x" * (LONGEST + 1)])
def test_a_header_ends_with_its_table(between: str) -> None:
    """With a blank line, or one of another shape: the same row is then judged as it is."""
    assert kinds(f"{HEAD}\n{ROW}\n") == {2: PENDING}
    assert kinds(f"{HEAD}\n{between}\n{ROW}\n") == {}


def test_a_line_that_ends_a_table_is_judged() -> None:
    """It may itself be a fault, or the header of the next table."""
    off = "NVRM: Xid (PCI:0000:3b:00): 79, pid=991, name=python, GPU has fallen off the bus."
    assert kinds(f"{HEAD}\n{off}\n{HEAD}\n{ROW}\n") == {2: "gpu-off-bus", 4: PENDING}


def test_tables_of_several_programs_and_ranks_are_separate() -> None:
    """Each line belongs to the table of its own prefix; others end it only when they are many."""
    prefixes = ["[rank0]: ", "[rank1]: ", "0: ", "Mar  4 02:11:09 node017 gpucheck[811]: ", "2025-02-11T10:22:31Z n7 check[9]: "]
    text = "".join(f"{prefix}{line}\n" for line in (HEAD, ROW) for prefix in prefixes)
    assert list(kinds(text)) == [6, 7, 8, 9, 10]
    few, many = "step 1\n" * (MOST_BETWEEN - 1), "step 1\n" * MOST_BETWEEN
    assert set(kinds(f"[rank0]: {HEAD}\n{few}[rank0]: {ROW}\n").values()) == {PENDING}
    assert kinds(f"[rank0]: {HEAD}\n{many}[rank0]: {ROW}\n") == {}


def test_memory_is_bounded_whatever_is_nested_or_left_open() -> None:
    """Tables without end, sections within sections, and names without end."""
    tables = Tables()
    for rank in range(4 * MOST_OPEN):
        tables.take(f"[rank{rank}]: {HEAD}")
    for depth in range(5, 100):
        tables.take(f"[rank{4 * MOST_OPEN - 1}]: {' ' * depth}{'x' * 1000}")
    assert len(tables._open) <= MOST_OPEN
    (table,) = (one for key, one in tables._open.items() if str(4 * MOST_OPEN - 1) in key)
    assert len(table.path) == DEEPEST
    assert max(len(name) for _, name in table.path) <= NAME


@pytest.mark.parametrize("piece", [f"{ROW}\n", " a:\n", "     x: 1\n", f"{HEAD}\n", "  1 2 3\n"])
def test_the_cost_is_linear(piece: str) -> None:
    """In the number of a table's lines, and in their length."""

    def read(rows: str) -> None:
        Classifier().feed(f"{HEAD}\n{rows}\n".encode())

    assert growth(read, piece, 1 << 16) < 3.0
    assert growth(Tables().take, f"{HEAD} {piece}".replace("\n", " "), LONGEST // 2) < 3.0


def test_every_line_that_begins_a_table_passes_the_prefilter() -> None:
    """The prefilter may let through too much, and never too little."""
    prefilter = re.compile(OPENS, re.ASCII)
    begun = 0
    for case in CASES:
        for line in case.lines:
            tables = Tables()
            said = tables.take(line)
            begun += said is not None
            assert said is None or prefilter.search(line), line
    assert begun >= len(FORMATS)


def test_in_a_flood_tables_are_read_too() -> None:
    """A flood remembers the verdict on a line; that of a row depends on its header."""
    off = "[{}.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=991, name=python, GPU has fallen off the bus."
    flood = [off.format(number) for number in range(40)]
    block = "\n".join([*flood, ROW, HEAD, ROW, *flood, ""]).encode()
    classifier = Classifier()
    pages = [classifier.feed(block) for _ in range(3)]
    assert classifier._flooded
    assert [[one.line - page.first for one in page.faults if one.kind == PENDING] for page in pages] == [[42]] * 3


def test_the_explanation_names_the_header() -> None:
    """That of lines, and that of a fault of an incident, of which only its words are known."""
    found = explain(f"GPU 00000000:18:00.0\n{HEAD}\n{ROW}\n")
    header = "nvidia-smi -q > GPU 00000000:18:00.0 > Remapped Rows"
    assert (found.kind, found.header, found.acts) == (PENDING, header, False)
    assert ("judged with its header", (header,)) in list(found.facts())
    recorded = explain_report(PENDING, "worker output of rank 3", found.line, "", "monitor")
    assert recorded is not None
    assert ("judged with its header", (header,)) in list(recorded.facts())
    assert explain(ROW).kind is None
    assert not explain("[1.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.").header


def test_what_a_rank_printed_before_it_failed_is_read_with_its_headers() -> None:
    """Also where the header stands before the lines that are read."""
    table = "\n".join([HEAD, *["        Correctable Error                 : 0"] * (LINES - 1), ROW])
    (fault,) = (one for one in said([WorkerExit(node="n0", rank=0, at=1.0, code=1, output=table)]) if one.kind == PENDING)
    assert fault.quote == "nvidia-smi -q > Remapped Rows > Pending: Yes"


def test_a_table_that_a_rank_printed_confirms_nothing() -> None:
    """It does not say since when it counts; a line about the same port does."""
    table = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Down\n"
    (port,) = (one for one in said([WorkerExit(node="n0", rank=0, at=1.0, code=1, output=table)]) if one.kind == "link-down")
    timeout = "mlx5_core 0000:9a:00.0: wait_func:1122:(pid 99): QUERY_VPORT_COUNTER(0x770) timeout. Will cause a leak of a command resource"
    (card,) = see([LogLine(text=timeout, at=2.0, node="n0", log=KERNEL_LOG)], HangLimits())
    assert card.kind == "mlx5-command-timeout"
    assert confirmed([card, port]) == {}
    line = replace(port, quote="mlx5_core 0000:9a:00.0 ens5f0np0: Link down")
    assert confirmed([card, line])[card.key].startswith("link-down")
