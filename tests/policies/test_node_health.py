"""What is thought of a node: it worsens at once, mends slowly, and what was not seen neither condemns nor mends."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.probe_result import NodeProbe, ProbeOutcome, UnansweredProbe
from holdfast.detectors.nodes.readings import (
    ClockReading,
    HostReading,
    KernelLine,
    KernelReading,
    NetworkReading,
    Nic,
    NodeReading,
    ServiceReading,
    ServiceState,
)
from holdfast.policies.nodes.node_health import CLEAN, FRESH, HELD, HealthAssessment, NodeHealthState, assess_health, health_change
from tests.mentions import mentions

FATAL = "NVRM: Xid (PCI:0000:18:00): 79, pid=42, GPU has fallen off the bus."


def a_node(*, lines: tuple[str, ...] = (), ssh: bool = True, errors: int = 0, at: float = 0.0) -> NodeReading:
    """Return a look at a node with one interface and one service."""
    unknown = Unknown("not of interest")
    host = HostReading(
        boot="b", uptime=1e6, processors=8, load_5m=0.0, memory_total=1 << 36, memory_available=1 << 35, memory_pressure=unknown,
        oom_kills=0, memory_errors_corrected=0, memory_errors_uncorrected=0, throttled=0, clock_source=unknown, clock_sources=unknown,
        files_open=1, files_most=1000,
    )  # fmt: skip
    nic = Nic(name="eth0", wanted_up=True, state="up", carrier=True, speed=100, counters={"rx_crc_errors": errors}, driver_counters=unknown)
    return NodeReading(
        node="n0",
        at=at,
        kernel=KernelReading(
            lines=tuple(KernelLine(sequence=number, microseconds=int(1e12), level=3, text=text) for number, text in enumerate(lines))
        ),
        network=NetworkReading(nics=(nic,), ib_ports=()),
        host=host,
        clock=ClockReading(synchronized=True, offset=0.0, worst=0.001),
        services=ServiceReading(services=(ServiceState(name="sshd", present=True, running=ssh, needed=True),)),
    )


def story(*found: ProbeOutcome, every: float = 60.0) -> Iterator[HealthAssessment]:
    """Yield what is thought of a node after each of these looks, one every *every* seconds."""
    before: HealthAssessment | None = None
    earlier: NodeReading | None = None
    for number, one in enumerate(found):
        at = number * every
        seen = dataclasses.replace(one, at=at) if isinstance(one, NodeReading) else one
        before = assess_health(NodeProbe(node="n0", at=at, seconds=0.1, found=seen), before, earlier)
        earlier = seen if isinstance(seen, NodeReading) else earlier
        yield before


def standings(*found: ProbeOutcome, every: float = 60.0) -> list[str]:
    """Return the standings of such a story."""
    return [assessment.status for assessment in story(*found, every=every)]


WELL = a_node()
AWAY = UnansweredProbe(times=3, why="port 22: Connection refused")
DARK = Unknown("changed host key")


def test_a_probe_without_faults_is_ok_and_its_faults_decide() -> None:
    """By what they ask for: to be watched, or to be taken out."""
    assert standings(WELL) == ["healthy"]
    assert standings(a_node(ssh=False)) == ["degraded"]
    assert standings(a_node(lines=(FATAL,))) == ["unhealthy"]
    assert standings(AWAY) == ["unreachable"]
    assert standings(DARK) == ["unknown"]


def test_since_is_the_start_of_the_present_health() -> None:
    """Not when the node was last looked at."""
    assessments = list(story(WELL, WELL, a_node(ssh=False), a_node(ssh=False)))
    assert [(one.since, one.at) for one in assessments] == [(0.0, 0.0), (0.0, 60.0), (120.0, 120.0), (120.0, 180.0)]


def test_a_fault_that_comes_and_goes_does_not_make_health_flap() -> None:
    """It is over after several clean looks in a row, and a new one begins the row anew."""
    bad = a_node(ssh=False)
    assert standings(bad, WELL, bad, WELL, bad) == ["degraded"] * 5
    assert standings(bad, *[WELL] * CLEAN) == ["degraded"] * CLEAN + ["healthy"]
    assert standings(bad, *[WELL] * (CLEAN - 1), bad, *[WELL] * (CLEAN - 1)) == ["degraded"] * (2 * CLEAN)


def test_a_fault_that_makes_a_node_unhealthy_counts_for_longer() -> None:
    """A line of the log is no state: its silence proves little."""
    bad = a_node(lines=(FATAL,))
    looks = [bad, *[bad] * CLEAN, bad]  # the line stays in the log, and is reported once
    assert standings(*looks) == ["unhealthy"] * len(looks)
    assert standings(*looks, every=HELD / 2) == ["unhealthy"] * CLEAN + ["healthy"] * (len(looks) - CLEAN)


def test_counters_are_compared_with_the_previous_probe() -> None:
    """What a node had counted before it was first looked at says nothing."""
    assert standings(a_node(errors=10_000), a_node(errors=10_000)) == ["healthy", "healthy"]
    assert standings(a_node(errors=10_000), a_node(errors=20_000)) == ["healthy", "degraded"]


def test_a_probe_that_could_not_run_changes_no_health() -> None:
    """An unhealthy node stays unhealthy; of a healthy one nobody knows any more."""
    bad = a_node(lines=(FATAL,))
    assert standings(bad, DARK, DARK) == ["unhealthy"] * 3
    assert standings(a_node(ssh=False), *[DARK] * (CLEAN + 1)) == ["degraded"] * (CLEAN + 2)
    assert standings(WELL, DARK, WELL) == ["healthy", "unknown", "healthy"]
    assert standings(AWAY, DARK) == ["unreachable", "unreachable"]
    *_, latest = story(bad, DARK)
    assert mentions(latest.reason, "changed host key")
    assert (latest.seen, latest.at) == (0.0, 60.0)


def test_a_node_that_answers_again_keeps_its_findings() -> None:
    """Being away mends nothing."""
    assert standings(a_node(ssh=False), AWAY, WELL) == ["degraded", "unreachable", "degraded"]


def test_a_part_that_is_not_seen_any_more_is_not_taken_for_healthy() -> None:
    """As long as it is not, and no fault there is thought to be over meanwhile; one that was never seen is nothing new."""
    half = dataclasses.replace(WELL, services=Unknown("no answer within 8 s"))
    assert standings(half, half) == ["healthy", "healthy"]
    assert standings(WELL, half, half, WELL) == ["healthy", "unknown", "unknown", "healthy"]
    assert standings(a_node(ssh=False), *[half] * (CLEAN + 1)) == ["degraded"] * (CLEAN + 2)
    *_, latest = story(WELL, half)
    assert mentions(latest.reason, "services", "no answer within 8 s")


def test_only_changes_are_reported() -> None:
    """Each once, with the reason; a node that is new and well is none."""
    looks = (WELL, WELL, a_node(ssh=False), a_node(ssh=False, errors=50_000), a_node(ssh=False, errors=50_000), AWAY, AWAY, DARK)
    before, changes = None, []
    for after in story(*looks):
        changes.append(health_change(before, after))
        before = after
    assert [change and (change.before, change.after, [one.kind for one in change.new]) for change in changes] == [
        None,
        None,
        ("healthy", "degraded", ["service-down"]),
        ("degraded", "degraded", ["nic-errors"]),
        None,
        ("degraded", "unreachable", []),
        None,
        None,
    ]
    assert changes[5] is not None
    assert mentions(changes[5].words, "n0", "degraded -> unreachable", 3, "port 22")


def test_the_end_of_a_fault_is_reported() -> None:
    """With what is over."""
    assessments = list(story(a_node(ssh=False), *[WELL] * CLEAN))
    change = health_change(assessments[-2], assessments[-1])
    assert change is not None
    assert mentions(change.words, "n0", "degraded -> healthy", "service-down")
    assert [one.kind for one in change.over] == ["service-down"]


@pytest.mark.parametrize("found", [a_node(lines=(FATAL,)), AWAY, DARK])
def test_a_first_probe_with_faults_is_reported(found: ProbeOutcome) -> None:
    """Somebody should know."""
    (assessment,) = story(found)
    change = health_change(None, assessment)
    assert change is not None
    assert change.reason


def test_a_kind_from_logs_keeps_its_action_in_another_process() -> None:
    """Who looks next may have read no signature yet: an unhealthy node must not get better by that."""
    made = "HealthFinding(kind='journal-aborted', part='p', quote='q', since=0.0, seen=0.0)"
    program = f"from holdfast.policies.nodes.node_health import HealthFinding\nprint({made}.recommended_action)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "evict"


def test_a_node_that_answers_again_lists_its_open_faults() -> None:
    """It was unhealthy, did not answer, and answers."""
    unhealthy = a_node(lines=(FATAL,))
    _, gone, again = story(unhealthy, AWAY, unhealthy)
    change = health_change(gone, again)
    assert change is not None
    assert mentions(change.reason, "gpu-off-bus")


def test_evidence_has_the_worst_first() -> None:
    """A table shows its begin."""
    (assessment,) = story(a_node(lines=(FATAL,), ssh=False))
    assert [words.partition(":")[0] for words in assessment.evidence] == ["gpu-off-bus", "service-down"]
    assert assessment.is_bad
    assert assessment.status == NodeHealthState.UNHEALTHY


def test_an_assessment_expires() -> None:
    """Where nobody has looked since, it says nothing of now."""
    (assessment,) = story(AWAY)
    assert assessment.is_fresh(FRESH)
    assert not assessment.is_fresh(FRESH + 1)


def test_a_node_that_is_only_busy_is_not_degraded() -> None:
    """Its load is shown, and says nothing against it."""
    assert isinstance(WELL.host, HostReading)
    (assessment,) = story(dataclasses.replace(WELL, host=dataclasses.replace(WELL.host, load_5m=90.0)))
    assert [one.kind for one in assessment.findings] == ["host-overloaded"]
    assert assessment.status == "healthy"


def test_a_log_line_that_does_not_prove_a_fault_degrades_a_node_and_no_more() -> None:
    """A port that nobody uses has no link, whoever says so; a line that can only mean a lost GPU condemns the node."""
    down = a_node(lines=("mlx5_core 0000:9a:00.0 eth0: Link down",))
    assert isinstance(down.network, NetworkReading)
    assert isinstance(down.network.nics, tuple)
    unplugged = dataclasses.replace(down.network.nics[0], state="down", carrier=False)
    (said,) = story(down)
    (seen,) = story(dataclasses.replace(down, network=NetworkReading(nics=(unplugged,), ib_ports=())))
    (proven,) = story(a_node(lines=(FATAL,)))
    assert [(one.status, one.is_bad) for one in (said, seen)] == [(NodeHealthState.DEGRADED, False)] * 2
    assert [one.unproven for one in said.findings] == [True]
    assert (proven.status, proven.findings[0].unproven) == (NodeHealthState.UNHEALTHY, False)
