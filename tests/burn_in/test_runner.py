"""Burn-ins of real programs: nodes of this machine, bytes over real connections, and a relay between them that spoils what it is to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.burn_in import BurnInOutcome
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.runner import BurnInRunner
from holdfast.probe.burn_in.session import BurnInSession, LocalBurnInConnections, open_burn_in_connections
from holdfast.probe.remote.program import NoAnswer
from holdfast.spec import LocalCluster, cluster_of
from tests.burn_in.relay import Relay, Spoil, cut, flip, slow
from tests.mentions import mentions
from tests.waiting import wait_until

UNLIMITED = {"min_disk_bandwidth": 0, "min_network_bandwidth": 0, "max_latency": 0, "max_clock_offset": "1h"}
SMALL: dict[str, Any] = {"disk_size": "4MiB", "network_size": "1MiB", "max_memory": "8MiB", "torch": False, "nice": 0}


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., LocalCluster]:
    """Make a cluster in a folder of its own, with burn-ins that take little."""

    def make(**fields: Any) -> LocalCluster:
        burn_in = {**SMALL, "thresholds": {**UNLIMITED, **fields.pop("limits", {})}, **fields.pop("burn_in", {})}
        made = cluster_of(
            {"kind": "local", "name": "tried", "nodes": 4, "directory": str(tmp_path / "nodes"), "burn_in": burn_in, **fields}
        )
        assert isinstance(made, LocalCluster)
        return made

    return make


@pytest.fixture
def post(cluster: Callable[..., LocalCluster]) -> Iterator[BurnInSession]:
    """Give the program on one node."""
    made = LocalBurnInConnections(cluster()).open("node-0")
    yield made
    made.close()


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    """End relays at last."""
    made: list[Relay] = []
    yield made
    for one in made:
        one.close()


def tried(cluster: LocalCluster, nodes: list[str], partners: list[str], **fields: Any) -> dict[str, BurnInOutcome]:
    """Try nodes out for next to no time."""
    with open_burn_in_connections(cluster) as posts:
        return BurnInRunner(posts, BurnInPlan.of(cluster.burn_in, seconds=0.05), **fields).try_out(nodes, partners)


def check(outcome: BurnInOutcome, name: str) -> Check:
    """Return the check of that name."""
    return next(one for one in outcome.checks if one.name == name)


def test_a_healthy_machine_passes_with_its_measurements(cluster: Callable[..., LocalCluster]) -> None:
    """Every check really ran: each has measurements, and is reported as it ends."""
    reported: list[tuple[str, str]] = []
    found = tried(cluster(), ["node-1"], ["node-2"], on_check=lambda node, one: reported.append((node, one.name)))["node-1"]
    assert found.mark is CheckMark.PASSED, found
    assert reported == [("node-1", name) for name in ("compute", "memory", "disk", "clock", "network")]
    assert check(found, "compute").figures["rounds"] >= 1
    assert check(found, "memory").figures["MiB"] >= 1
    assert check(found, "network").figures["sent MB/s"] > 0
    assert check(found, "network").words == "passed with node-2"
    assert check(found, "network").devices == ("lo",), "either end knows its interface"
    assert check(found, "disk").devices[0].startswith("/"), "the mount point comes first"


def test_the_faulty_end_of_a_pair_is_named(cluster: Callable[..., LocalCluster], relays: list[Relay]) -> None:
    """One bit is flipped on every connection of node-1: all others pass, without a remark about it."""

    def through(serves: str, comes: str, port: int) -> tuple[str, int]:
        if "node-1" not in {serves, comes}:
            return "127.0.0.1", port
        relays.append(Relay(port, flip(700_000)))
        return relays[-1].place

    nodes = ["node-0", "node-1", "node-2"]
    found = tried(cluster(), nodes, ["node-3"], relay=through)
    assert {node: one.mark for node, one in found.items()} == {
        "node-0": CheckMark.PASSED,
        "node-1": CheckMark.FAILED,
        "node-2": CheckMark.PASSED,
    }
    assert relays, "the fault was there"
    words = check(found["node-1"], "network").words
    assert mentions(words, "node is at fault")
    assert "byte " in words
    assert "arrived as" in words


SPOILT: dict[str, tuple[Spoil, dict[str, Any], str]] = {
    "slow": (slow(2e6), {"min_network_bandwidth": "10MB"}, "it sent"),
    "cut": (cut(500_000), {}, ""),
}


@pytest.mark.parametrize("case", ["slow", "cut"])
def test_of_only_two_nodes_none_is_named(case: str, cluster: Callable[..., LocalCluster], relays: list[Relay]) -> None:
    """A link that is slow or breaks fails both, and the message says that it is unknown which is faulty."""
    spoil, limits, words = SPOILT[case]

    def through(_serves: str, _comes: str, port: int) -> tuple[str, int]:
        relays.append(Relay(port, spoil))
        return relays[-1].place

    found = tried(cluster(nodes=2, limits=limits), ["node-0", "node-1"], [], relay=through)
    for one in found.values():
        assert one.mark is CheckMark.FAILED
        assert "unknown which" in one.reason
        assert words in one.reason


def test_a_clock_that_is_off_fails(cluster: Callable[..., LocalCluster]) -> None:
    """By more than the round trip of the question can explain; the sign is the node's."""
    found = tried(cluster(limits={"max_clock_offset": "1s"}), ["node-0"], [], now=lambda: time.time() + 30.0)["node-0"]
    assert found.mark is CheckMark.FAILED
    assert mentions(found.reason, "clock", "-30 s")
    assert check(found, "network").mark is CheckMark.SKIPPED, "there was nobody to try it with"


