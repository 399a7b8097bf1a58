"""Rows that a controller leaves with agents while the history is unreachable, and rows that no controller left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.control.agents.pool import AgentPool
from holdfast.control.backup import outbox
from holdfast.control.backup.outbox import ControllerOutbox, Forged, OutboxCollector, Unsigned, sealed, unsealed
from holdfast.history import History, Job, Lease, Request, acquire, models, queries
from holdfast.history.changes import RowChange, added, amended, as_records
from holdfast.history.lease import Fence, release_lease
from tests.history.rows import a_job, a_move, a_step
from tests.mentions import mentions

PLAN: dict[str, Any] = {
    "name": "gpt",
    "lease": 60.0,
    "warm": False,
    "watch": False,
    "python": sys.executable,
    "argv": ["true"],
    "directory": "/",
    "environment": {},
    "memory": None,
}


class Stage:
    """A job with an agent on each of two nodes, and its controllers one after the other."""

    def __init__(self, history: History, folder: Path) -> None:
        self.history, self.folder = history, folder
        self.job = a_job(id="j1")
        self.nodes = LocalNodes("c", folder / "nodes", 2)
        self.job_events: list[str] = []
        self.lease, self.fleet = self._next()
        for node in self.nodes.names():
            self.fleet.bring_up(node)

    def _next(self) -> tuple[Lease, AgentPool]:
        lease = acquire(self.history, self.job, holder="a flow")
        plan = {**PLAN, "job": self.job.id, "log_directory": str(self.folder / "logs")}
        return lease, AgentPool(self.nodes, plan, epoch=lease.epoch)

    def leave(self, changes: list[RowChange], first: int = 0) -> None:
        """Leave rows with the agents, as a controller does whose history is unreachable."""
        records = as_records(changes, Fence(self.job.id, self.lease.epoch))
        ControllerOutbox(self.fleet, self.lease.outbox_key, lambda _: None).keep(first, first + len(records), lambda _: records)

    def put(self, *lines: dict[str, Any]) -> None:
        """Write lines into the file of the first node, as the job's script can."""
        with (self.nodes.folder("node-0") / "outbox.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def collect(self, *, settled: bool = True) -> int:
        """Have the next controller collect the rows; it records that they are settled, unless it dies at once."""
        release_lease(self.history, self.lease)
        self.fleet.close(end=False)
        self.lease, self.fleet = self._next()
        reattached = self.fleet.reattach_all(self.nodes.names())
        taken = OutboxCollector(
            agents=self.fleet,
            history=self.history,
            lease=self.lease,
            outbox_path=self.folder / "outbox_path",
            record_event=self.job_events.append,
        ).collect(reattached)
        if settled:
            with self.history.session() as session:
                session.merge(Lease(**{**self.lease.model_dump(), "settled_epoch": self.lease.epoch}))
        return taken


@pytest.fixture
def stage(history: History, tmp_path: Path) -> Iterator[Stage]:
    """Return such a job."""
    stage = Stage(history, tmp_path)
    yield stage
    stage.fleet.close(end=False)
    for node in stage.nodes.names():
        stage.nodes.clear(node)


def forged(model: type[Any], key: dict[str, Any] | None, **values: Any) -> dict[str, Any]:
    """Return an unsigned row, which anybody can write."""
    return {"table": model.__tablename__, "key": key, "values": values, "by": {"job": "j1", "epoch": 1}, "n": 7}


def test_rows_that_a_script_writes_into_the_file_do_not_reach_the_history(stage: Stage) -> None:
    """Neither unsigned nor signed with its own key: another job's lease, spec and requests stay as they are, and it is reported."""
    other = a_job("other-teams-job", id="j2")
    lease = acquire(stage.history, other, holder="its flow")
    stage.leave([added(a_move("j1", "RUNNING")), added(a_step("j1", 7))])
    attack = [
        forged(Lease, {"job_id": "j2"}, epoch=10**9, holder="nobody", expires_at=0.0),
        forged(Job, {"id": "j2"}, spec={"command": ["sh", "-c", "id>/tmp/pwned"]}, cluster={"kind": "local"}),
        forged(Request, None, id="r1", job_id="j2", at=1.0, kind="stop", by="nobody"),
    ]
    stage.put(*attack, *(sealed(row, row["n"], "") for row in attack), *(sealed(row, row["n"], "guessed") for row in attack))
    assert stage.collect() == 2
    with stage.history.session() as session:
        assert session.get(Lease, "j2") == lease
        job = session.get(Job, "j2")
        assert job is not None
        assert (job.spec, job.cluster) == (other.spec, other.cluster)
    assert queries.pending_requests(stage.history, "j2") == []
    assert [one.after for one in queries.transitions(stage.history, "j1")] == ["RUNNING"]
    assert [one.step for one in queries.steps(stage.history, "j1")] == [7]
    assert len(stage.job_events) == 1
    assert mentions(stage.job_events[0], "node-0", "9 rows")


def test_no_signature_opens_another_job_or_table() -> None:
    """A key belongs to one job, and controllers write rows of certain tables only."""
    own, key = Fence("j1", 3), "k" * 64

    def opened(row: RowChange, by: Fence = own) -> RowChange:
        return unsealed(sealed(as_records([row], by)[0], 5, key), key, "j1").change

    step = added(a_step("j1", 1))
    assert opened(step) == step
    for row, by, why in (
        (step, Fence("j2", 3), "of another job"),
        (added(a_step("j2", 1)), own, "adds a row to another job"),
        (added(a_job(id="j1")), own, "table 'job'"),
        (amended(models.Lease, "j1", {"epoch": 9}), own, "table 'lease'"),
        (amended(models.ApprovalRequest, "q", {"by": "me"}), own, "table 'approval_request'"),
    ):
        with pytest.raises(Forged, match=why):
            opened(row, by)
    with pytest.raises(Unsigned):  # a job whose lease has no key yet
        unsealed(sealed(as_records([step], own)[0], 5, ""), "", "j1")


def test_a_signed_row_changes_no_row_of_another_job(stage: Stage) -> None:
    """The row that is amended is checked, not only the signature."""
    with stage.history.session() as session:
        session.add_all([Request(id="r1", job_id="j1", at=1.0, kind="migrate", by="me")])
        session.add_all([Request(id="r2", job_id="j2", at=1.0, kind="migrate", by="me")])
    stage.leave([amended(Request, one, {"handled_at": 2.0, "done": True}) for one in ("r1", "r2")])
    assert stage.collect() == 1
    assert [one.id for one in queries.pending_requests(stage.history, "j2")] == ["r2"]
    assert queries.pending_requests(stage.history, "j1") == []


def test_rows_that_are_settled_are_refused(stage: Stage) -> None:
    """A node that keeps what it was to delete cannot set the history back; rows that were not collected yet are accepted later."""
    with stage.history.session() as session:
        session.add(Request(id="r1", job_id="j1", at=1.0, kind="migrate", by="me"))
    stage.leave([amended(Request, "r1", {"outcome": "old"})])
    kept = (stage.nodes.folder("node-0") / "outbox.jsonl").read_text()
    assert stage.collect(settled=False) == 1
    stage.put(*map(json.loads, kept.splitlines()))
    assert stage.collect() == 1, "the last controller died before it recorded them as settled"
    stage.put(*map(json.loads, kept.splitlines()))
    assert stage.collect() == 0


def test_the_rows_of_one_agent_are_limited(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many bytes the controller continues, with what was signed until then."""
    monkeypatch.setattr(outbox, "MAX_BYTES", 2**18)
    stage.leave([added(a_step("j1", 1))])
    junk = {"row": "x" * 2**10, "sum": "y"}
    stage.put(*[junk] * 2**13)
    assert stage.collect() == 1
    assert "exceeds" in stage.job_events[0]
    assert not (stage.nodes.folder("node-0") / "outbox.jsonl").exists(), "its outbox was cleared"
