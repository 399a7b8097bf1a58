"""When a flow is to let go of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.handover import heeding_the_signal, machine_goes_down, termination_lets_go
from holdfast.errors import BadSetting


@pytest.mark.parametrize(
    ("said", "goes_down"), [("echo stopping; exit 1", True), ("echo running", False), ("echo offline; exit 1", False), ("exit 1", False)]
)
def test_a_machine_goes_down_when_systemd_says_so(said: str, goes_down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 (a table)
    """As `systemctl is-system-running` words it; a machine that really goes down would take the tests along."""
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$1" = is-system-running ] || exit 9\n{said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_goes_down(tmp_path / "none") is goes_down


def test_a_machine_goes_down_when_systemd_has_ended_all_its_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody answers any more; what is left is told to end by the first process, which has another name by then."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, goes_down in (("systemd-shutdow\n", True), ("systemd\n", False)):
        (tmp_path / "comm").write_text(name)
        assert machine_goes_down(tmp_path / "comm") is goes_down


def test_what_a_termination_means_is_refused_where_nobody_knows_before_a_flow_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the hand would else be noticed by a job that was stopped."""
    for said, lets_go in (("", False), ("stop", False), ("hand-over", True)):
        monkeypatch.setenv("HOLDFAST_SIGTERM", said)
        assert termination_lets_go() is lets_go
    monkeypatch.setenv("HOLDFAST_SIGTERM", "handover")
    with pytest.raises(BadSetting, match="HOLDFAST_SIGTERM is 'handover'; it must be stop or hand-over"), heeding_the_signal():
        pass