def test_a_disk_that_is_too_slow_fails(cluster: Callable[..., LocalCluster]) -> None:
    """No disk writes so fast."""
    found = tried(cluster(limits={"min_disk_bandwidth": "1000TB"}), ["node-0"], ["node-1"])["node-0"]
    assert found.mark is CheckMark.FAILED
    assert mentions(found.reason, "1000000000 MB/s")


def test_a_node_that_is_off_neither_passes_nor_fails(cluster: Callable[..., LocalCluster]) -> None:
    """Neither does one whose partners are all off: its network was not tested."""
    made = cluster(nodes=2)
    LocalNodes.of(made).power_off("node-1")
    found = tried(made, ["node-1"], ["node-0"])["node-1"]
    assert (found.mark, mentions(found.reason, "switched off")) == (CheckMark.SKIPPED, True)
    partner = tried(made, ["node-0"], ["node-1"])["node-0"]
    assert partner.mark is CheckMark.SKIPPED
    assert mentions(partner.reason, "node-1", "switched off")


def test_missing_torch_is_reported(cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's python has none: the message says so, and the other checks decide."""
    hidden = "import sys;sys.modules['torch']=None;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
    monkeypatch.setattr("holdfast.probe.remote.program.BOOT", hidden)
    found = tried(cluster(burn_in={"torch": True}), ["node-0"], ["node-1"])["node-0"]
    assert check(found, "matrix").mark is CheckMark.SKIPPED
    assert mentions(check(found, "matrix").words, "python3", "torch")
    assert found.mark is CheckMark.PASSED


def runs(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not fetched yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_on_a_node_end_with_the_session(post: BurnInSession) -> None:
    """Also in the middle of work, with every child process."""
    pid = post.facts["pid"]
    assert runs(pid)
    post.begin("compute", seconds=600)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(children.read_text()), seconds=60)
    (child,) = map(int, children.read_text().split())
    post.close()
    wait_until(lambda: not runs(pid) and not runs(child), seconds=60)


def test_an_invalid_command_is_skipped(post: BurnInSession) -> None:
    """The program goes on."""
    (result,) = post.ask("disk", seconds=1)
    assert (result.mark, result.words) == (CheckMark.SKIPPED, "KeyError: 'folder'")
    (result,) = post.ask("ticking", seconds=0.01)
    assert result.mark is CheckMark.PASSED


def test_a_check_whose_process_is_killed_is_skipped(post: BurnInSession) -> None:
    """As by the kernel when memory runs out; that is no fault of the node."""
    mark = post.begin("ticking", seconds=600)
    pid = post.facts["pid"]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(children.read_text()), seconds=60)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    (result,) = post.checks(mark, time.monotonic() + 60)
    assert result.mark is CheckMark.SKIPPED
    assert mentions(result.words, "SIGKILL")


def test_a_program_that_does_not_start_gives_no_answer(cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """With its last output."""
    monkeypatch.setattr("holdfast.probe.remote.program.BOOT", "raise SystemExit('no room')")
    with pytest.raises(NoAnswer, match="no room"):
        LocalBurnInConnections(cluster()).open("node-0")
