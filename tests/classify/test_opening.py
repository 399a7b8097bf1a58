"""Logs that are packed, or of another alphabet: what they hold is found, and what cannot be read is never taken for free of faults."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable

import pytest

from holdfast.classify import classify
from holdfast.classify.log_stream import decoded
from holdfast.errors import NotReadable

OFF_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=991, name=python, GPU has fallen off the bus."
LOG = f"hello\n{OFF_BUS}\nbye\n"


def found(log: bytes, *, at_once: int | None = None) -> list[tuple[int, str]]:
    """Return what is found in *log*, of which no more than *at_once* bytes can be had at once."""
    stream = io.BytesIO(log)
    read = decoded(lambda most: stream.read(min(most, at_once or most)), "x.log")
    return [(one.line, one.kind) for page in classify(read) for one in page.faults]


@pytest.mark.parametrize("at_once", [None, 1, 7])
@pytest.mark.parametrize(
    "packed",
    [
        str.encode,
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text[:9].encode()) + gzip.compress(text[9:].encode()),
        lambda text: bz2.compress(text.encode()),
        lambda text: lzma.compress(text.encode()),
        lambda text: text.encode("utf-16"),
        lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-16-be"),
        lambda text: text.encode("utf-32"),
        lambda text: b"\x00\x00\xfe\xff" + text.encode("utf-32-be"),
        lambda text: text.encode("utf-32-le"),
        lambda text: text.encode("utf-32-be"),
    ],
    ids=[
        "plain", "gzip", "two gzips", "bzip2", "xz",
        "utf-16", "utf-16-be", "utf-16-le without a mark", "utf-16-be without a mark",
        "utf-32", "utf-32-be", "utf-32-le without a mark", "utf-32-be without a mark",
    ],
)  # fmt: skip
def test_a_log_is_read_however_it_is_kept(packed: Callable[[str], bytes], at_once: int | None) -> None:
    """As a file, and as it trickles out of a pipe."""
    assert found(packed(LOG), at_once=at_once) == [(2, "gpu-off-bus")]


@pytest.mark.parametrize(
    ("log", "cure"),
    [
        (b"\x28\xb5\x2f\xfd and more", "zstd -dc"),
        (b"LPKSHHRH and more", "journalctl --file"),
        (b"PK\x03\x04 and more", "unzip -p"),
        (b"\x04\x22\x4d\x18 and more", "lz4 -dc"),
        (b"\x02\x21\x4c\x18 and more", "lz4 -dc"),
        (b"7z\xbc\xaf\x27\x1c and more", "7z x -so"),
        (b"\x1f\x9d and more", "gzip -dc"),
        (gzip.compress(LOG.encode())[:-9], "another copy"),
        (b"\x1f\x8b is no gzip", "another copy"),
        (b"BZh9 is no bzip2", "another copy"),
        (lzma.compress(LOG.encode())[:-20], "another copy"),
    ],
    # By name: gzip writes the time into what it packs, and workers that collect at different seconds must have the same tests.
    ids=["zstd", "event_log", "zip", "lz4", "old lz4", "7z", "compress", "short gzip", "no gzip", "no bzip2", "short xz"],
)
def test_what_cannot_be_read_as_lines_is_refused_with_the_cure(log: bytes, cure: str) -> None:
    """It would look as if it had no faults."""
    with pytest.raises(NotReadable) as refused:
        found(log)
    assert "x.log" in str(refused.value)
    assert cure in refused.value.cure


def test_a_first_line_is_not_held_back() -> None:
    """Of a stream that goes on, what is there is judged."""
    chunks = [f"{OFF_BUS}\n".encode()]
    pages = classify(decoded(lambda _: chunks.pop(), "x.log"))
    assert [one.kind for one in next(pages).faults] == ["gpu-off-bus"]
    assert not chunks, "no second read was needed"
