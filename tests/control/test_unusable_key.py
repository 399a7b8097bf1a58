"""A job whose cluster cannot be opened on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.supervisor.supervise import control_job
from holdfast.errors import UnusableFile
from holdfast.history import queries
from holdfast.history.store import History
from holdfast.spec import SshCluster, TrainingJob


def test_a_job_whose_key_cannot_be_used_is_refused_and_not_recorded(holdfast_home: Path, tmp_path: Path) -> None:
    """Recorded it would seem to launch for ever: nobody could stop it without the key, nor use its name for another job."""
    assert holdfast_home.is_dir()
    spec = TrainingJob.model_validate({"name": "keyless", "command": ["true"], "checkpoint": {"directory": str(tmp_path)}})
    cluster = SshCluster.model_validate({"kind": "ssh", "hosts": ["127.0.0.1"], "key": str(tmp_path / "gone")})
    with pytest.raises(UnusableFile, match="gone"), control_job(spec, cluster):
        pytest.fail("the job has begun")
    history = History.open()
    try:
        assert queries.jobs(history, "keyless", limit=None) == []
    finally:
        history.close()
