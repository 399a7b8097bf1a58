"""Lines as they come: prefixes, colours, garbage, tracebacks of several ranks, endless input."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.classify import Classifier, blocks, classify
from holdfast.classify.classifier import MAX_CACHED, classify_text
from holdfast.classify.log_stream import BLOCK, MAX_LINE, plain
from holdfast.classify.matcher import NaiveMatcher, best
from holdfast.classify.traceback_collector import MAX_LINES, MAX_OPEN
from holdfast.cli.commands.analyse.classify import json_lines
from holdfast.detectors.catalogue import CATALOGUE
from tests.costs import MOST, growth, seconds

OFF_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=991, name=python, GPU has fallen off the bus."
FINE = "step 100 | loss 2.31 | lr 3.0e-4"
PREFIXES = (
    "[ 8123.442190] ",
    "<3>[    0.5] ",
    "Mar  4 02:11:09 node017 kernel: ",
    "2025-02-11T10:22:31.442113+00:00 node017 kernel: ",
    "2025-02-11 10:22:31,442 ",
    "[Tue Mar  4 02:11:09 2025] ",
    "kern  :err   : [Tue Mar  4 02:11:09 2025] ",
    "node017: ",
    "\x1b[31m",
    "error-node: fault-3 ",
    "\ufeff",
    "\x00\x01",
)


def kinds(text: str) -> list[tuple[int, str]]:
    """Return the faults in *text* by line."""
    return [(one.line, one.kind) for one in classify_text(text)]


@pytest.mark.parametrize("end", ["", "\r", "\x1b[0m", " \r"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_surrounds_a_line_does_not_matter(prefix: str, end: str) -> None:
    """Neither for a fault nor for its absence."""
    assert kinds(f"{prefix}{OFF_BUS}{end}\n{prefix}{FINE}{end}\n") == [(1, "gpu-off-bus")]


@given(st.binary(max_size=400))
def test_arbitrary_bytes_do_not_break_it(garbage: bytes) -> None:
    """Whatever comes in, each line is counted, and what follows is judged."""
    lines = list(classify(io.BytesIO(garbage + b"\n" + OFF_BUS.encode()).read))
    assert sum(page.count for page in lines) == garbage.count(b"\n") + 2
    assert [one.kind for page in lines for one in page.faults][-1:] == ["gpu-off-bus"]


@given(
    st.lists(st.sampled_from([OFF_BUS, FINE, "", "ERROR: x failed", "Traceback (most recent call last):"]), max_size=12), st.integers(1, 40)
)
def test_the_size_of_blocks_does_not_matter(lines: list[str], size: int) -> None:
    """Blocks of any size hold the same lines."""
    text = "\n".join(lines).encode() + b"\n"
    whole = [one for page in classify(io.BytesIO(text).read) for one in page.faults]
    source = io.BytesIO(text)
    assert [one for page in classify(lambda _: source.read(size)) for one in page.faults] == whole


@given(st.text(max_size=200))
def test_the_fast_matcher_misses_nothing_that_the_plain_one_sees(text: str) -> None:
    """Hyperscan answers with candidates; what it may not do is to leave one out."""
    log = f"{text}\n{OFF_BUS}\n{text} failed: timeout\n"
    assert classify_text(log) == classify_text(log, NaiveMatcher())


@pytest.mark.parametrize("filling", ["a", "_", "a.", "0000:", "x/"])
def test_a_word_without_end_hides_no_words_before_it(filling: str) -> None:
    """And takes no minutes: the time limit of the tests is the proof."""
    log = "\n".join(f"[{number}.0] dm-3: writeback error on inode 12 {number}{filling * (16000 // len(filling))}" for number in range(20))
    assert [kind for _, kind in kinds(log)] == ["disk-other"] * 20


def test_one_fast_matcher_is_made() -> None:
    """It takes seconds the first time."""
    assert best() is best()


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 31, in step
    loss = model(batch)
           ^^^^^^^^^^^^
{}"""


@pytest.mark.parametrize(
    ("last", "kind", "attributed_to"),
    [
        ("ValueError: bad batch", "script-value", "user_code"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda-out-of-memory", "user_code"),
        ("OSError: [Errno 28] No space left on device: '/ckpt'", "disk-full", "storage"),
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported",
            "cuda-uncorrectable-ecc",
            "gpu",
        ),
        ("my.errors.Strange", "script-exception", "user_code"),
    ],
)
def test_a_traceback_is_one_result(last: str, kind: str, attributed_to: str) -> None:
    """Reported on its first line, by the exception that it ends in; lines around it keep their own."""
    text = f"{FINE}\n{TRACEBACK.format(last)}\n{FINE}\n{OFF_BUS}\n"
    (first, name), second = kinds(text)
    assert (first, name, CATALOGUE[name].attributed_to) == (2, kind, attributed_to)
    assert second == (text.count("\n"), "gpu-off-bus")


def test_a_chain_of_exceptions_is_one_result() -> None:
    """And an error's number inside it counts for more than the last exception's type."""
    chain = TRACEBACK.format("OSError: [Errno 5] Input/output error")
    chain += "\n\nThe above exception was the direct cause of the following exception:\n\n" + TRACEBACK.format("RuntimeError: no batch")
    assert kinds(chain + "\n" + FINE) == [(1, "file-io-error")]


