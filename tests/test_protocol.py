"""The protocol between flow, agent and worker: lines in, messages out, whatever anybody sends."""

from __future__ import annotations

import json
import math
import os
import stat
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.protocol import MAX_LINE_BYTES, BadLine, LineBuffer, Message, connect, decode, encode, listen

MESSAGES = some.dictionaries(
    some.text(max_size=8),
    some.recursive(some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(), some.lists),
)


@given(messages=some.lists(MESSAGES, max_size=5), cuts=some.lists(some.integers(0, 400), max_size=8))
def test_messages_arrive_complete_however_the_bytes_are_cut(messages: list[Message], cuts: list[int]) -> None:
    """A stream knows no borders."""
    data = b"".join(encode(message) for message in messages)
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    lines = LineBuffer()
    assert [message for a, b in pairwise(places) for message in lines.feed(data[a:b])] == messages


@given(data=some.binary(max_size=300))
def test_any_bytes_are_messages_or_a_bad_line(data: bytes) -> None:
    """Nothing else can come of them."""
    lines = LineBuffer()
    try:
        received = list(lines.feed(data)) + list(lines.feed(b"\n"))
    except BadLine:
        return
    assert all(isinstance(message, dict) for message in received)


def test_a_line_is_ascii_and_ends_once() -> None:
    """Whatever a message holds, nothing in it can end the line early."""
    line = encode({"text": "a\nb\u2028\ud800ü", "loss": math.nan})
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert decode(line)["text"] == "a\nb\u2028\ud800ü"
    assert math.isnan(decode(line)["loss"])


@pytest.mark.parametrize(
    "line", [b"hello", b"[1]", b"1", b"null", b'{"a":', b"\xff\xfe", b"[" * 100_000, b"{" * 100_000, b"1" * 5000, b"\0"]
)
def test_what_is_no_object_is_a_bad_line(line: bytes) -> None:
    """Deep nesting and huge numbers included."""
    with pytest.raises(BadLine):
        decode(line)


def test_messages_before_a_bad_line_are_read() -> None:
    """A worker's last words may be followed by half a line."""
    lines = LineBuffer().feed(b'{"a":1}\n\n  \n{"b":2}\nnonsense\n{"c":3}\n')
    assert [next(lines), next(lines)] == [{"a": 1}, {"b": 2}]
    with pytest.raises(BadLine):
        next(lines)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_refused(end: bytes) -> None:
    """With an end or without one: memory is not for the taking."""
    lines = LineBuffer()
    for _ in range(4):
        assert list(lines.feed(b"x" * (MAX_LINE_BYTES // 4))) == []
    with pytest.raises(BadLine, match="too long"):
        list(lines.feed(b"x" + end))


def test_a_long_line_may_be_just_short_enough() -> None:
    """A traceback and a log's tail are long."""
    message = {"text": "x" * (MAX_LINE_BYTES - 100)}
    assert list(LineBuffer().feed(encode(message))) == [message]


@pytest.mark.parametrize("depth", [1, 30])
def test_a_socket_may_lie_deeper_than_its_address_is_long(tmp_path: Path, depth: int) -> None:
    """The address has 107 bytes; the socket belongs to its owner alone, and a stale one is replaced."""
    folder = tmp_path / Path(*["0123456789"] * depth)
    folder.mkdir(parents=True)
    path = folder / "agent.sock"
    for _ in range(2):
        with listen(path) as server, connect(path, seconds=5) as client:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            client.sendall(b"x")
            served, _ = server.accept()
            with served:
                assert served.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        connect(path, seconds=5)


def test_a_socket_that_cannot_be_made_leaves_no_trace(tmp_path: Path) -> None:
    """The umask of the process is as before."""
    before = os.umask(0o022)
    try:
        with pytest.raises(FileNotFoundError):
            listen(tmp_path / "missing" / "agent.sock")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_numbers_that_json_does_not_know_travel() -> None:
    """A loss may be NaN; Python writes and reads it so."""
    assert json.loads(encode({"loss": math.inf})) == {"loss": math.inf}
