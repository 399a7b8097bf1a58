"""What a standby does about a flow that says of itself that it hears nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.control.backup import partition_failover
from holdfast.control.backup.prerequisites import BackupPrerequisites
from holdfast.control.supervisor.leadership import StandbyController
from holdfast.history import History, LeaseRenewer, holder_of, queries, take
from holdfast.ports import free_port
from holdfast.spec import TrainingJob, cluster_of
from tests.history.rows import a_job
from tests.ssh.sshd import key_at
from tests.waiting import wait_until


def test_a_standby_that_reaches_no_node_either_asks_for_nothing_and_leaves_the_job_to_others(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its search ends in vain; for some seconds it does not even take a lease that is free, as who reaches them may want it."""
    monkeypatch.setattr(partition_failover, "BACK", 60.0)  # a busy machine has its own idea of a few seconds
    key_at(tmp_path / "key")
    (tmp_path / "known").touch()
    hosts = [{"name": name, "address": "127.0.0.1", "port": free_port()} for name in ("n0", "n1")]
    fields = {"kind": "ssh", "name": "site", "hosts": hosts, "key": str(tmp_path / "key"), "known_hosts": str(tmp_path / "known")}
    spec, cluster = TrainingJob(name="gpt", script="train.py"), cluster_of(fields)
    job = a_job(spec=spec.model_dump(mode="json"), cluster=cluster.model_dump(mode="json"), directory=str(tmp_path))
    lease = take(history, job, holder="the flow of another host")
    standby = StandbyController(history, spec, BackupPrerequisites(), wanted=cluster)
    deaf = threading.Event()
    deaf.set()
    with LeaseRenewer(history, lease, lambda _taker: None, deaf.is_set):
        wait_until(lambda: getattr(holder_of(history, job.id), "deaf", False), seconds=20)

        def reconnecting() -> bool:
            assert standby.turn() is None
            return standby.failover.yields_until > 0.0

        wait_until(reconnecting, seconds=60)
        assert queries.pending_requests(history, job.id) == []
        deaf.clear()
        wait_until(lambda: not getattr(holder_of(history, job.id), "deaf", True), seconds=20)
    assert standby.prerequisites.is_ready(cluster), "it is the search alone that keeps it back"
    assert standby.poll() is None
    assert holder_of(history, job.id) is None
    standby.prerequisites.close()
