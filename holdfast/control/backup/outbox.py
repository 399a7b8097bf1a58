"""Rows that the history does not accept now, kept by two agents: the next controller collects them, on whichever host it runs.

Agents keep them in a file of the user whom the job's script runs as. So each row is signed with a key that lies in the history with the
job's lease and that no agent receives; rows without a valid signature, of another job, or written already are not accepted.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, select
from sqlmodel import SQLModel

from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.pool import AgentPool
from holdfast.errors import WorldError
from holdfast.history import History, Lease, models
from holdfast.history.changes import RowChange, set_aside, write
from holdfast.history.errors import translated
from holdfast.history.lease import Fence
from holdfast.log import note
from holdfast.plurals import plural

log = logging.getLogger("holdfast.control")

COPIES: Final = 2
"""Agents that keep the rows: one may be lost."""
ANSWER_SECONDS: Final = 2.0
"""How long an agent may take to answer."""
ROWS_PER_COMMAND: Final = 200
NUMBER: Final = "n"
"""The field with a row's number."""
MAX_BYTES: Final = 64 * 2**20
"""Bytes that are accepted from one agent: an honest one keeps no more."""
COLLECT_SECONDS: Final = 10.0
"""How long one agent may take to return all that it keeps."""
TABLES: Final = {
    str(model.__tablename__): SQLModel.metadata.tables[str(model.__tablename__)]
    for model in (
        models.JobTransition, models.Generation, models.NodeStatusChange, models.Incident, models.FaultRecord, models.IncidentDiagnosis,
        models.DecisionRecord, models.DecidedCase, models.Phase, models.StepRecord, models.Checkpoint, models.Snapshots, models.Request,
        models.JobEvent,
    )
}  # fmt: skip
"""The tables that a controller writes: rows of others are refused, whoever signed them."""


class Forged(ValueError):
    """A row that no controller of this job has signed, or that must not be written."""


