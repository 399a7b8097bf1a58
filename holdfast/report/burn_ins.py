"""Burn-ins of one cluster as Markdown: what came of each node and why, what to do, and every check in a row of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from detectors.trials import Check, Mark
from holdfast.report.wording import duration, plural, visible
from policies.burn_in import Outcome, figures_of, in_a_word, stays_out
from policies.node_states import NodeState

_SPECIAL: Final = re.compile(r"[\\*\[\]|~]|(?<!\w)_|_(?!\w)")
"""What Markdown would read as more than itself; commands in backquotes stay."""
_HTML: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_ORDER: Final = (Mark.FAILED, Mark.SKIPPED, Mark.PASSED)
"""Nodes and checks that need a person come first."""


def burn_ins_markdown(outcomes: Mapping[str, Outcome], left: Mapping[str, str], states: Mapping[str, NodeState]) -> str:
    """Return *outcomes* by node, the nodes that were *left* out and why, and the *states* of all of them now."""
    found = sorted(outcomes.values(), key=lambda one: _ORDER.index(one.mark))
    rows = [(one.node, in_a_word(one.mark), str(states[one.node]), one.because) for one in found]
    rows += [(node, "not tested", str(states[node]), why) for node, why in left.items() if node not in outcomes]
    blocks = [_table(("Node", "Burn-in", "State now", "Why"), rows)]
    to_do = [f"- {_plain(words)}" for one in found if (words := _to_do(one, states[one.node]))]
    if to_do:
        blocks += ["## What to do", "\n".join(to_do)]
    for one in found:
        blocks += [f"## Checks of {_plain(one.node)}", _checks(one.checks)]
    return "\n\n".join(blocks) + "\n"


def in_a_sentence(outcomes: Mapping[str, Outcome], left: int) -> str:
    """Return a run in a sentence, with the nodes that stay out first."""
    marks = [one.mark for one in outcomes.values()]
    counted = [f"{marks.count(mark)} {in_a_word(mark)}" for mark in reversed(_ORDER) if mark in marks]
    words = ", ".join([plural(len(outcomes), "node"), *counted, *([f"{left} not tested"] if left else [])])
    reasons = [f"{one.node}: {one.because}" for one in outcomes.values() if one.mark is not Mark.PASSED]
    return "; ".join([words, *reasons[:3], *([f"and {len(reasons) - 3} more"] if len(reasons) > 3 else [])])  # noqa: PLR2004 (three fit a line)


def _to_do(one: Outcome, state: NodeState) -> str:
    if one.mark is Mark.SKIPPED and state is NodeState.QUARANTINED:
        return stays_out(one, str(state))
    if one.mark is not Mark.FAILED:
        return ""
    if state in {NodeState.HEALTHY, NodeState.SUSPECT}:
        return f"{one.node} failed and is still in service. `holdfast nodes hold {one.node} --because ...` takes it out."
    return f"{one.node} stays {state}: repair what failed. The next burn-in is due later each time."


def _checks(checks: Sequence[Check]) -> str:
    ordered = sorted(checks, key=lambda check: _ORDER.index(check.mark))
    rows = [
        (check.name, str(check.mark), check.words, figures_of(check) or "-", ", ".join(check.devices) or "-", duration(check.seconds))
        for check in ordered
    ]
    return _table(("Check", "Result", "What was seen", "Measured", "Device", "Took"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_lines(head, rows))


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)):
        yield f"| {' | '.join(row)} |"


def _plain(text: str) -> str:
    """Return *text* on one line so that Markdown and HTML show it as it is."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(visible(text).split())).translate(_HTML)
