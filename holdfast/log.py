"""One way to log: a fixed event name and facts."""

from __future__ import annotations

import logging


def note(log: logging.Logger, event: str, /, *, level: int = logging.INFO, **facts: object) -> None:
    """Log *event* with its *facts*: a line for a person, fields for a machine."""
    line = " ".join(f"{name}={fact}" for name, fact in facts.items())
    log.log(level, "%s %s", event, line, extra={"event": event, "facts": facts}, stacklevel=2)
