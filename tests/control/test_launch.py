"""A launch that cannot go on just now."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.agents import pool
from holdfast.control.supervisor.launch import begin
from holdfast.host.process import boot_time
from holdfast.policies.states import Event
from tests.control.bare_controller import bare_controller


def test_a_launch_waits_while_the_lease_of_its_controller_cannot_be_confirmed(
    tmp_path: Path, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is busy for some seconds says nothing about the nodes, and there is no agent yet that could confirm it."""
    assert holdfast_home.is_dir()
    monkeypatch.setattr(pool, "CONFIRM_SECONDS", 0.0)
    with bare_controller(tmp_path, {"node-0": [0]}, preflight=False) as run:
        run.agents.lease_until = lambda: 0.0
        assert begin(run) is None
        run.agents.lease_until = lambda: boot_time() + 600.0
        try:
            turn = begin(run)
            assert turn is not None
            assert turn.event in {Event.STARTED, Event.FINISHED}, turn.reason
        finally:
            run.agents.close(end=True)
