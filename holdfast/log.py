"""One way to log: a fixed event name and facts. A line for a person, or on request one object of JSON for a machine."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Final

FORMAT: Final = "HOLDFAST_LOG"
"""Variable: ``json`` has everything that Holdfast says in its logs be one JSON object a line; ``text`` is the default."""
FORMATS: Final = ("text", "json")


def note(log: logging.Logger, event: str, /, *, level: int = logging.INFO, **facts: object) -> None:
    """Log *event* with its *facts*: a line for a person, fields for a machine."""
    line = " ".join(f"{name}={fact}" for name, fact in facts.items())
    log.log(level, "%s %s", event, line, extra={"event": event, "facts": facts}, stacklevel=2)


def as_json() -> bool:
    """Tell whether logs are to be JSON."""
    return os.environ.get(FORMAT, "").strip().lower() == "json"


def set_up() -> None:
    """Have this process log to stderr, in the format that is asked for. For programs; a library never does this."""
    if not as_json():
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


def convert() -> None:
    """Where JSON is asked for, have handlers that others have set up (Prefect's) write it too, and tell what we log ourselves."""
    if not as_json():
        return
    for log in [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]:
        for handler in log.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setFormatter(JsonLines())
                _make_plain(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root, ours = logging.getLogger(), logging.getLogger("holdfast")
    root.handlers = root.handlers or [handler]
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)


def _make_plain(handler: logging.Handler) -> None:
    """Have a handler that paints what it writes (rich) write it as it is."""
    if type(handler).emit is not logging.StreamHandler.emit:
        handler.emit = lambda record: logging.StreamHandler.emit(handler, record)  # type: ignore[method-assign]
        if not hasattr(handler, "stream"):
            handler.stream = sys.stderr  # type: ignore[attr-defined]


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, process, and event with its facts, or else the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
        }
        event, facts = getattr(record, "event", None), getattr(record, "facts", None)
        if isinstance(event, str):
            told |= {"event": event, "facts": facts if isinstance(facts, dict) else {}}
        else:
            told["message"] = record.getMessage()
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str, ensure_ascii=True)


def line(event: str, message: str, *, level: str = "info") -> str:
    """Return what a program says on stderr outside of its log: *message* as it is, or as an object where JSON is asked for."""
    if not as_json():
        return message
    now = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    return json.dumps({"time": at, "level": level, "logger": "holdfast", "pid": os.getpid(), "event": event, "message": message})
