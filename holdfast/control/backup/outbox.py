"""Rows that the history does not take now, left with two agents: the flow that comes next has them, on whichever host it runs.

Agents keep them in a file that belongs to the user whom the job's script runs as. So each row is signed with a key that lies in the history
beside the job's lease and that no agent ever sees; what has no valid sum, or is not this job's, or was settled before, is not written.
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
from holdfast.history.changes import RowChange, write
from holdfast.history.errors import translated
from holdfast.history.fence import Fence
from holdfast.history.outbox_file import set_aside
from holdfast.log import note
from holdfast.report.wording import plural

log = logging.getLogger("holdfast.control")

KEEPERS: Final = 2
"""Agents that keep the rows: one may be lost."""
ANSWER: Final = 2.0
"""Seconds that one may take."""
ROWS: Final = 200
"""Rows of one order."""
NUMBER: Final = "n"
"""Under which a row's number travels with it."""
MOST: Final = 64 * 2**20
"""Bytes that are taken from one agent: an honest one keeps no more."""
SECONDS: Final = 10.0
"""How long one agent may take to give all that it keeps."""
WRITTEN: Final = {
    str(model.__tablename__): SQLModel.metadata.tables[str(model.__tablename__)]
    for model in (
        models.JobTransition, models.Generation, models.NodeStatusChange, models.Incident, models.FaultRecord, models.IncidentDiagnosis,
        models.DecisionRecord, models.DecidedCase,
        models.Phase, models.StepRecord, models.Checkpoint, models.Snapshots, models.Request, models.JobEvent,
    )
}  # fmt: skip
"""What a flow records: nothing else comes back from agents, whoever signed it."""


