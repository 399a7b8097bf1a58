"""Describe the exception that ended a worker, and classify it: the loss of a peer, a late peer, or a device error.

Standard library only, so that the fork server can use it before, or without, torch.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any, Final

from holdfast.peer_error_patterns import DEVICE_ERROR, LOCAL_SOCKET_ERROR, PEER_LOST_ERROR, is_peer_lost_message

LONGEST_MESSAGE: Final = 4 * 1024
"""Bytes of an exception's message that are sent to the agent."""

LONGEST_TRACEBACK: Final = 64 * 1024
"""Bytes of a traceback that are sent to the agent."""

STARTING: Final = frozenset({"holdfast.runtime.process.fork_server", "holdfast.runtime.process.launcher", "runpy"})
"""Modules whose frames come before the script's own."""

_GLOO_TIMEOUT: Final = "Application timeout caused pair closure"
"""The text of every collective after one timed out; gloo does not name itself in it."""

_STORE_LATE: Final = re.compile(r"(?i)\btimed?[ -]?out\b")
"""The text of a store when a requested key does not exist yet: another rank is late, not lost."""


def is_peer_loss(error: BaseException) -> bool:
    """Return whether *error*, or its cause, only says that another rank (or the store) is lost."""
    return any(_says_peer_lost(one) for one in _chain(error)) and not is_device_error(error)


def is_late_peer(error: BaseException) -> bool:
    """Return whether *error*, or its cause, only says that another rank did not arrive in time: it may still load or compile."""
    return any(_says_peer_late(one) for one in _chain(error)) and not is_device_error(error)


def is_device_error(error: BaseException) -> bool:
    """Return whether *error*, or its cause, is one of this process's GPU: the process cannot use it any more, whoever else was lost."""
    return any(
        "AcceleratorError" in _torch_names(one) or (isinstance(one, RuntimeError) and bool(DEVICE_ERROR.search(str(one))))
        for one in _chain(error)
    )


def _torch_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch")}


def _says_peer_late(error: BaseException) -> bool:
    return "DistStoreError" in _torch_names(error) and bool(_STORE_LATE.search(str(error)))


def _says_peer_lost(error: BaseException) -> bool:
    """Classify one exception by its class and by the texts of torch 2.13, gloo and NCCL."""
    if f"{type(error).__module__}.{type(error).__name__}" == PEER_LOST_ERROR:
        return True
    text = str(error)
    if _torch_names(error) & {"DistNetworkError", "DistStoreError"}:
        return not LOCAL_SOCKET_ERROR.search(text) and not _says_peer_late(error)
    if not isinstance(error, RuntimeError):
        return False  # a ConnectionResetError of the user's own download is not a peer
    return text == _GLOO_TIMEOUT or is_peer_lost_message(text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and what it was raised from, outermost first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def describe(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """Return the ``exception`` message for *error*; never raise, whatever the exception does when it is converted to text."""
    kind = type(error)
    try:
        message = str(error)
    except Exception as other:  # noqa: BLE001 (a user's __str__ may raise anything, and the report must be sent)
        message = f"<its text is not available: {type(other).__name__}>"
    try:
        peer_lost = is_peer_loss(error) or is_late_peer(error)
    except Exception:  # noqa: BLE001 (as above)
        peer_lost = False
    return {
        "t": "exception",
        "type": kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": _shortened(message, LONGEST_MESSAGE),
        "traceback": _shortened(_traceback(error), LONGEST_TRACEBACK),
        "step": step,
        "errno": next((one.errno for one in _chain(error) if isinstance(one, OSError)), None),
        "peer_lost": peer_lost,
    }


def _traceback(error: BaseException) -> str:
    """Return the complete traceback of *error*, causes included, without the frames of the fork server before the script's own."""
    first = error.__traceback__
    while first is not None and first.tb_next is not None and first.tb_frame.f_globals.get("__name__") in STARTING:
        first = first.tb_next
    if isinstance(error, SyntaxError) and first is not None and first.tb_frame.f_globals.get("__name__") in STARTING:
        first = None  # the script was not even compiled: the error itself names the line
    try:
        return "".join(traceback.format_exception(type(error), error, first))
    except Exception as other:  # noqa: BLE001 (as above)
        return f"<its traceback is not available: {type(other).__name__}>"


def _shortened(text: str, limit: int) -> str:
    """Return *text* in at most *limit* bytes: its beginning and, which matters more, its end."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= limit:
        return raw.decode()
    gap = b"\n[...]\n"
    head = limit // 4
    return (raw[:head] + gap + raw[len(raw) - (limit - head - len(gap)) :]).decode(errors="ignore")
