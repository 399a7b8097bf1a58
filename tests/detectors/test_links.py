"""What the kernel says of the device that a line names: it contradicts the line, agrees with it, or is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, KERNEL_LOG, TAKES_NODE_OUT, Certainty, Fault, RecommendedActions
from holdfast.detectors.causes import Candidate
from holdfast.detectors.confirmation import confirmed, why_it_acts
from holdfast.detectors.diagnosis import diagnose, see
from holdfast.detectors.evidence import HangLimits, LogLine, Unknown, WorkerException, WorkerExit
from holdfast.detectors.nodes.line_check import LineCheck
from holdfast.detectors.nodes.links import Link, LinkReading, check_link_line, is_about_link
from holdfast.policies.recovery.case import Case

CARD, OTHER = "0000:9a:00.0", "0000:9a:00.1"
DOWN = f"mlx5_core {CARD} ens5f0np0: Link down"
NIC = Link(name="ens5f0np0", bus=CARD, up=True, downs=3, addresses=("10.0.0.5",))
SPARE = Link(name="ens5f1np1", bus=OTHER, up=True, downs=8)
PORT = Link(name="mlx5_0/1", bus=CARD, up=True, downs=0)
READING = LinkReading(links=(NIC, SPARE, PORT), buses=("0000:00:01.0", CARD, OTHER), adapters={"mlx5_0": CARD}, is_host=True)
UNKNOWN = Unknown("refused")


def having(reading: LinkReading = READING, *, name: str = "ens5f0np0", **facts: Any) -> LinkReading:
    """Return *reading* with other facts of the link *name*."""
    assert not isinstance(reading.links, Unknown)
    return replace(reading, links=tuple(replace(one, **facts) if one.name == name else one for one in reading.links))


def check(text: str, now: LinkReading, *earlier: LinkReading, kind: str = "link-down") -> LineCheck:
    """Return the check of a line, 40 s after the newest reading from before."""
    return check_link_line(kind, text, earlier, now, 40.0)


def test_a_link_that_was_not_lost_contradicts_the_line() -> None:
    """By the counter, and only while it is up; the addresses and adapters of its card are told."""
    found = check(DOWN, READING, READING)
    assert found.contradicted == "by its counter ens5f0np0 did not lose its link in 40 s around the line, and it is up"
    assert (found.supported, found.addresses, found.adapters, found.stacked) == ("", ("10.0.0.5",), ("mlx5_0",), False)


@pytest.mark.parametrize(
    ("now", "supported"),
    [
        (having(up=False), "ens5f0np0 has no link"),
        (having(up=False, downs=4), "ens5f0np0 has no link, ens5f0np0 lost its link once in 40 s"),
        (having(downs=5), "ens5f0np0 lost its link 2 times in 40 s"),
    ],
)
def test_a_link_that_is_down_or_was_lost_agrees_with_the_line(now: LinkReading, supported: str) -> None:
    """Whatever another one does."""
    found = check(DOWN, now, READING)
    assert (found.contradicted, found.supported) == ("", supported)


@pytest.mark.parametrize(
    ("now", "earlier"),
    [
        (READING, []),
        (having(downs=UNKNOWN), [READING]),
        (READING, [having(downs=UNKNOWN)]),
        (having(up=UNKNOWN), [READING]),
        (having(downs=2), [READING]),
        (replace(READING, links=UNKNOWN), [replace(READING, links=UNKNOWN)]),
    ],
    ids=["nothing-before", "no-counter", "no-counter-before", "no-state", "counter-reset", "unreadable"],
)
def test_what_cannot_be_measured_says_nothing(now: LinkReading, earlier: list[LinkReading]) -> None:
    """Neither for the line nor against it."""
    found = check(DOWN, now, *earlier)
    assert (found.contradicted, found.supported) == ("", "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"mlx5_core {CARD}: Port module event: module 0, Cable unplugged", "ens5f0np0 and mlx5_0/1"),
        ("bond0: (slave ens5f1np1): link status definitely down, disabling slave", "ens5f1np1"),
        ("mlx5_0: Port 1 link is down", "mlx5_0/1"),
        ("ens5f1np1: Link is Down", "ens5f1np1"),
        ("mlx5_0: Port 2 link is down", ""),
    ],
)
def test_the_line_names_an_interface_a_port_or_a_card(text: str, named: str) -> None:
    """By its name, else by the address of its card."""
    found = check(text, READING, READING)
    assert named in found.contradicted
    assert bool(found.contradicted) == bool(named)


@pytest.mark.parametrize(
    ("text", "now", "earlier", "absent"),
    [
        (DOWN.replace("9a:00.0", "b1:00.0").replace("ens5f0np0", "ens9"), READING, [READING], "0000:b1:00.0"),
        ("eth7: Link is Down", READING, [READING], "eth7"),
        ("eth7: Link is Down", replace(READING, is_host=False), [READING], ""),
        (DOWN, replace(READING, buses=("0000:00:01.0",), links=()), [READING], ""),
        (DOWN, replace(READING, buses=UNKNOWN), [replace(READING, buses=UNKNOWN, links=())], ""),
        (DOWN.replace("9a:00.0", "b1:00.0").replace("ens5f0np0", "ens9"), READING, [], ""),
    ],
    ids=["card", "interface", "container", "fell-off-the-bus", "no-pci", "nothing-before"],
)
def test_a_device_that_the_node_never_had_contradicts_the_line(
    text: str, now: LinkReading, earlier: list[LinkReading], absent: str
) -> None:
    """Not one that was there before, and not where devices cannot be seen."""
    found = check(text, now, *earlier)
    assert ("this node has no" in found.contradicted, absent in found.contradicted) == (bool(absent), True)


def test_only_lines_of_links_are_judged_by_the_state_of_links() -> None:
    """Firmware that failed may keep its link; what is no network device is not asked for."""
    text = f"mlx5_core {CARD}: device's health compromised - reached miss count"
    found = check(text, READING, READING, kind="mlx5-health")
    assert (found.contradicted, found.supported, found.adapters) == ("", "", ("mlx5_0",))
    checked = set(filter(is_about_link, CATALOGUE))
    assert {"mlx5-health", "link-down", "bond-dead", "infiniband-layer"} < checked
    assert checked.isdisjoint({"gpu-off-bus", "nfs-silent", "soft-lockup"})


# -- what follows from it ----------------------------------------------------------------------------------------------


def line(text: str = DOWN, **measured: Any) -> Fault:
    """Return the fault that a line of the kernel log of n0 is taken for, with what was measured."""
    (fault,) = see([LogLine(text=text, at=1.0, node="n0", log=KERNEL_LOG)], HangLimits())
    return replace(fault, **measured)


def cut(rank: int) -> list[Fault]:
    """Return the failure of a rank whose connections were cut."""
    raised = WorkerException(type="RuntimeError", message="Connection reset by peer", peer_lost=True)
    return see([WorkerExit(node=f"n{rank}", rank=rank, at=1.2, code=1, raised=raised)], HangLimits())


def confidence(candidates: Sequence[Candidate]) -> float:
    """Return how likely the link is the cause."""
    return next(one.confidence for one in candidates if one.fault.kind == "link-down")


def leaving(*faults: Fault) -> tuple[str, ...]:
    """Return the nodes that an incident with these faults takes out, where there are spares for all."""
    return Case(now=3.0, diagnosis=diagnose(faults), members=("n0", "n1"), spares=("s0", "s1")).unfit


def test_cut_connections_beside_a_line_that_the_kernel_contradicts_take_no_node_out() -> None:
    """The cut is the root cause; without the measurement, and with one that agrees, the node leaves."""
    peers = [*cut(0), *cut(1)]
    wrong = line(contradicted="ens5f0np0 is up")
    assert leaving(wrong, *peers) == ()
    assert diagnose([wrong, *peers]).root.kind == "worker-peer-lost"
    assert confirmed([wrong, *peers]) == {}
    assert "; link-down of n0 is no cause: ens5f0np0 is up" in diagnose([wrong, *peers]).reason
    for right in (line(), line(supported="ens5f0np0 has no link")):
        assert leaving(right, *peers) == ("n0",)
        assert diagnose([right, *peers]).root.kind == "link-down"


def test_an_interface_that_no_rank_uses_is_no_cause() -> None:
    """Though it is down."""
    unused = line(supported="ens5f1np1 has no link", idle=True)
    found = diagnose([unused, *cut(0), *cut(1)])
    assert leaving(unused, *cut(0), *cut(1)) == ()
    assert (found.root.kind, "; link-down of n0 is no cause: no rank of the job uses that device" in found.reason) == (
        "worker-peer-lost",
        True,
    )


def test_a_measurement_that_agrees_raises_the_confidence() -> None:
    """It is a source of its own, beside another cause."""
    others = [*cut(0), *see([WorkerExit(node="n1", rank=1, at=1.1, signal=9)], HangLimits())]
    sure, unsure = (diagnose([one, *others]).candidates for one in (line(supported="ens5f0np0 has no link"), line()))
    assert confidence(sure) > confidence(unsure)


def test_a_line_that_is_contradicted_hides_no_other_of_the_same_device() -> None:
    """The later one acts, and the first still does not."""
    wrong, right = line(contradicted="ens5f0np0 is up"), replace(line(supported="ens5f0np0 has no link"), at=1.1)
    found = diagnose([wrong, right, *cut(0)])
    actions = RecommendedActions(confirmed=found.confirmed)
    assert (actions.of(right) in TAKES_NODE_OUT, actions.of(wrong) in TAKES_NODE_OUT) == (True, False)
    assert (found.root, wrong.certainty, right.certainty) == (right, Certainty.CONTRADICTED, Certainty.LINE)


def test_lines_that_are_contradicted_on_half_the_nodes_are_no_fault_of_the_switch() -> None:
    """They are of the switch where they are not."""
    lines = [line(), replace(line(), node="n1", source=f"{KERNEL_LOG} on n1")]
    peers = [*cut(0), *cut(1)]
    assert diagnose([*lines, *peers]).root.kind == "network-switch-failed"
    wrong = [replace(one, contradicted="ens5f0np0 is up") for one in lines]
    assert diagnose([*wrong, *peers]).root.kind == "worker-peer-lost"


def test_the_record_says_what_was_measured() -> None:
    """And what it meant."""
    wrong, right = line(contradicted="ens5f0np0 is up"), line(supported="ens5f0np0 has no link")
    assert why_it_acts(wrong, CATALOGUE_ACTIONS) == "no: the node's kernel contradicts the line: ens5f0np0 is up"
    signals = RecommendedActions(confirmed=confirmed([right, *cut(0)]))
    words = "confirmed by worker-peer-lost (exception report of rank 0); measured: ens5f0np0 has no link"
    assert why_it_acts(right, signals) == words
