"""Evaluate a burn-in: thresholds for measured values, and the result of a node from all checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.required_checks import PartToTest, unproven

WRITTEN: Final = "written MB/s"
SENT: Final = "sent MB/s"
RECEIVED: Final = "received MB/s"
LATENCY: Final = "round trip ms"
OFFSET: Final = "offset s"
UNCERTAIN: Final = "uncertain s"
"""Half the round trip of the clock query: the uncertainty of the offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInThresholds:
    """Thresholds for a healthy node; 0: no limit."""

    disk: float = 20.0
    """Minimum write rate of its disk in MB/s, including the flush."""
    network: float = 50.0
    """Minimum rate to and from another node in MB/s: half of a 1 Gbit/s link."""
    latency: float = 20.0
    """Maximum round-trip time of a message in milliseconds (median)."""
    clock: float = 1.0
    """Maximum offset of its clock from the controller's, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnInOutcome:
    """Result of a node's burn-in."""

    node: str
    mark: CheckMark
    reason: str
    checks: tuple[Check, ...]
    cure: str = ""
    """How to make missing checks possible, if the node is not proven healthy."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return one line per check."""
        return tuple(describe(check) for check in self.checks)


def apply_thresholds(check: Check, limits: BurnInThresholds) -> Check:
    """Return *check*, marked as failed if it passed but a measured value misses its threshold."""
    if check.mark is not CheckMark.PASSED:
        return check
    wrong = list(_beyond(check.figures, limits))
    return replace(check, mark=CheckMark.FAILED, words="; ".join(wrong)) if wrong else check


def outcome(node: str, checks: Iterable[Check], wanted: Iterable[PartToTest] = ()) -> BurnInOutcome:
    """Return a node's result: one failed check fails it, and it passes only if the checks exercised every *wanted* part."""
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
    """Return the result as users read it: a node with a skipped check is not proven healthy."""
    return "not proven" if mark is CheckMark.SKIPPED else str(mark)


def explain_still_isolated(found: BurnInOutcome, state: str) -> str:
    """Return why a node stays isolated after a burn-in that did not prove it healthy, and what to do."""
    by_hand = f"return it by hand with `holdfast node return {found.node} --reason ...`"
    cure = f"{found.cure.rstrip('.')}, or {by_hand}." if found.cure else f"{by_hand.capitalize()} if it is healthy."
    return f"{found.node} stays {state}: {found.reason}. {cure}"


def describe(check: Check) -> str:
    """Return a check as one line."""
    return f"{check.name} {check.mark}: {seen(check)}"


def seen(check: Check) -> str:
    """Return a check's finding with its measured values."""
    figures = figures_of(check)
    return check.words + (f" ({figures})" if figures else "")


def figures_of(check: Check) -> str:
    """Return a check's measured values with units; empty if there are none."""
    return ", ".join(f"{_rounded(value)} {name}" for name, value in check.figures.items())


def _rounded(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # noqa: PLR2004 (measured no more precisely)


def _plain(value: float) -> str:
    """Return a limit in digits, never as ``1e+09``."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _beyond(figures: Mapping[str, float], limits: BurnInThresholds) -> Iterable[str]:
    slow = ((WRITTEN, limits.disk, "its disk wrote"), (SENT, limits.network, "it sent"), (RECEIVED, limits.network, "it received"))
    for name, least, what in slow:
        if name in figures and figures[name] < least:
            yield f"{what} {figures[name]:.4g} MB/s, at least {_plain(least)} MB/s is needed"
    if limits.latency and figures.get(LATENCY, 0.0) > limits.latency:
        yield f"a round trip took {figures[LATENCY]:.4g} ms, at most {_plain(limits.latency)} ms is allowed"
    off = abs(figures.get(OFFSET, 0.0)) - figures.get(UNCERTAIN, 0.0)
    if limits.clock and off > limits.clock:
        yield f"its clock is off by {figures[OFFSET]:+.4g} s, at most {_plain(limits.clock)} s is allowed"
