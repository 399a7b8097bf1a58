"""Tell what ended a worker: the exception as a message, and whether it is only the echo of a lost peer.

Standard library only, so that the starter of a worker can use it before, or without, torch.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any, Final

from holdfast.peer_error_patterns import DEVICE_ERROR, LOCAL_SOCKET_ERROR, PEER_LOST_ERROR, is_peer_lost_message

LONGEST_MESSAGE: Final = 4 * 1024
"""Bytes of an exception's own words that travel to the agent."""

LONGEST_TRACEBACK: Final = 64 * 1024
"""Bytes of a traceback that travel to the agent."""

_GLOO_TIMEOUT: Final = "Application timeout caused pair closure"
"""What every collective says after one timed out; gloo does not name itself here."""

_STORE_LATE: Final = re.compile(r"(?i)\btimed?[ -]?out\b")
"""What a store says when nobody has left what it was asked for: another rank is late, which is not lost."""


def is_peer_loss(error: BaseException) -> bool:
    """Say whether *error*, or what caused it, only tells that another rank (or the store) is gone."""
    return any(_tells_of_a_peer(link) for link in _chain(error)) and not is_device_error(error)


def is_late_peer(error: BaseException) -> bool:
    """Say whether *error*, or what caused it, only tells that another rank did not come in time: it may still load or compile."""
    return any(_tells_of_lateness(link) for link in _chain(error)) and not is_device_error(error)


def is_device_error(error: BaseException) -> bool:
    """Say whether *error*, or what caused it, is one of this process's GPU, which is of no more use to it, whoever else was lost."""
    return any(_tells_of_the_device(link) for link in _chain(error))


def _torch_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch")}


def _tells_of_the_device(error: BaseException) -> bool:
    return "AcceleratorError" in _torch_names(error) or (isinstance(error, RuntimeError) and bool(DEVICE_ERROR.search(str(error))))


def _tells_of_lateness(error: BaseException) -> bool:
    return "DistStoreError" in _torch_names(error) and bool(_STORE_LATE.search(str(error)))


def _tells_of_a_peer(error: BaseException) -> bool:
    """Judge one exception by its class and by the words that torch 2.13, gloo and NCCL really use."""
    if f"{type(error).__module__}.{type(error).__name__}" == PEER_LOST_ERROR:
        return True
    words = str(error)
    if _torch_names(error) & {"DistNetworkError", "DistStoreError"}:
        return not LOCAL_SOCKET_ERROR.search(words) and not _tells_of_lateness(error)
    if not isinstance(error, RuntimeError):
        return False  # a ConnectionResetError of the user's own download is no peer
    return words == _GLOO_TIMEOUT or is_peer_lost_message(words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and what it was raised from, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def describe(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """Return the ``exception`` message for *error*; never raise, whatever the exception does when printed."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {
        "t": "exception",
        "type": name,
        "message": _shortened(_words(error), LONGEST_MESSAGE),
        "traceback": _shortened(_traceback(error), LONGEST_TRACEBACK),
        "step": step,
        "errno": next((link.errno for link in _chain(error) if isinstance(link, OSError)), None),
        "peer_lost": _is_echo(error),
    }


def _is_echo(error: BaseException) -> bool:
    """Say whether *error* tells of others alone, lost or late; no for an exception that cannot be read."""
    try:
        return is_peer_loss(error) or is_late_peer(error)
    except Exception:  # noqa: BLE001 (a user's __str__ may raise anything, and the report must leave)
        return False


def _words(error: BaseException) -> str:
    """Return what *error* says of itself."""
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001 (as above)
        return f"<its text could not be had: {type(other).__name__}>"


def _traceback(error: BaseException) -> str:
    """Return the whole traceback of *error*, causes included."""
    first = error.__traceback__
    while (
        first is not None
        and first.tb_next is not None
        and first.tb_frame.f_globals.get("__name__") == "holdfast.runtime.process.fork_server"
    ):
        first = first.tb_next  # the starter's frames in front of the script's own say nothing to its author
    try:
        return "".join(traceback.format_exception(type(error), error, first))
    except Exception as other:  # noqa: BLE001 (as above)
        return f"<its traceback could not be had: {type(other).__name__}>"


def _shortened(text: str, limit: int) -> str:
    """Return *text* in at most *limit* bytes: its beginning and, what matters more, its end."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= limit:
        return raw.decode()
    gap = b"\n[...]\n"
    head = limit // 4
    return (raw[:head] + gap + raw[len(raw) - (limit - head - len(gap)) :]).decode(errors="ignore")
