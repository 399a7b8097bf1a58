"""A sweep over the nodes of one cluster as a table, a sentence, and the changes that it found in a few words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from holdfast.probe.health import Checkup
from holdfast.report.wording import plural
from policies.node_health import HealthAssessment, HealthChange, worst_first

HEALTH: Final = {"ok": "healthy", "unhealthy": "unhealthy"}
"""The words of the table for standings that the history calls otherwise."""
CELL: Final = 38
"""Characters of what was seen in one row: the UI wraps no cell, and cuts a table at its right edge."""
LINES: Final = 4
"""Rows that one finding may take; `holdfast nodes` has all of it."""
MOST_NAMED: Final = 3
"""Changes that a state's message tells."""


def summary(checkup: Checkup) -> str:
    """Return the last sweep in a sentence: how many nodes, how long it took, and how they are."""
    counted = ", ".join(f"{count} {HEALTH.get(name, name)}" for name, count in checkup.counts().items())
    return f"{plural(len(checkup.assessments), 'node')} in {checkup.seconds:.1f} s: {counted}"


def rows(verdict: HealthAssessment) -> list[dict[str, str]]:
    """Return a node's rows: one a finding, the worst first; what is longer than a cell goes on in the row below."""
    told = {"node": verdict.node, "health": HEALTH.get(verdict.status, verdict.status)}
    since = datetime.fromtimestamp(verdict.since, tz=UTC).strftime("%m-%d %H:%M")
    found = [("", verdict.reason)] if verdict.reason else []
    found += [(one.kind, one.quote) for one in worst_first(verdict.findings)]
    made = []
    for kind, quote in found or [("", "")]:
        first, *more = textwrap.wrap(quote, CELL, max_lines=LINES, placeholder=" …") or [""]
        made.append({**told, "finding": kind, "seen": first, "since (UTC)": since})
        made += [{"node": "", "health": "", "finding": "", "seen": line, "since (UTC)": ""} for line in more]
    return made


def _in_short(change: HealthChange) -> str:
    """Say what changed about a node without the evidence, which stands in the table."""
    before, after = (HEALTH.get(name, name) for name in (change.before or "new", change.after))
    kinds = ", ".join(dict.fromkeys(one.kind for one in change.new))
    return f"{change.node}: {f'{before} -> {after}' if before != after else after}" + (f" ({kinds})" if kinds else "")


def changes_in_short(changes: Sequence[HealthChange]) -> str:
    """Say what changed about some nodes."""
    more = f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
    return ("; ".join(map(_in_short, changes[:MOST_NAMED])) + more) or "no node changed"
