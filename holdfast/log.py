"""Log events with fields: as lines for people, or on request as one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Final

FORMAT: Final = "HOLDFAST_LOG"
"""Variable: with ``json`` every line of Holdfast's logs is one JSON object; ``text`` is the default."""
FORMATS: Final = ("text", "json")


def note(log: logging.Logger, event: str, /, *, level: int = logging.INFO, **facts: object) -> None:
    """Log *event*, a fixed name, with its *facts* as fields."""
    line = " ".join(f"{name}={fact}" for name, fact in facts.items())
    log.log(level, "%s %s", event, line, extra={"event": event, "facts": facts}, stacklevel=2)


def as_json() -> bool:
    """Return whether logs are JSON."""
    return os.environ.get(FORMAT, "").strip().lower() == "json"


def set_up() -> None:
    """Log to stderr, in the configured format. For programs; a library never does this."""
    if not as_json():
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


def convert() -> None:
    """If logs are JSON, have handlers that others have set up (Prefect's) write it too, and add one for Holdfast's own events."""
    if not as_json():
        return
    for log in [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]:
        for handler in log.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setFormatter(JsonLines())
                if type(handler).emit is not logging.StreamHandler.emit:  # one that colours what it writes (rich)
                    handler.emit = lambda record, handler=handler: logging.StreamHandler.emit(handler, record)  # type: ignore[method-assign, misc]
                    if not hasattr(handler, "stream"):
                        handler.stream = sys.stderr
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root, ours = logging.getLogger(), logging.getLogger("holdfast")
    root.handlers = root.handlers or [handler]
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, process, and event with its facts, or else the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
        }
        event, facts = getattr(record, "event", None), getattr(record, "facts", None)
        if isinstance(event, str):
            line |= {"event": event, "facts": facts if isinstance(facts, dict) else {}}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=True)


def line(event: str, message: str, *, level: str = "info") -> str:
    """Return what a program prints on stderr outside its log: *message*, or an object if logs are JSON."""
    if not as_json():
        return message
    return json.dumps(
        {"time": _timestamp(time.time()), "level": level, "logger": "holdfast", "pid": os.getpid(), "event": event, "message": message}
    )


def _timestamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at * 1000) % 1000:03d}Z"
