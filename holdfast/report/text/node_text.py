"""Nodes of one cluster as text for the Prefect UI: health sweeps and burn-ins as Markdown.

No artifact of Prefect's kind "table": the UI does not wrap its cells and cuts it off at the right edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from holdfast.detectors.catalogue import CATALOGUE
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.plurals import plural
from holdfast.policies.nodes.burn_in import BurnInOutcome, explain_still_isolated, figures_of, node_result
from holdfast.policies.nodes.node_health import HARMLESS, LOAD_KINDS, HealthAssessment, HealthChange, HealthFinding, worst_first
from holdfast.policies.nodes.node_states import NodeState
from holdfast.probe.health import Checkup
from holdfast.report.text.markdown import plain
from holdfast.report.text.wording import duration, listing, moment

MOST_NAMED: Final = 3
"""Changes that a state's message names."""
MOST_KINDS: Final = 2
"""Kinds of findings that a cell names: the UI does not wrap it."""
_HEALTHS: Final = ("unreachable", "unhealthy", "unknown", "degraded", "healthy")
"""Nodes that need a person come first."""
_NO_READING: Final[Mapping[str, str]] = {
    "unreachable": "see whether it is powered on, and reachable from the machine that probes; new jobs avoid it meanwhile",
    "unknown": "mend what the reason names: nothing is known against the node",
}
"""Health of a node that the last probe could not examine, to what to do."""
_ORDER: Final = (CheckMark.FAILED, CheckMark.SKIPPED, CheckMark.PASSED)
"""Nodes and checks that need a person come first."""


# -- a health sweep -------------------------------------------------------------------------------------------------------


def summary(checkup: Checkup) -> str:
    """Return the last sweep in one line: how many nodes there are, and their health, the worst first, with the names of the unhealthy."""
    nodes = {health: [one.node for one in checkup.assessments.values() if one.status == health] for health in _HEALTHS}
    counted = [
        f"{len(names)} {health}" + (f" ({listing(names, MOST_NAMED)})" if health != "healthy" else "")
        for health, names in nodes.items()
        if names
    ]
    return f"{plural(len(checkup.assessments), 'node')}: {', '.join(counted)}"


def health_markdown(checkup: Checkup) -> str:
    """Return the last sweep as a page: what to do about which node and why, then all nodes, those that need a person first."""
    found = sorted(checkup.assessments.values(), key=lambda one: _HEALTHS.index(one.status))
    blocks = [f"{plain(summary(checkup))}. Probed at {moment(checkup.at)}, in {duration(checkup.seconds)}."]
    if needed := [line for one in found for line in _needed(one)]:
        blocks += ["## What to do", "\n".join(needed)]
    table = ["| Node | Health | Since | Found |", "| --- | --- | --- | --- |"]
    table += [f"| {plain(one.node)} | {one.status} | {moment(one.since)} | {_kinds(one)} |" for one in found]
    return "\n\n".join([*blocks, "## Nodes", "\n".join(table)]) + "\n"


def _needed(assessment: HealthAssessment) -> Iterator[str]:
    """Yield a line for each finding that asks for something, the most severe first."""
    name = f"**{plain(assessment.node)}**"
    if assessment.reason:
        advice = _NO_READING.get(assessment.status, "none yet: the next probe may answer")
        why = plain(assessment.reason, code=True)
        yield f"- {name}: {assessment.status} since {moment(assessment.since)}: {why}. To do: {advice}"
    for one in worst_first(assessment.findings):
        if advice := _advice(one):
            yield f"- {name}: {plain(one.words, code=True).rstrip('.')}. Since {moment(one.since)}. To do: {plain(advice, code=True)}"


def _kinds(assessment: HealthAssessment) -> str:
    """Return the kinds of a node's findings: the evidence does not fit a cell, which the UI does not wrap."""
    return plain(listing(dict.fromkeys(one.kind for one in worst_first(assessment.findings)), MOST_KINDS))


