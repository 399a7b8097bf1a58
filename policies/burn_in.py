"""When a node that was tried out is well: limits for what was measured, and a verdict from all that was tried. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from detectors.burn_in_results import Check, CheckMark
from policies.required_checks import PartToTest, unproven

WRITTEN: Final = "written MB/s"
SENT: Final = "sent MB/s"
RECEIVED: Final = "received MB/s"
LATENCY: Final = "round trip ms"
OFFSET: Final = "offset s"
UNCERTAIN: Final = "uncertain s"
"""Half the way of the question about the clock: the offset is known no better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInThresholds:
    """What a node has to reach. 0: no limit."""

    disk: float = 20.0
    """Least MB/s that its disk writes, the flush included."""
    network: float = 50.0
    """Least MB/s between it and another node, in either direction: half of what a link of 1 Gbit/s gives."""
    latency: float = 20.0
    """Most milliseconds that a message there and back may take, median of many."""
    clock: float = 1.0
    """Most seconds that its clock may be off from that of who asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInOutcome:
    """What a node was found to be."""

    node: str
    mark: CheckMark
    reason: str
    checks: tuple[Check, ...]
    cure: str = ""
    """What makes the missing checks possible, where the node is not proven healthy."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return every check in words."""
        return tuple(describe(check) for check in self.checks)


def apply_thresholds(check: Check, limits: BurnInThresholds) -> Check:
    """Return *check*, failed where it passed and a figure of it is beyond its limit."""
    if check.mark is not CheckMark.PASSED:
        return check
    wrong = list(_beyond(check.figures, limits))
    return replace(check, mark=CheckMark.FAILED, words="; ".join(wrong)) if wrong else check


def outcome(node: str, checks: Iterable[Check], wanted: Iterable[PartToTest] = ()) -> BurnInOutcome:
    """Return the verdict: one failed check fails the node, and it passes only if the checks exercised every part that is *wanted*."""
    checks = tuple(checks)
    failed = [check for check in checks if check.mark is CheckMark.FAILED]
    skipped = [check for check in checks if check.mark is CheckMark.SKIPPED and check.needed]
    missing = unproven(wanted, checks)
    if failed:
        return BurnInOutcome(
            node=node, mark=CheckMark.FAILED, reason="; ".join(f"{one.name}: {one.words}" for one in failed), checks=checks
        )
    if missing:
        cure = " ".join(f"{one}." for one in dict.fromkeys(one.cure for one in missing))
        return BurnInOutcome(node=node, mark=CheckMark.SKIPPED, reason="; ".join(map(str, missing)), checks=checks, cure=cure)
    if skipped or not any(check.mark is CheckMark.PASSED for check in checks):
        why = "; ".join(f"{one.name}: {one.words}" for one in skipped) or "no check ran"
        return BurnInOutcome(node=node, mark=CheckMark.SKIPPED, reason=f"not all checks could run: {why}", checks=checks)
    passed = ", ".join(one.name for one in checks if one.mark is CheckMark.PASSED)
    return BurnInOutcome(node=node, mark=CheckMark.PASSED, reason=f"passed {passed}", checks=checks)


def node_result(mark: CheckMark) -> str:
    """Return how a node's burn-in ended: a check is skipped, and a node is then not proven healthy."""
    return "not proven" if mark is CheckMark.SKIPPED else str(mark)


def explain_still_isolated(found: BurnInOutcome, state: str) -> str:
    """Say why a node stays out of service after a burn-in that did not prove it healthy, and what to do."""
    by_hand = f"return it by hand with `holdfast nodes readmit {found.node} --reason ...`"
    cure = f"{found.cure.rstrip('.')}, or {by_hand}." if found.cure else f"{by_hand.capitalize()} if it is healthy."
    return f"{found.node} stays {state}: {found.reason}. {cure}"


def describe(check: Check) -> str:
    """Return a check with its figures."""
    return f"{check.name} {check.mark}: {seen(check)}"


def seen(check: Check) -> str:
    """Return what a check saw and measured."""
    figures = figures_of(check)
    return check.words + (f" ({figures})" if figures else "")


def figures_of(check: Check) -> str:
    """Return what a check measured; empty where it measured nothing."""
    return ", ".join(f"{_rounded(value)} {name}" for name, value in check.figures.items())


def _rounded(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # noqa: PLR2004 (more figures than that are not measured)


def _beyond(figures: Mapping[str, float], limits: BurnInThresholds) -> Iterable[str]:
    slow = ((WRITTEN, limits.disk, "its disk wrote"), (SENT, limits.network, "it sent"), (RECEIVED, limits.network, "it received"))
    for name, least, what in slow:
        if name in figures and figures[name] < least:
            yield f"{what} {figures[name]:.4g} MB/s, and {least:g} are the least"
    if limits.latency and figures.get(LATENCY, 0.0) > limits.latency:
        yield f"a message there and back took {figures[LATENCY]:.4g} ms, and {limits.latency:g} are the most"
    off = abs(figures.get(OFFSET, 0.0)) - figures.get(UNCERTAIN, 0.0)
    if limits.clock and off > limits.clock:
        yield f"its clock is off by {figures[OFFSET]:+.4g} s, and {limits.clock:g} are the most"
