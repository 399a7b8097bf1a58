"""What a standby needs to steer is had before it is needed, or missed while there is time to mend it; and one sees which of both."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from holdfast.cli.commands.status import status
from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import UnusableFile
from holdfast.history import History, Lease, take
from holdfast.history.models import StandbyHeartbeat
from holdfast.spec import LocalCluster, TrainingJob, cluster_of
from tests.history.rows import a_job


def test_a_standby_without_the_key_says_so_before_anybody_needs_it(
    history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster is that of the job that runs, whatever the standby was given; who steers goes on, and the status names the cure."""
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
    lease = take(history, job, holder="the flow of another host")
    why = r"key .* cannot be used: there is no such file\. Mend `key`"
    with pytest.raises(UnusableFile, match=why), control_job(spec, LocalCluster(), standby=True):
        pass
    with history.session() as session:
        present = session.get(Lease, job.id)
    assert present is not None
    assert present.epoch == lease.epoch, "it had taken the job"
    status("gpt", as_json=False)
    assert "cannot steer: the private key" in capsys.readouterr().out
    with history.session() as session:
        session.add_all(StandbyHeartbeat(job="gpt", host=host, pid=1, at=at) for host, at in (("b", time.time()), ("c", job.at - 600)))
    status("gpt", as_json=True)
    told = {one["host"]: one["problem"] for one in json.loads(capsys.readouterr().out)["standbys"]}
    assert told.pop("b") == ""
    assert "c" not in told, "that was another run of the job"
    assert [why for why in told.values() if "there is no such file" in why]
