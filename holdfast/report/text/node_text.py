"""Nodes of one cluster as text for the Prefect UI: a health sweep as a table and sentences, burn-ins as Markdown.

Burn-ins are lists, because the Prefect UI does not wrap the cells of a table and cuts it off at the right edge.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.policies.nodes.burn_in import BurnInOutcome, explain_still_isolated, figures_of, node_result
from holdfast.policies.nodes.node_health import HealthAssessment, HealthChange, worst_first
from holdfast.policies.nodes.node_states import NodeState
from holdfast.probe.health import Checkup
from holdfast.report.text.markdown import plain
from holdfast.report.text.wording import duration, plural

CELL: Final = 38
"""Characters of an observation in one row: the UI does not wrap cells."""
LINES: Final = 4
"""Rows that one finding may take; `holdfast node ls` shows all of it."""
MOST_NAMED: Final = 3
"""Changes that a state's message names."""
_ORDER: Final = (CheckMark.FAILED, CheckMark.SKIPPED, CheckMark.PASSED)
"""Nodes and checks that need a person come first."""


# -- a health sweep -------------------------------------------------------------------------------------------------------


def summary(checkup: Checkup) -> str:
    """Return the last sweep in one line: how many nodes, how long it took, and their health."""
    counted = ", ".join(f"{count} {name}" for name, count in checkup.counts().items())
    return f"{plural(len(checkup.assessments), 'node')} in {checkup.seconds:.1f} s: {counted}"


def rows(assessment: HealthAssessment) -> list[dict[str, str]]:
    """Return a node's rows: one per finding, the worst first; text longer than a cell continues in the row below."""
    health = assessment.status
    since = datetime.fromtimestamp(assessment.since, tz=UTC).strftime("%m-%d %H:%M")
    found = [("", assessment.reason)] if assessment.reason else []
    found += [(one.kind, one.quote) for one in worst_first(assessment.findings)]
    made = []
    for kind, quote in found or [("", "")]:
        first, *more = textwrap.wrap(quote, CELL, max_lines=LINES, placeholder=" …") or [""]
        made.append({"node": assessment.node, "health": health, "finding": kind, "seen": first, "since (UTC)": since})
        made += [{"node": "", "health": "", "finding": "", "seen": line, "since (UTC)": ""} for line in more]
    return made


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
