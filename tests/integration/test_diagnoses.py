"""From what a node's kernel logs and a worker says to a diagnosis on record, and to what is done about it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from holdfast.history import FaultRecord, IncidentDiagnosis, queries
from tests.cli.conftest import PROGRAM
from tests.integration.stage import BOOTED, ENDLESS, Play, Stage
from tests.monitors import is_read
from tests.waiting import wait_until

DOUBLE_BIT = "Nov 21 10:00:01 n0 kernel: NVRM: Xid (PCI:0000:18:00): 48, pid=42, An uncorrectable double bit error (DBE)\n"
ENDS = "if generation == 1 and step == 5:\n print('flux capacitor 12 out of phase', flush=True)\n import os; os._exit(37)"


def test_what_nothing_knows_is_kept_with_its_context_and_a_sick_node_is_left(stage: Stage, tmp_path: Path) -> None:
    """First a status that nobody knows: restarted, and kept as unknown. Then a GPU that lost data, and a killed worker: the node goes."""
    log = tmp_path / "kern.log"
    log.write_text(BOOTED)
    stage.environment["HOLDFAST_KERNEL_LOG"] = str(log)
    play = stage.play("diagnosed", args=[*ENDLESS, "--each", ENDS], nnodes=1, nproc_per_node=1, spare_nodes=1)
    play.reaches("RUNNING")
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    wait_until(lambda: is_read(log, "node-0"), seconds=60, explain=play.log)
    with log.open("a") as file:
        file.write(DOUBLE_BIT)
    wait_until(lambda: any(one.node == "node-0" for one in faults(play, "gpu-memory-double-bit")), seconds=60, explain=play.log)
    seen = next(one for one in faults(play, "gpu-memory-double-bit") if one.node == "node-0")
    assert (seen.recommended_action, seen.evidence["source"], seen.incident_id) == ("reset-gpu", "kernel log on node-0", None)
    wait_until(lambda: "double bit error" in texts(play), seconds=60, explain=play.log)  # its event is a row, and a commit, of its own
    assert (play.state(), len(play.incidents())) == ("RUNNING", 1), "nobody acts on a node while steps advance through it"
    play.chaos.signal(0, signal.SIGKILL)
    wait_until(lambda: play.saw(2) and play.incidents()[1].outcome, seconds=60, explain=play.log)
    play.process.send_signal(signal.SIGTERM)
    play.ends()

    first, second = play.incidents()
    assert (first.kind, first.action) == ("worker-exit-code", "restart-workers")
    (unknown,) = faults(play, "unknown")
    assert (unknown.incident_id, unknown.rank, unknown.root) == (first.id, 0, False)
    assert "flux capacitor 12 out of phase" in unknown.evidence["detail"]
    assert "status 37" in unknown.evidence["detail"]

    assert (second.kind, second.target, second.action) == ("gpu-memory-double-bit", "node node-0", "replace-node")
    found = {(one.node, one.incident_id, one.root) for one in faults(play, "gpu-memory-double-bit")}
    assert ("node-0", second.id, True) in found, found
    weighed = diagnosis(play, second.id).candidates
    assert [one["kind"] for one in weighed] == ["gpu-memory-double-bit", "worker-sigkill"]
    assert weighed[0]["evidence"][0]["source"] == "kernel log on node-0"
    assert weighed[1]["evidence"][0]["source"] == "process exit of rank 0"
    assert list(queries.generations(stage.history, play.job.id)[-1].ranks) == ["node-1"]

    listed = subprocess.run([*PROGRAM, "faults", "unknown", "--json"], env=stage.environment, capture_output=True, text=True, check=True)
    (one,) = json.loads(listed.stdout)
    assert (one["kind"], one["times"], one["nodes"]) == ("unknown", 1, ["node-0"])
    assert "flux capacitor N out of phase" in one["shape"]


def texts(play: Play) -> str:
    """Return the texts of the events on record, a line each."""
    return "\n".join(one.text for one in queries.job_events(play.stage.history, play.job.id))


def faults(play: Play, kind: str) -> list[FaultRecord]:
    """Return the faults of *kind* on record."""
    return [one for one in queries.faults(play.stage.history, play.job.id) if one.kind == kind]


def diagnosis(play: Play, incident: str) -> IncidentDiagnosis:
    """Return the newest diagnosis of an incident."""
    return queries.diagnoses(play.stage.history, incident_id=incident)[-1]
