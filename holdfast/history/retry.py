"""Talk to the history from who outlives its being away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from holdfast.errors import HistoryError
from holdfast.history.errors import is_transient
from holdfast.log import note

T = TypeVar("T")

log = logging.getLogger("holdfast.history")


AGAIN: Final = 1.0
"""Seconds between two attempts."""


def wait_for_history(act: Callable[[], T], waits: Callable[[HistoryError], None]) -> T:
    """Return what *act* does, however long the database is away: then *waits* is called, once. Raise `HistoryError` for anything else."""
    said = False
    while True:
        try:
            return act()
        except HistoryError as error:
            if not is_transient(error):
                raise
            if not said:
                waits(error)
            said = True
        time.sleep(AGAIN)


class RetryingHistory:
    """Does what needs the history; says once when it is away, and once when it is back."""

    def __init__(self, who: str, facts: Mapping[str, Any] | None = None) -> None:
        """*who*: whose events say so, with these *facts*."""
        self._who, self._facts = who, dict(facts or {})
        self.is_away = False

    def __call__(self, act: Callable[[], None]) -> None:
        """Do *act*; what keeps it from the history is noted, and never raised."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 (a history that is away is asked again; who asks must not fall with it)
            if not self.is_away:
                note(log, f"{self._who}.history-away", level=logging.WARNING, **self._facts, error=error)
            self.is_away = True
        else:
            if self.is_away:
                note(log, f"{self._who}.history-back", **self._facts)
            self.is_away = False