def _advice(finding: HealthFinding) -> str:
    """Return what a person does about a finding; empty if it asks for nothing."""
    entry = CATALOGUE.get(finding.kind)
    if finding.kind in LOAD_KINDS or entry is None or finding.recommended_action in HARMLESS:
        return ""
    return f"none yet; if it lasts: {entry.action}" if finding.unproven else entry.action


def changes_in_short(changes: Sequence[HealthChange]) -> str:
    """Return what changed about some nodes, without the evidence, which is in the table."""
    named = []
    for change in changes[:MOST_NAMED]:
        before, after = change.before or "new", change.after
        kinds = ", ".join(dict.fromkeys(one.kind for one in change.new))
        named.append(f"{change.node}: {f'{before} -> {after}' if before != after else after}" + (f" ({kinds})" if kinds else ""))
    more = f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
    return ("; ".join(named) + more) or "no node changed"


# -- burn-ins -------------------------------------------------------------------------------------------------------------


def burn_ins_markdown(outcomes: Mapping[str, BurnInOutcome], skipped: Mapping[str, str], states: Mapping[str, NodeState]) -> str:
    """Return *outcomes* by node, the *skipped* nodes and why, what to do, and every check; *states* are those of all nodes now."""
    found = sorted(outcomes.values(), key=lambda one: _ORDER.index(one.mark))
    lines = [_node(one.node, node_result(one.mark), states[one.node], one.reason) for one in found]
    lines += [_node(node, "not tested", states[node], why) for node, why in skipped.items() if node not in outcomes]
    blocks = ["\n".join(lines)]
    actions = [f"- {plain(action, code=True)}" for one in found if (action := _action(one, states[one.node]))]
    if actions:
        blocks += ["## What to do", "\n".join(actions)]
    for one in found:
        blocks += [f"## Checks of {plain(one.node)}"]
        blocks += ["\n".join(_check(check) for check in sorted(one.checks, key=lambda check: _ORDER.index(check.mark)))]
    return "\n\n".join(blocks) + "\n"


def burn_ins_in_short(outcomes: Mapping[str, BurnInOutcome], skipped: int) -> str:
    """Return a run of burn-ins in one line, with the reasons of the nodes that did not pass."""
    marks = [one.mark for one in outcomes.values()]
    counted = [f"{marks.count(mark)} {node_result(mark)}" for mark in reversed(_ORDER) if mark in marks]
    counts = ", ".join([plural(len(outcomes), "node"), *counted, *([f"{skipped} not tested"] if skipped else [])])
    reasons = [f"{one.node}: {one.reason}" for one in outcomes.values() if one.mark is not CheckMark.PASSED]
    more = [f"and {len(reasons) - MOST_NAMED} more"] if len(reasons) > MOST_NAMED else []
    return "; ".join([counts, *reasons[:MOST_NAMED], *more])


def _action(one: BurnInOutcome, state: NodeState) -> str:
    """Return what a person should do about a node; empty for nothing."""
    if one.mark is CheckMark.SKIPPED and state is NodeState.QUARANTINED:
        return explain_still_isolated(one, str(state))
    if one.mark is not CheckMark.FAILED:
        return ""
    if state in {NodeState.HEALTHY, NodeState.SUSPECT}:
        return f"{one.node} failed and is still in service. `holdfast node cordon {one.node} --reason ...` takes it out."
    return f"{one.node} stays {state}: repair what failed. The next burn-in is due later each time."


def _node(node: str, ended: str, state: NodeState, why: str) -> str:
    return f"- **{plain(node)}**: {ended}, now {state}. Reason: {plain(why, code=True)}"


def _check(one: Check) -> str:
    """Return a check on one line."""
    figures, devices = figures_of(one), ", ".join(one.devices)
    parts = [plain(one.words, code=True), *([plain(figures)] if figures else []), *([f"on {plain(devices)}"] if devices else [])]
    return f"- **{plain(one.name)}**: {one.mark} after {duration(one.seconds)}: {'; '.join(parts)}"
