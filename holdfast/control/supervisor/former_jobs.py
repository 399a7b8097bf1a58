"""Jobs that this process controlled and no longer does: the program that ran the flow exits by what is known of them here.

The history cannot tell it: a job that was handed over looks there like one whose controller died.
"""

from __future__ import annotations

_HANDED_OVER: dict[str, bool] = {}
"""Job name to whether it was handed over, and trains on."""


def leave(job: str, *, handed_over: bool) -> None:
    """Note that this process controls *job* no more."""
    _HANDED_OVER[job] = handed_over


def take_up(job: str) -> None:
    """Note that this process controls *job*, perhaps again."""
    _HANDED_OVER.pop(job, None)


def is_left(job: str) -> bool:
    """Tell whether this process controlled *job* once and does no more."""
    return job in _HANDED_OVER


def was_handed_over(job: str) -> bool:
    """Tell whether this process was told to leave *job*, which goes on."""
    return _HANDED_OVER.get(job, False)