class Forged(ValueError):
    """A row that no flow of this job has left, or that is none to be written any more."""


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A row that a flow left: of which flow, its number there, and what is to be written."""

    epoch: int
    number: int
    change: RowChange


def sealed(record: dict[str, Any], number: int, key: str) -> dict[str, str]:
    """Return the row *record* as it is left with agents: its text with its number, and the sum over that text."""
    text = json.dumps({**record, NUMBER: number})
    return {"row": text, "sum": _sum(text, key)}


def unsealed(record: Any, key: str, job_id: str) -> OutboxEntry:  # noqa: ANN401 (whatever an agent gave)
    """Return what *record* holds if a flow of *job_id* signed it; raise `Forged` otherwise."""
    match record:
        case {"row": str(text), "sum": str(told)} if key and hmac.compare_digest(_sum(text, key).encode(), told.encode()):
            row = json.loads(text)
        case _:
            raise Forged("no flow of this job has signed it")
    try:
        by, number, change = Fence.from_record(row["by"]), int(row[NUMBER]), RowChange.from_record(row)
    except (ValueError, KeyError, TypeError) as error:
        raise Forged(f"it is no row of this version: {error}") from error
    if by is None or by.job_id != job_id:
        raise Forged("it is of another job")
    if change.table not in WRITTEN:
        raise Forged(f"flows leave no rows of the table '{change.table}'")
    if change.key is None and change.values.get("job_id") != job_id:
        raise Forged("it adds a row to another job")
    return OutboxEntry(by.epoch, number, change)


def _sum(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


class ControllerOutbox:
    """What the recorder of one flow leaves with its agents."""

    def __init__(self, fleet: AgentPool, key: str, settle: Callable[[int], None]) -> None:
        """Sign with *key*; *settle* learns the number of the first row that the history does not have."""
        self._fleet, self._key, self._settle = fleet, key, settle
        self._held: dict[AgentClient, int] = {}
        """Number of the first row that an agent does not have."""
        self._failing = False

    def keep(self, first: int, until: int, records: Callable[[int], list[dict[str, Any]]]) -> None:
        """Have two agents keep all that waits, numbered from *first* to *until*; *records* gives it from a number on. Never raise."""
        for client in self._keepers():
            since = max(first, self._held.get(client, first))
            if since >= until:
                continue
            try:
                for begin, part in _parts(since, records(since), self._key):
                    client.send_command("deposit", seconds=ANSWER, records=part)
                    self._held[client] = begin + len(part)
            except Exception as error:  # noqa: BLE001 (the thread that puts rows on the disk must not end with it)
                if not self._failing:
                    note(log, "deposit.failing", level=logging.WARNING, node=client.node, why=error)
                self._failing = True
            else:
                self._failing = False

    def forget(self, first: int) -> None:
        """Have the agents forget all: the history has it, up to the row *first*. What they offer of it later is refused."""
        self._settle(first)
        for client in self._held:
            if not client.gone:
                try:
                    client.send_command("withdraw", seconds=ANSWER)
                except WorldError as error:
                    note(log, "deposit.stays", node=client.node, why=error)
        self._held.clear()

    def _keepers(self) -> list[AgentClient]:
        """Return the agents to ask, those first that have something already."""
        alive = [client for _, client in sorted(self._fleet.clients.copy().items()) if not (client.gone or client.away)]
        return sorted(alive, key=lambda client: client not in self._held)[:KEEPERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxCollector:
    """Takes in what flows before have left with agents, in the name of the lease that this flow holds."""

    fleet: AgentPool
    history: History
    lease: Lease
    outbox_path: Path
    record_event: Callable[[str], None]

    def collect(self, nodes: Iterable[str]) -> int:
        """Write what was left with the agents of *nodes*, have them forget it, and return how many rows there were."""
        found: dict[tuple[int, int], RowChange] = {}
        answers = self.fleet.each(nodes, self._of)
        for node, given in answers.items():
            if not isinstance(given, WorldError):
                rows, why = given
                found |= {(one.epoch, one.number): one.change for one in rows}
                if why:
                    note(log, "deposit.refused", level=logging.WARNING, node=node, why=why)
                    self.record_event(f"{node} gave back rows for the history that were not taken: {why}")
        ours = self._of_this_job([found[number] for number in sorted(found)])
        if ours:
            fence = Fence(self.lease.job_id, self.lease.epoch)
            with translated(self.history.url):
                write(self.history.engine, ours, lambda change, error: set_aside(self.outbox_path, change, error), fence)
            note(log, "deposit.collected", changes=len(ours))
        given_back = [node for node, given in answers.items() if not isinstance(given, WorldError) and (given[0] or given[1])]
        self.fleet.send_command(given_back, "withdraw")
        return len(ours)

    def _of(self, node: str) -> tuple[list[OutboxEntry], str]:
        """Return the rows left with the agent of *node*, and why others were not taken."""
        rows: dict[tuple[int, int], OutboxEntry] = {}
        forged, why = 0, ""
        size, until = 0, time.monotonic() + SECONDS
        for records in self._pages(node):
            for record in records:
                size += len(json.dumps(record))
                try:
                    left = unsealed(record, self.lease.outbox_key, self.lease.job_id)
                except Forged as error:
                    forged, why = forged + 1, why or str(error)
                    continue
                place = left.epoch, left.number
                if (self.lease.settled_epoch, self.lease.settled_row) <= place < (self.lease.epoch, 0):
                    rows[place] = left
            if size > MOST or time.monotonic() > until:
                return list(rows.values()), f"it has more than {MOST // 2**20} MiB of them, or takes longer than {SECONDS:.0f} s"
        return list(rows.values()), f"{plural(forged, 'row')}, the first one: {why}" if forged else ""

    def _pages(self, node: str) -> Iterator[list[Any]]:
        """Yield all that is left with the agent of *node*, a part at a time."""
        place: int | None = 0
        while place is not None:
            answer = self.fleet.client(node).send_command("deposited", since=place)
            yield answer["records"]
            place = answer["next"] if answer["next"] is None or answer["next"] > place else None  # or it would go on for ever

    def _of_this_job(self, changes: list[RowChange]) -> list[RowChange]:
        """Return those of *changes* that change no row of another job."""
        if not changes:
            return []
        with translated(self.history.url), self.history.engine.connect() as connection:
            return [change for change in changes if _job_of(connection, change) in {None, self.lease.job_id}]


def _job_of(connection: Connection, change: RowChange) -> str | None:
    """Return the job of the row that is amended; nothing where one is added, or it is not there (yet)."""
    if change.key is None:
        return None
    table = WRITTEN[change.table]
    return connection.scalar(select(table.c.job_id).where(*(column == change.key[column.name] for column in table.primary_key)))


def _parts(since: int, records: list[dict[str, Any]], key: str) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Yield signed *records*, so many at a time, with the number of the first of them."""
    for begin in range(0, len(records), ROWS):
        part = records[begin : begin + ROWS]
        yield since + begin, [sealed(record, number, key) for number, record in enumerate(part, since + begin)]
