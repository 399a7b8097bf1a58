"""What a flow leaves with an agent while the history takes nothing: rows for the flow that comes next, wherever that runs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.agent.errors import Refused

MOST: Final = 64 * 2**20
"""Bytes that are kept: hours of a job's rows."""
AT_ONCE: Final = 2**20
"""Bytes of one answer."""


class AgentOutbox:
    """A file of JSON lines in the node's folder, for its owner alone. It is not forced to the disk: ranks wait for who writes it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "outbox.jsonl"

    def add(self, records: list[dict[str, Any]]) -> None:
        """Keep *records*; refuse them when there is no room."""
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab", buffering=0) as file:  # noqa: PTH123 (a descriptor)
            if file.tell() + len(data) > MOST:
                raise Refused(f"more than {MOST} bytes of rows are left here already")
            file.write(data)

    def since(self, place: int) -> tuple[list[dict[str, Any]], int | None]:
        """Return records from *place* on, and where the next ones begin; a line that was torn is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(place)
                data = file.read(AT_ONCE)
        except FileNotFoundError:
            return [], None
        whole = data[: data.rfind(b"\n") + 1]
        found = []
        for line in whole.splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
        return found, place + len(whole) if whole else None

    def clear(self) -> None:
        """Forget all."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
