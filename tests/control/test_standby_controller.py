"""A standby controller: it has what it takes to run the job, or reports what is missing; and takes over at a partition."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from holdfast.cli.commands.watch.status import status
from holdfast.control.backup import standby as backup
from holdfast.control.backup.standby import BackupPrerequisites
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.leadership import Leadership, StandbyController, take_leadership
from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import BadParameters, UnusableFile
from holdfast.history import History, Lease, LeaseRenewer, acquire, holder_of, queries
from holdfast.history.lease import release_lease
from holdfast.history.models import StandbyHeartbeat
from holdfast.host.ports import free_port
from holdfast.spec import LocalCluster, TrainingJob, cluster_of
from tests.history.rows import a_job
from tests.mentions import mentions
from tests.ssh.sshd import key_at
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _the_other_flow_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the lease of a flow that nothing renews outlast a busy machine."""
    monkeypatch.setattr("holdfast.history.lease.LEASE_SECONDS", 600.0)


def test_a_standby_without_the_key_reports_that_before_it_is_needed(
    history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster is that of the running job, whatever the standby was started with; the status names the cure."""
    spec = TrainingJob(name="gpt", script="train.py")
    (tmp_path / "known").touch()
    fields = {
        "kind": "ssh",
        "name": "site",
        "hosts": ["n0"],
        "user": "u",
        "key": str(tmp_path / "key"),
        "known_hosts": str(tmp_path / "known"),
    }
    cluster = cluster_of(fields)
    job = a_job(spec=spec.model_dump(mode="json"), cluster=cluster.model_dump(mode="json"), directory=str(tmp_path))
    lease = acquire(history, job, holder="the flow of another host")
    why = r"key .* cannot be used: there is no such file\. Correct `key`"
    with pytest.raises(UnusableFile, match=why), control_job(spec, LocalCluster(), standby=True):
        pass
    with history.session() as session:
        present = session.get(Lease, job.id)
    assert present is not None
    assert present.epoch == lease.epoch, "it had taken the job"
    status("gpt", follow=False, events=False, as_json=False)
    assert mentions(capsys.readouterr().out, "private key")
    with history.session() as session:
        session.add_all(StandbyHeartbeat(job="gpt", host=host, pid=1, at=at) for host, at in (("b", time.time()), ("c", job.at - 600)))
    status("gpt", follow=False, events=False, as_json=True)
    problems = {one["host"]: one["problem"] for one in json.loads(capsys.readouterr().out)["standbys"]}
    assert problems.pop("b") == ""
    assert "c" not in problems, "that was another run of the job"
    assert [why for why in problems.values() if mentions(why, "private key")]


def test_a_standby_that_reaches_no_node_either_requests_nothing_and_yields(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its search fails; for some seconds it does not even take a free lease, as a standby that reaches the nodes may want it."""
    monkeypatch.setattr(backup, "YIELD_SECONDS", 60.0)  # a busy machine has its own idea of a few seconds
    key_at(tmp_path / "key")
    (tmp_path / "known").touch()
    hosts = [{"name": name, "address": "127.0.0.1", "port": free_port()} for name in ("n0", "n1")]
    fields = {"kind": "ssh", "name": "site", "hosts": hosts, "key": str(tmp_path / "key"), "known_hosts": str(tmp_path / "known")}
    spec, cluster = TrainingJob(name="gpt", script="train.py"), cluster_of(fields)
    job = a_job(spec=spec.model_dump(mode="json"), cluster=cluster.model_dump(mode="json"), directory=str(tmp_path))
    lease = acquire(history, job, holder="the flow of another host")
    standby = StandbyController(history, spec, BackupPrerequisites(), wanted=cluster)
    partitioned = threading.Event()
    partitioned.set()
    with LeaseRenewer(history, lease, lambda _taker: None, partitioned.is_set):
        wait_until(lambda: getattr(holder_of(history, job.id), "partitioned", False), seconds=60)

        def reconnecting() -> bool:
            assert standby.turn() is None
            return standby.failover.yields_until > 0.0

        wait_until(reconnecting, seconds=60)
        assert queries.pending_requests(history, job.id) == []
        partitioned.clear()
        wait_until(lambda: not getattr(holder_of(history, job.id), "partitioned", True), seconds=60)
    assert standby.prerequisites.is_ready(cluster), "it is the search alone that keeps it back"
    assert standby.poll() is None
    assert holder_of(history, job.id) is None
    standby.prerequisites.close()


def test_a_running_job_is_reattached_where_its_ranks_could_not_be_counted(history: History, tmp_path: Path) -> None:
    """They were counted when it was launched; without it, the cluster file shows that counting would fail."""
    spec = TrainingJob(name="gpt", script="train.py", nproc_per_node="gpu")
    cluster = cluster_of({"kind": "ssh", "name": "site", "gpus": 0, "hosts": ["n0"], "known_hosts": str(tmp_path / "known")})
    recorded = spec.model_copy(update={"nproc_per_node": 2}).model_dump(mode="json")
    with pytest.raises(BadParameters):
        take_leadership(history, spec, cluster, FlowRun())
    job = a_job(spec=recorded, cluster=cluster.model_dump(mode="json"), directory=str(tmp_path))
    release_lease(history, acquire(history, job, holder="the flow of another host"))
    taken = take_leadership(history, spec, cluster, FlowRun())
    assert isinstance(taken, Leadership)
    assert (taken.runs_already, taken.job.id, taken.spec.nproc_per_node) == (True, job.id, 2)
