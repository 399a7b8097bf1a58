"""Talk to the history from a thread that outlives its being away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.log import note

log = logging.getLogger("holdfast.history")


class Asking:
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