def test_interleaved_tracebacks_of_ranks_are_separated() -> None:
    """By the tag that torch puts in front of every line."""
    ranks = [[f"[rank{rank}]: {line}" for line in TRACEBACK.format(f"ValueError: of {rank}").split("\n")] for rank in range(3)]
    mixed = "\n".join(line for lines in zip(*ranks, strict=True) for line in lines)
    found = classify_text(mixed + "\n" + FINE)
    assert [(one.line, one.kind) for one in found] == [(1, "script-value"), (2, "script-value"), (3, "script-value")]
    assert [one.text.splitlines()[-1] for one in found] == ["ValueError: of 0", "ValueError: of 1", "ValueError: of 2"]


def test_a_truncated_traceback_is_reported_at_the_end() -> None:
    """Nothing is lost because its end is missing."""
    assert kinds(TRACEBACK.format("").rstrip()) == [(1, "script-exception")]


def test_memory_is_bounded() -> None:
    """A line without end, a traceback without end, and more open tracebacks than anybody reads."""
    endless = iter([b"x" * BLOCK] * 8 + [b"\n", OFF_BUS.encode()])
    held = list(blocks(lambda _: next(endless, b"")))
    assert max(map(len, held)) <= MAX_LINE + BLOCK
    classifier = Classifier()
    classifier.feed(b"Traceback (most recent call last):\n" + b'  File "a.py", line 1, in f\n' * 10 * MAX_LINES)
    for rank in range(4 * MAX_OPEN):
        classifier.feed(f"[rank{rank}]: Traceback (most recent call last):\n".encode())
    assert len(classifier._collector._open) <= MAX_OPEN
    assert all(len(one.lines) <= MAX_LINES for one in classifier._collector._open.values())
    for number in range(MAX_CACHED + 10):
        classifier._kind(f"error {number}".encode(), (0,))
    assert len(classifier._known) <= MAX_CACHED


def test_a_long_line_is_cut_wherever_it_stands_in_a_block() -> None:
    """In the middle of a block, too: what is kept of it is judged, and so is what follows."""
    lines = [FINE, "NVRM: " + "x" * 900_000, "y" * MAX_LINE, OFF_BUS, ""]
    once = iter(["\n".join(lines).encode()])
    (block,) = blocks(lambda _: next(once, b""))
    assert [len(line) for line in block.split(b"\n")] == [len(FINE), MAX_LINE, MAX_LINE, len(OFF_BUS), 0]


@pytest.mark.parametrize("piece", [b"\x1b]", b"\x1b[", b"\x1b]0;title", b"\x1b[0;1;", b"\x1b"])
def test_escape_sequences_that_never_end_cost_in_proportion_to_their_number(piece: bytes) -> None:
    """A line of 64 KiB of them took ten seconds."""
    assert growth(plain, piece, 1 << 15) < MOST
    assert seconds(plain, piece * (1 << 15)) < 1.0


def test_a_flood_is_judged_as_each_of_its_lines_is() -> None:
    """What is known is not searched again; what is new among it, and a traceback that takes known lines in, is seen all the same."""
    other = "EXT4-fs error (device sda1): ext4_find_entry:1463: inode #2: comm python: reading directory lblock 0"
    flood = [f"[{number}.5] {OFF_BUS}" for number in range(40)]
    block = [*flood, FINE, f"[41.5] {other}", *TRACEBACK.format("ValueError: of 1").split("\n"), *flood]
    classifier = Classifier()
    found = [(one.line, one.kind) for _ in range(3) for one in classifier.feed(("\n".join(block) + "\n").encode()).faults]
    assert classifier._flooded
    assert sorted([*found, *((one.line, one.kind) for one in classifier.finish().faults)]) == kinds("\n".join(block * 3))


def test_a_line_is_classified_as_soon_as_it_is_complete() -> None:
    """Who follows a log need not wait for its end."""
    chunks = iter([OFF_BUS.encode(), b"\n", FINE.encode() + b"\n"])
    pages = classify(lambda _: next(chunks, b""))
    assert [one.kind for one in next(pages).faults] == ["gpu-off-bus"]


def test_json_has_one_object_for_each_line_or_traceback() -> None:
    """In the order in which they became complete, all with the same fields."""
    text = f"{FINE}\n{OFF_BUS}\n{TRACEBACK.format('KeyError: 3')}\nend\n"
    pages = list(classify(io.BytesIO(text.encode()).read))
    objects = [json.loads(line) for page in pages for line in json_lines(page).splitlines()]
    assert [(one["line"], one["classification"], one["kind"], one["attributed_to"]) for one in objects] == [
        (1, "benign", None, "none"),
        (2, "fault", "gpu-off-bus", "gpu"),
        (3, "fault", "script-value", "user_code"),
        (8, "benign", None, "none"),
    ]
    assert all({"line", "classification", "kind", "attributed_to", "recommended_action", "action"} <= one.keys() for one in objects)
