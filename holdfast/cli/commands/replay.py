"""`holdfast replay`: what another policy would have done."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any, Final

from holdfast.accounting.replay import Difference, PolicyReplay
from holdfast.accounting.replay import replay as ask
from holdfast.cli.job_view import find_job
from holdfast.cli.output import heading, hint, say, say_facts, say_json, say_rows
from holdfast.history.store import History
from holdfast.report.cost_table import hours
from holdfast.report.wording import NOTHING, duration, plural
from policies.case_codec import act_of

WIDTH: Final = 100
MOST: Final = 20
"""Differences that the terminal tells; `--json` has all."""


def replay(policy: str, reference: str | None, since: float | None, *, as_json: bool) -> int:
    """Tell which recorded decisions *policy* would have made otherwise."""
    book = History.open(create=False)
    try:
        found = ask(book, policy, job=None if reference is None else find_job(book, reference), since=since)
    finally:
        book.close()
    if as_json:
        say_json(_record(found))
    elif not found.decisions and not found.straggler_decisions:
        hint("There is no decision to ask about. `holdfast history` lists what the history has.")
    else:
        _tell(found)
    return 0


def _tell(found: PolicyReplay) -> None:
    heading(f"{found.policy}, asked about {plural(found.decisions, 'decision')} in {plural(found.incidents, 'incident')}")
    facts = [("the same", str(found.same)), ("different", str(len(found.differences)))]
    if found.follow:
        facts.append(("not asked", f"{found.follow}: the incident would have gone another way before"))
    facts += [("cannot tell", f"{many}: {why}") for why, many in found.unreadable.items()]
    if found.differences:
        facts.append(("in all", _in_all(found)))
    if found.straggler_decisions:
        facts.append(("slow ranks", f"{found.straggler_decisions} weighed, {len(found.slow)} differently"))
    say_facts(facts)
    _tell_of_slow(found)
    if found.differences:
        say()
        _tell_differences(found)


def _tell_of_slow(found: PolicyReplay) -> None:
    for one in found.slow[:MOST]:
        say()
        heading(f"{one.job}, slow rank {one.rank} on {one.node}")
        _say("decided", f"{one.decided}: {one.decided_reason}")
        _say("would have", f"{one.would}: {one.reason}")


def _tell_differences(found: PolicyReplay) -> None:
    head = ("JOB", "INCIDENT", "FAULT", "DECIDED", "WOULD HAVE", "WON")
    shown = found.differences[:MOST]
    say_rows(head, [[one.job, str(one.incident), one.kind, one.decided, one.would.action, _won(one)] for one in shown])
    for one in shown:
        say()
        heading(f"{one.job}, incident {one.incident}")
        _say("decided", one.decided_reason)
        _say("would have", one.would.reason)
        if one.hours is None:
            _say("won", f"unknown: {one.why_not}")
    if len(found.differences) > MOST:
        say(f"and {plural(len(found.differences) - MOST, 'difference')} more; `--json` has all")
    say()
    for line in textwrap.wrap(_basis(found), WIDTH):
        say(line)


def _say(name: str, text: str) -> None:
    for line in textwrap.wrap(f"{name}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False):
        say(line)


def _in_all(found: PolicyReplay) -> str:
    priced = len(found.differences) - found.unpriced
    if not priced:
        return "what was won or lost is unknown"
    rest = f"; of {plural(found.unpriced, 'difference')} nobody can tell" if found.unpriced else ""
    return f"{_signed(found.saved)} of compute{rest}"


def _won(one: Difference) -> str:
    return NOTHING if one.hours is None else _signed(one.hours)


def _signed(amount: float) -> str:
    return f"{'lost' if amount < 0 else 'won'} {hours(abs(amount))}" if amount else "as much"


def _basis(found: PolicyReplay) -> str:
    """Say what the prices stand on."""
    if not found.costs:
        return "No recovery is on record that needed one decision, so nothing can be priced."
    told = ", ".join(f"{action} {duration(cost.seconds)} (of {cost.n:,})" for action, cost in sorted(found.costs.items()))
    return (
        f"Priced by the median of all recoveries on record that needed one decision, steps computed again included: {told}. "
        "What fewer ranks after a shrink do not compute is not counted."
    )


def _record(found: PolicyReplay) -> dict[str, Any]:
    return {
        "policy": found.policy,
        "incidents": found.incidents,
        "decisions": found.decisions,
        "same": found.same,
        "not_asked": found.follow,
        "cannot_tell": dict(found.unreadable),
        "hours_won": found.saved if found.unpriced < len(found.differences) else None if found.differences else 0.0,
        "unpriced": found.unpriced,
        "actions": {action: {"seconds": cost.seconds, "n": cost.n} for action, cost in found.costs.items()},
        "differences": [_difference(one) for one in found.differences],
        "straggler_decisions": found.straggler_decisions,
        "slow_ranks": [dataclasses.asdict(one) for one in found.slow],
    }


def _difference(one: Difference) -> Mapping[str, Any]:
    return {
        "job": one.job,
        "job_id": one.job_id,
        "incident": one.incident,
        "kind": one.kind,
        "at": one.at,
        "decided": {"action": one.decided, "reason": one.decided_reason, "act": dict(one.decided_act)},
        "would": {"action": one.would.action, "reason": one.would.reason, "rule": one.rule, "act": act_of(one.would)},
        "passed_over": dict(one.passed_over),
        "hours_won": one.hours,
        "why_unknown": one.why_not or None,
    }
