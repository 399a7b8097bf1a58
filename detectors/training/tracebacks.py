"""Parse the exceptions that Python printed into a worker's output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.detectors.evidence import WorkerException
from holdfast.peer_error_patterns import DEVICE_ERROR, LOCAL_SOCKET_ERROR, PEER_LOST_ERROR, is_peer_lost_message

MESSAGE_LINES: Final = 20
"""Maximum number of lines of a message: an NCCL error has five."""
SOURCE_LINES: Final = 20
"""Maximum number of source and marker lines after a frame."""

# Once a process group exists, torch puts "[rank3]: " in front of every line; an exception group draws bars.
_RANK: Final = re.compile(r"^\[[A-Za-z]+\d+\]: ?")
_BARS: Final = re.compile(r"^ *[|+] ")
HEAD: Final = "Traceback (most recent call last)"
_FRAME: Final = re.compile(r'  File "[^"\n]*", line \d+(?:, in |$)')
_EXCEPTION: Final = re.compile(r"(?P<type>[^\W\d][\w.<>]*)(?:: (?P<message>.*)|:?$)")
_LINKS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_PRINTED_AND_PASSED: Final = ("Exception ignored", "Exception in thread", "--- Logging error ---")
"""Lines above a traceback that did not end the process."""

_TERMINATED: Final = re.compile(
    r"terminate called after throwing an instance of '(?P<type>(?:c10|gloo)::[^'\n]*)'\s+what\(\): *(?P<message>.*)"
)


def raised_in(output: str) -> WorkerException | None:
    """Return the exception of the last traceback in *output*; one that Python printed and ignored does not count."""
    raw = [line.rstrip("\r") for line in output.split("\n")]
    lines = [_BARS.sub("", _RANK.sub("", line)) if line.startswith(("[", " ")) else line for line in raw]
    blocks = list(_blocks(lines))
    if not blocks:
        return None
    last = next((at for at in reversed(range(len(blocks))) if not _passed(lines, blocks[at][0])), len(blocks) - 1)
    links = _chain(blocks[: last + 1], lines)
    chain = [_exception(raw, lines, end) for _, end in links]
    (begin, _), (_, end), (name, words) = links[0], links[-1], chain[-1]
    numbers = [int(found[1]) for _, said in reversed(chain) if (found := re.search(r"\[Errno (-?\d+)\]", said[0]))]
    return WorkerException(
        type=name,
        message="\n".join(words),
        traceback="\n".join(_RANK.sub("", line) for line in raw[_first_line(lines, begin) : end + len(words)]),
        errno=next(iter(numbers), None),
        peer_lost=any(is_lost_peer(one, "\n".join(said)) for one, said in chain)
        and not any(_is_device_error(one, "\n".join(said)) for one, said in chain),
    )


def is_lost_peer(name: str, message: str) -> bool:
    """Return whether a printed exception means a lost peer, from its type and its message."""
    if name == PEER_LOST_ERROR:
        return True
    kind = name.rpartition(".")[2]
    if kind in ("DistNetworkError", "DistStoreError"):
        return not LOCAL_SOCKET_ERROR.search(message)
    if kind not in ("RuntimeError", "DistBackendError", "DistError"):
        return False  # a ConnectionResetError of the user's download is no lost peer
    return is_peer_lost_message(message)


def _is_device_error(name: str, message: str) -> bool:
    """Return whether a printed exception is an error of the process's own GPU, which is never a secondary failure."""
    kind = name.rpartition(".")[2]
    return kind == "AcceleratorError" or (kind.endswith("Error") and bool(DEVICE_ERROR.search(message)))


def aborted_for_lost_peer(output: str) -> bool:
    """Return whether a thread of gloo or NCCL aborted the process because a peer was lost."""
    found = _TERMINATED.search(output)
    return found is not None and is_peer_lost_message(f"{found['type']} {found['message']}")


def places_in(traceback: str) -> list[str]:
    """Return the locations (``file:line``) in *traceback*, innermost last."""
    return [f"{file}:{line}" for file, line in re.findall(r'File "([^"\n]+)", line (\d+)', traceback)]


def _blocks(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the line numbers of the first frame and of the exception of each traceback.

    A traceback is recognized by its frames, not by its head: a long one has lost its head, a syntax error has none, and a progress bar may
    precede it.
    """
    begin = newest = -1
    for number, line in enumerate(lines):
        if _FRAME.match(line):
            begin, newest = begin if begin >= 0 else number, number
        elif begin >= 0 and _EXCEPTION.match(line):
            yield begin, number
            begin = -1
        elif number - newest > SOURCE_LINES:  # truncated
            begin = -1


def _first_line(lines: list[str], begin: int) -> int:
    return begin - 1 if begin and HEAD in lines[begin - 1] else begin


def _passed(lines: list[str], begin: int) -> bool:
    above = _first_line(lines, begin) - 1
    return above >= 0 and lines[above].startswith(_PRINTED_AND_PASSED)


def _chain(blocks: list[tuple[int, int]], lines: list[str]) -> list[tuple[int, int]]:
    """Return the last of *blocks* with the chained ones before it."""
    links = blocks[-1:]
    for block in reversed(blocks[:-1]):
        if not any(line in _LINKS for line in lines[block[1] : links[0][0]]):
            break
        links.insert(0, block)
    return links


def _exception(raw: list[str], lines: list[str], number: int) -> tuple[str, list[str]]:
    """Return type and message lines of the exception on line *number*."""
    found = _EXCEPTION.match(lines[number])
    assert found
    words = [found["message"] or ""]
    rank = _RANK.match(raw[number])
    for line, plain in zip(raw[number + 1 : number + MESSAGE_LINES], lines[number + 1 : number + MESSAGE_LINES], strict=True):
        foreign = not line.startswith(rank[0].rstrip()) if rank else line.startswith("[")
        if foreign or not line.strip() or plain in _LINKS or HEAD in plain or plain.startswith(_PRINTED_AND_PASSED):
            break
        words.append(plain)
    return found["type"], words
