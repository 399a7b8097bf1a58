"""What is wrong with a node while a job trains on it is told in the history as it happens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.history import Fault, queries
from holdfast.process import marked
from tests.integration.stage import Play, Stage
from tests.waiting import wait_until

OFF_BUS = "Nov 21 10:00:01 n0 kernel: NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus.\n"
ONE = {"wanted": 1, "ranks": 1}


def test_what_the_kernel_logs_is_in_the_history_while_training_goes_on(stage: Stage, tmp_path: Path) -> None:
    """By itself it stops nothing."""
    log = tmp_path / "kern.log"
    log.touch()
    stage.environment["HOLDFAST_KERNEL_LOG"] = str(log)
    play = stage.play("sick-node", args=["--steps", "400"], nodes=ONE)
    play.steps_to(1)
    wait_until(lambda: any(log in open_files(pid) for pid in lookouts(stage)), seconds=30, explain=play.log)
    with log.open("a") as file:
        file.write(OFF_BUS)
    wait_until(lambda: told(play), seconds=60, explain=play.log)
    (fault,) = told(play)
    assert (fault.node, fault.level, fault.evidence["source"], fault.incident_id) == ("node-0", "evict-now", "kernel log on node-0", None)
    assert any("GPU has fallen off the bus" in one.text for one in queries.remarks(stage.history, play.job.id))
    assert (play.state(), play.incidents()) == ("RUNNING", []), "nobody acts on a node while steps advance through it"
    play.process.send_signal(signal.SIGTERM)
    play.ends()


def told(play: Play) -> list[Fault]:
    """Return what the history has of the GPU."""
    return [one for one in queries.faults(play.stage.history, play.job.id) if one.kind == "gpu-off-bus"]


def lookouts(stage: Stage, *nodes: str) -> Iterator[int]:
    """Yield the lookouts of *nodes*, or of all that the stage has."""
    for name in nodes or stage.nodes.names():
        for pid in marked("HOLDFAST_NODE", name):
            with suppress(OSError):
                if b"holdfast.agent.lookout" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield pid


def open_files(pid: int) -> list[Path]:
    """Return what a process has open."""
    found = []
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(one.readlink())
    return found
