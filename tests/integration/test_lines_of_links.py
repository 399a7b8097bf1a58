"""Connections are cut while a line says that a link is down: whether its node is left depends on what the kernel says of that link.

Agents, monitors, kernel logs and checks are real; sysfs is a folder of the test's own, and the cut is an error that a rank raises.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from holdfast.agent.monitor.line_checks import BEFORE
from holdfast.agent.node.interfaces import interfaces
from holdfast.history import queries
from tests.cli.conftest import PROGRAM
from tests.integration.stage import BOOTED, Play, Stage
from tests.monitors import is_read
from tests.waiting import wait_until

CARD = "0000:9a:00.0"
LINK = next((one.name for one in interfaces()), "")
"""An interface of this machine that has an address: without one it carries nothing of a job."""
DOWN = f"mlx5_core {CARD} {LINK}: Link down"
CUT = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
EACH = f"if generation == 1 and os.path.exists({{cut!r}}): raise RuntimeError({CUT!r})"


def root_with_link(root: Path) -> Path:
    """Make the sysfs of nodes with one network interface that is up; return the interface's folder."""
    place, device = root / "sys/class/net" / LINK, root / "sys/bus/pci/devices" / CARD
    place.mkdir(parents=True)
    device.mkdir(parents=True)
    (place / "device").symlink_to(device)
    for name, text in {"flags": "0x1003", "operstate": "up", "carrier": "1", "carrier_down_count": "1"}.items():
        (place / name).write_text(f"{text}\n")
    (root / "proc").symlink_to("/proc")
    (root / "dev").symlink_to("/dev")
    return place


def line_of(play: Play) -> dict[str, str]:
    """Return the evidence of the line; empty before it is on record."""
    found = [one for one in queries.faults(play.stage.history, play.job.id) if one.kind == "link-down"]
    return found[0].evidence if found else {}


@pytest.mark.skipif(not LINK, reason="needs a network interface with an address")
@pytest.mark.parametrize(("down", "root", "action"), [(False, "worker-peer-lost", "restart-workers"), (True, "link-down", "replace-node")])
def test_the_kernel_decides_whether_a_line_of_a_link_takes_its_node_out(
    stage: Stage, tmp_path: Path, *, down: bool, root: str, action: str
) -> None:
    """A link that was not lost has cut nothing: the ranks start again where they were. One that was lost: its node is left."""
    link, cut = root_with_link(tmp_path / "root"), tmp_path / "cut"
    logs = {node: tmp_path / f"{node}.log" for node in ("node-0", "node-1", "node-2")}
    for log in logs.values():
        log.write_text(BOOTED)
    stage.environment |= {"HOLDFAST_NODE_ROOT": str(tmp_path / "root"), "HOLDFAST_KERNEL_LOG": str(tmp_path / "{node}.log")}
    name = f"link-{'lost' if down else 'kept'}"
    play = stage.play(name, args=["--steps", "4000", "--each", EACH.format(cut=str(cut))], nnodes=2, nproc_per_node=1, spare_nodes=1)
    play.reaches("RUNNING")
    wait_until(lambda: is_read(logs["node-1"], "node-1"), seconds=60, explain=play.log)
    monitor = stage.nodes.folder("node-1") / "monitor.log"
    wait_until(lambda: "links.read" in monitor.read_text(), seconds=60, explain=play.log)
    time.sleep(BEFORE)  # the first reading is to be older than the line
    if down:
        (link / "carrier_down_count").write_text("2\n")
    with logs["node-1"].open("a") as file:
        file.write(f"Nov 21 09:10:00 n1 kernel: {DOWN}\n")
    wait_until(lambda: line_of(play), seconds=60, explain=play.log)
    cut.touch()
    wait_until(lambda: play.saw(1) and play.incidents()[0].outcome, seconds=60, explain=play.log)
    (incident,) = play.incidents()
    assert (incident.kind, incident.action, incident.outcome) == (root, action, "recovered"), play.log()
    assert bool(line_of(play).get("supported")) == down
    assert bool(line_of(play).get("contradicted")) == (not down)
    last = queries.generations(stage.history, play.job.id)[-1]
    assert ("node-1" in last.ranks) == (not down)
    show = [*PROGRAM, "incidents", "show", "1", "--job", name]
    shown = subprocess.run(show, env=stage.environment, capture_output=True, text=True, check=True)
    words = " ".join(shown.stdout.split())
    assert (f"{LINK} lost its link once" in words, "is no cause: by its counter" in words) == (down, not down), shown.stdout
    play.stops()
