"""Burn-ins of one cluster as Markdown: what came of each node and why, what to do, and every check on a line of its own.

Lists, and no tables: the Prefect UI does not wrap the cells of a table and cuts it off at the right edge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from detectors.burn_in_results import Check, CheckMark
from holdfast.report.wording import duration, plural, visible
from policies.burn_in import BurnInOutcome, explain_still_isolated, figures_of, node_result
from policies.node_states import NodeState

_SPECIAL: Final = re.compile(r"[\\*\[\]|~]|(?<!\w)_|_(?!\w)")
"""What Markdown would read as more than itself; commands in backquotes stay."""
_HTML: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_ORDER: Final = (CheckMark.FAILED, CheckMark.SKIPPED, CheckMark.PASSED)
"""Nodes and checks that need a person come first."""


def burn_ins_markdown(outcomes: Mapping[str, BurnInOutcome], left: Mapping[str, str], states: Mapping[str, NodeState]) -> str:
    """Return *outcomes* by node, the nodes that were *left* out and why, and the *states* of all of them now."""
    found = sorted(outcomes.values(), key=lambda one: _ORDER.index(one.mark))
    lines = [_node(one.node, node_result(one.mark), states[one.node], one.reason) for one in found]
    lines += [_node(node, "not tested", states[node], why) for node, why in left.items() if node not in outcomes]
    blocks = ["\n".join(lines)]
    to_do = [f"- {_plain(words)}" for one in found if (words := _to_do(one, states[one.node]))]
    if to_do:
        blocks += ["## What to do", "\n".join(to_do)]
    for one in found:
        blocks += [f"## Checks of {_plain(one.node)}", _checks(one.checks)]
    return "\n\n".join(blocks) + "\n"


def in_a_sentence(outcomes: Mapping[str, BurnInOutcome], left: int) -> str:
    """Return a run in a sentence, with the nodes that stay out first."""
    marks = [one.mark for one in outcomes.values()]
    counted = [f"{marks.count(mark)} {node_result(mark)}" for mark in reversed(_ORDER) if mark in marks]
    words = ", ".join([plural(len(outcomes), "node"), *counted, *([f"{left} not tested"] if left else [])])
    reasons = [f"{one.node}: {one.reason}" for one in outcomes.values() if one.mark is not CheckMark.PASSED]
    return "; ".join([words, *reasons[:3], *([f"and {len(reasons) - 3} more"] if len(reasons) > 3 else [])])  # noqa: PLR2004 (three fit a line)


def _to_do(one: BurnInOutcome, state: NodeState) -> str:
    if one.mark is CheckMark.SKIPPED and state is NodeState.QUARANTINED:
        return explain_still_isolated(one, str(state))
    if one.mark is not CheckMark.FAILED:
        return ""
    if state in {NodeState.HEALTHY, NodeState.SUSPECT}:
        return f"{one.node} failed and is still in service. `holdfast nodes hold {one.node} --reason ...` takes it out."
    return f"{one.node} stays {state}: repair what failed. The next burn-in is due later each time."


def _node(node: str, ended: str, state: NodeState, why: str) -> str:
    return f"- **{_plain(node)}**: {ended}, now {state}. Reason: {_plain(why)}"


def _checks(checks: Sequence[Check]) -> str:
    return "\n".join(_check(one) for one in sorted(checks, key=lambda check: _ORDER.index(check.mark)))


def _check(one: Check) -> str:
    """Return a check on one line."""
    figures, devices = figures_of(one), ", ".join(one.devices)
    said = [_plain(one.words), *([_plain(figures)] if figures else []), *([f"on {_plain(devices)}"] if devices else [])]
    return f"- **{_plain(one.name)}**: {one.mark} after {duration(one.seconds)}: {'; '.join(said)}"


def _plain(text: str) -> str:
    """Return *text* on one line so that Markdown and HTML show it as it is."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(visible(text).split())).translate(_HTML)
