"""Exceptions as Python prints them, read back from what a worker left in its output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from detectors.evidence import WorkerException
from holdfast.peer_error_patterns import DEVICE_ERROR, LOCAL_SOCKET_ERROR, PEER_LOST_ERROR, is_peer_lost_message

MESSAGE_LINES: Final = 20
"""Lines of a message that are read: an error of NCCL has five."""
SOURCE_LINES: Final = 20
"""Lines of source and marks that may follow a frame."""

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
"""What Python says above a traceback that ended nothing."""

_TERMINATED: Final = re.compile(
    r"terminate called after throwing an instance of '(?P<type>(?:c10|gloo)::[^'\n]*)'\s+what\(\): *(?P<message>.*)"
)


def raised_in(output: str) -> WorkerException | None:
    """Return the exception that the last traceback in *output* ended in; one that Python printed and passed over does not count."""
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
        peer_lost=any(tells_of_lost_peer(one, "\n".join(said)) for one, said in chain)
        and not any(_tells_of_the_device(one, said[0]) for one, said in chain),
    )


def tells_of_lost_peer(name: str, message: str) -> bool:
    """Judge a printed exception by its type and by the words that torch, gloo and NCCL really use."""
    if name == PEER_LOST_ERROR:
        return True
    kind = name.rpartition(".")[2]
    if kind in ("DistNetworkError", "DistStoreError"):
        return not LOCAL_SOCKET_ERROR.search(message)
    if kind not in ("RuntimeError", "DistBackendError", "DistError"):
        return False  # a ConnectionResetError of the user's own download is no peer
    return is_peer_lost_message(message)


def _tells_of_the_device(name: str, message: str) -> bool:
    """Tell whether a printed exception is one of the process's own GPU: then it is no echo, whoever else was lost."""
    kind = name.rpartition(".")[2]
    return kind == "AcceleratorError" or (kind.endswith("Error") and bool(DEVICE_ERROR.search(message)))


def aborted_for_lost_peer(output: str) -> bool:
    """Tell whether a thread of gloo or NCCL gave up its process because a peer was gone: a watchdog's abort is an echo, too."""
    found = _TERMINATED.search(output)
    return found is not None and is_peer_lost_message(f"{found['type']} {found['message']}")


def places_in(traceback: str) -> list[str]:
    """Return the places (``file:line``) in *traceback*, innermost last."""
    return [f"{file}:{line}" for file, line in re.findall(r'File "([^"\n]+)", line (\d+)', traceback)]


def _blocks(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield for each traceback the numbers of its first frame and of the line that names the exception.

    Frames, not heads, tell a traceback: a long one has lost its head, a syntax error has none, a progress bar may stand in front of it.
    """
    begin = newest = -1
    for number, line in enumerate(lines):
        if _FRAME.match(line):
            begin, newest = begin if begin >= 0 else number, number
        elif begin >= 0 and _EXCEPTION.match(line):
            yield begin, number
            begin = -1
        elif number - newest > SOURCE_LINES:  # it was cut off
            begin = -1


def _first_line(lines: list[str], begin: int) -> int:
    return begin - 1 if begin and HEAD in lines[begin - 1] else begin


def _passed(lines: list[str], begin: int) -> bool:
    above = _first_line(lines, begin) - 1
    return above >= 0 and lines[above].startswith(_PRINTED_AND_PASSED)


def _chain(blocks: list[tuple[int, int]], lines: list[str]) -> list[tuple[int, int]]:
    """Return the last of *blocks* with those before it that led to it."""
    links = blocks[-1:]
    for block in reversed(blocks[:-1]):
        if not any(line in _LINKS for line in lines[block[1] : links[0][0]]):
            break
        links.insert(0, block)
    return links


def _exception(raw: list[str], lines: list[str], number: int) -> tuple[str, list[str]]:
    """Return the type of the exception that line *number* names, and its message by lines."""
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
