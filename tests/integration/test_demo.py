"""The demo, as a newcomer runs it: three real faults, and two runs that end bit-equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import PrefectServer
from tests.mentions import one_line_mentions


@pytest.mark.timeout(700)  # two training runs with all their processes, on a machine that may be busy
def test_the_demo_breaks_a_job_three_times_and_proves_that_nothing_was_lost(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """The result file holds the proof; the report is there; nothing is left running (the session's own check)."""
    result = tmp_path / "demo.json"
    ran = subprocess.run(
        [sys.executable, "-m", "holdfast", "demo", "-o", str(result), "--no-browser"],
        env=prefect_server.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=690,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    output = json.loads(result.read_text())
    assert output["bit_equal"] is True
    assert output["steps"] == 100
    assert [one["kind"] for one in output["incidents"]] == ["worker-sigkill", "worker-stopped", "node-lost"]
    assert [one["action"] for one in output["incidents"]] == ["replace-ranks"] * 3
    assert all(one["reason"] and one["downtime_s"] > one["detect_s"] > 0 for one in output["incidents"])
    assert all(one["steps_lost"] <= 1 for one in output["incidents"])
    assert [one["source"] for one in output["incidents"]] == ["surviving ranks"] * 3
    assert all(one["snapshot_age"] is not None for one in output["incidents"])
    assert output["snapshots"]["interval_steps"] >= 1
    assert 0 < output["snapshots"]["overlapped"] <= 1
    assert Path(output["report"]).read_text().lower().startswith("<!doctype html>")
    assert one_line_mentions(ran.stdout, "100 steps", "equal")
