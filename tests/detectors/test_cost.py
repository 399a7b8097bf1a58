"""What a line costs: a hostile one, or one that is only long, holds up a recovery that waits for it to be read."""

from __future__ import annotations

import secrets
import time

import pytest

from holdfast.detectors.catalogue import CATALOGUE
from holdfast.detectors.evidence import LogLine, WorkerExit
from holdfast.detectors.log_lines.classification import LONGEST, judge
from holdfast.detectors.log_lines.outputs import read, said
from holdfast.detectors.signatures import SIGNATURES
from holdfast.detectors.signatures.loading import REACH, Signature, bounded
from tests.costs import MOST, RUNS, SMALL, filled, growth, seconds

SOME = {"0123456789abcdef", " ", "token", "Error ", "\x1b]", "_"}
"""Those of the runs that differ most."""
LENGTH = 4096
"""Characters of a line, which is also read at twice the length."""


def pieces(signature: Signature) -> list[str]:
    """Return what may lead an expression astray: the sample of its kind, whole and broken off, so that it begins often and never ends."""
    entry = CATALOGUE.get(signature.kind or "")
    if entry is None or not isinstance(entry.unhealthy.evidence, LogLine):
        return []
    text = entry.unhealthy.evidence.text.replace("\n", " ")
    return [text, text[: len(text) // 2 + 1], text[: len(text) // 4 + 4]]


@pytest.mark.long  # every signature against lines of many lengths
def test_no_signature_costs_more_than_in_proportion_to_a_lines_length() -> None:
    """Its own sample doubled and doubled again, and runs of all kinds."""
    steep = {}
    for signature in SIGNATURES:
        search = signature.regex.search
        for piece in (*pieces(signature), *RUNS):
            begin = time.process_time()
            search(filled(piece, LENGTH))
            if time.process_time() - begin >= SMALL and (times := growth(search, piece, LENGTH)) >= MOST:
                steep[signature.place, signature.pattern, piece[:40]] = round(times, 1)
    assert steep == {}


@pytest.mark.parametrize("run", [pytest.param(run, marks=() if run in SOME else pytest.mark.long) for run in RUNS])
def test_a_line_of_any_kind_is_judged_in_proportion_to_its_length(run: str) -> None:
    """All signatures and the words together; beyond the longest line nothing is read."""
    assert growth(judge, run, LONGEST // 4) < MOST
    assert seconds(judge, filled(run, 100 * LONGEST)) < 1.0


def test_a_repeated_dot_reaches_a_thousand_characters_and_escapes_and_sets_stay() -> None:
    """What stands in a line of a log stands nearer together than that."""
    assert bounded(r"a.*b.+?c\.*[.*]d[^].*]\\.*") == r"a.{0,256}b.{1,256}?c\.*[.*]d[^].*]\\.{0,256}"
    assert bounded(r"\.*a.*[.*]") == r"\.*a.{0,1024}[.*]"
    far = Signature(pattern="begin.*end")
    assert far.regex.search("begin" + " " * REACH + "end")
    assert not far.regex.search("begin" + " " * (REACH + 1) + "end")


def ends(count: int) -> list[WorkerExit]:
    """Return ends of ranks that each print a long line of their own."""
    text = "Error bad id {}\nRuntimeError: CUDA error: uncorrectable ECC error encountered"
    return [WorkerExit(node=f"n{rank}", rank=rank, at=0.0, code=1, output=text.format(secrets.token_hex(4096))) for rank in range(count)]


@pytest.mark.long
def test_the_last_output_of_64_ranks_is_matched_within_seconds() -> None:
    """They cost 20 s before: each is a line of 8 KB without a blank."""
    begin = time.process_time()
    assert {fault.kind for fault in said(ends(64))} == {"cuda-uncorrectable-ecc"}
    assert time.process_time() - begin < 8.0


def test_output_not_read_in_time_is_reported() -> None:
    """Whose lines were all read is judged; the others are named."""
    status_requested = iter(range(1000))
    faults, unread = read(ends(4), lambda: next(status_requested) >= 7)
    assert [fault.rank for fault in faults] == [0, 1]
    assert unread == [2, 3]
    assert read(ends(2), lambda: True) == ([], [0, 1])