class Unsigned(Forged):
    """A row without the signature of a controller of this job."""

    def __init__(self) -> None:
        super().__init__("no controller of this job has signed it")


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A row in an outbox: the epoch of its controller, its number there, and the change."""

    epoch: int
    number: int
    change: RowChange


def sealed(record: dict[str, Any], number: int, key: str) -> dict[str, str]:
    """Return the row *record* as agents keep it: its text with its number, and the signature of that text."""
    text = json.dumps({**record, NUMBER: number})
    return {"row": text, "sum": _signature(text, key)}


def unsealed(record: Any, key: str, job_id: str) -> OutboxEntry:  # noqa: ANN401 (whatever an agent returned)
    """Return the entry in *record* if a controller of *job_id* signed it; raise `Forged` otherwise."""
    match record:
        case {"row": str(text), "sum": str(found)} if key and hmac.compare_digest(_signature(text, key).encode(), found.encode()):
            row = json.loads(text)
        case _:
            raise Unsigned
    try:
        by, number, change = Fence.from_record(row["by"]), int(row[NUMBER]), RowChange.from_record(row)
    except (ValueError, KeyError, TypeError) as error:
        raise Forged(f"it is no row of this version: {error}") from error
    if by is None or by.job_id != job_id:
        raise Forged("it is of another job")
    if change.table not in TABLES:
        raise Forged(f"controllers write no rows of the table '{change.table}'")
    if change.key is None and change.values.get("job_id") != job_id:
        raise Forged("it adds a row to another job")
    return OutboxEntry(by.epoch, number, change)


def _signature(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


class ControllerOutbox:
    """The outboxes of one controller's recorder at its agents."""

    def __init__(self, agents: AgentPool, key: str, settle: Callable[[int], None]) -> None:
        """Sign with *key*; *settle* gets the number of the first row that the history does not have."""
        self._agents, self._key, self._settle = agents, key, settle
        self._kept: dict[AgentClient, int] = {}
        """Number of the first row that an agent does not have."""
        self._failing = False

    def keep(self, first: int, until: int, records: Callable[[int], list[dict[str, Any]]]) -> None:
        """Have two agents keep the waiting rows, numbered from *first* to *until*; *records* returns them from a number on. Never raise."""
        alive = [client for _, client in sorted(self._agents.clients.copy().items()) if not (client.lost_reason or client.is_unreachable)]
        for client in sorted(alive, key=lambda client: client not in self._kept)[:COPIES]:
            since = max(first, self._kept.get(client, first))
            if since >= until:
                continue
            try:
                rows = records(since)
                for begin in range(0, len(rows), ROWS_PER_COMMAND):
                    part = rows[begin : begin + ROWS_PER_COMMAND]
                    signed = [sealed(record, number, self._key) for number, record in enumerate(part, since + begin)]
                    client.send_command("outbox-add", seconds=ANSWER_SECONDS, records=signed)
                    self._kept[client] = since + begin + len(part)
            except Exception as error:  # noqa: BLE001 (the thread that writes rows to the disk must not end with it)
                if not self._failing:
                    note(log, "outbox.failing", level=logging.WARNING, node=client.node, why=error)
                self._failing = True
            else:
                self._failing = False

    def forget(self, first: int) -> None:
        """Have the agents delete all: the history has the rows up to *first*. They are refused if an agent returns them later."""
        self._settle(first)
        for client in self._kept:
            if not client.lost_reason:
                try:
                    client.send_command("outbox-clear", seconds=ANSWER_SECONDS)
                except WorldError as error:
                    note(log, "outbox.not-cleared", node=client.node, why=error)
        self._kept.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxCollector:
    """Writes what earlier controllers left in outboxes to the history, under the lease of this one."""

    agents: AgentPool
    history: History
    lease: Lease
    outbox_path: Path
    record_event: Callable[[str], None]

    def collect(self, nodes: Iterable[str]) -> int:
        """Write the rows in the outboxes of *nodes*, clear these, and return how many rows there were."""
        found: dict[tuple[int, int], RowChange] = {}
        answers = self.agents.each(nodes, self._read)
        done = []
        for node, answer in answers.items():
            if not isinstance(answer, WorldError):
                rows, why = answer
                found |= {(one.epoch, one.number): one.change for one in rows}
                done += [node] if rows or why else []
                if why:
                    note(log, "outbox.refused", level=logging.WARNING, node=node, why=why)
                    self.record_event(f"{node} returned rows for the history that were refused: {why}")
        ours = self._of_this_job([found[number] for number in sorted(found)])
        if ours:
            fence = Fence(self.lease.job_id, self.lease.epoch)
            with translated(self.history.url):
                write(self.history.engine, ours, lambda change, error: set_aside(self.outbox_path, change, error), fence)
            note(log, "outbox.collected", changes=len(ours))
        self.agents.send_command(done, "outbox-clear")
        return len(ours)

    def _read(self, node: str) -> tuple[list[OutboxEntry], str]:
        """Return the rows in the outbox of *node*, and why others were refused."""
        rows: dict[tuple[int, int], OutboxEntry] = {}
        refused, why = 0, ""
        size, end = 0, time.monotonic() + COLLECT_SECONDS
        for records in self._pages(node):
            for record in records:
                size += len(json.dumps(record))
                try:
                    entry = unsealed(record, self.lease.outbox_key, self.lease.job_id)
                except Forged as error:
                    refused, why = refused + 1, why or str(error)
                    continue
                place = entry.epoch, entry.number
                if (self.lease.settled_epoch, self.lease.settled_row) <= place < (self.lease.epoch, 0):
                    rows[place] = entry
            if size > MAX_BYTES or time.monotonic() > end:
                return list(rows.values()), f"its outbox exceeds {MAX_BYTES // 2**20} MiB, or takes longer than {COLLECT_SECONDS:.0f} s"
        return list(rows.values()), f"{plural(refused, 'row')}, the first one: {why}" if refused else ""

    def _pages(self, node: str) -> Iterator[list[Any]]:
        """Yield the outbox of *node*, a part at a time."""
        place: int | None = 0
        while place is not None:
            answer = self.agents.client(node).send_command("outbox-read", since=place)
            yield answer["records"]
            place = answer["next"] if answer["next"] is None or answer["next"] > place else None  # or it would never end

    def _of_this_job(self, changes: list[RowChange]) -> list[RowChange]:
        """Return those of *changes* that change no row of another job."""
        if not changes:
            return []
        with translated(self.history.url), self.history.engine.connect() as connection:
            return [change for change in changes if _job_of(connection, change) in {None, self.lease.job_id}]


def _job_of(connection: Connection, change: RowChange) -> str | None:
    """Return the job of the row that is amended; None where one is added, or it does not exist (yet)."""
    if change.key is None:
        return None
    table = TABLES[change.table]
    return connection.scalar(select(table.c.job_id).where(*(column == change.key[column.name] for column in table.primary_key)))
