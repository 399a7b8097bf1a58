"""`holdfast policy replay`: what another policy would have decided."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any, Final

from holdfast.accounting.replay import Difference, PolicyReplay
from holdfast.accounting.replay import replay as replayed
from holdfast.cli.job_view import find_job
from holdfast.cli.output import echo, echo_facts, echo_json, echo_table, echo_wrapped, heading, hint, section
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.policies.recovery.case_codec import act_of
from holdfast.report.cost_table import hours
from holdfast.report.text.wording import NOTHING, duration

WIDTH: Final = 100
MAX_DIFFERENCES: Final = 20
"""Differences that are shown; `--json` has all."""
HEAD: Final = ("JOB", "INCIDENT", "FAULT", "DECIDED", "WOULD HAVE", "SAVED")


def replay(policy: str, job: str | None, since: float | None, *, as_json: bool) -> int:
    """Show which recorded decisions *policy* would have made differently."""
    with closing(History.open(create=False)) as history:
        found = replayed(history, policy, job=None if job is None else find_job(history, job), since=since)
    if as_json:
        echo_json(_record(found))
    elif not found.decisions and not found.straggler_decisions:
        hint("There is no decision to replay. `holdfast ps -a` lists the jobs of the history.")
    else:
        _show(found)
    return 0


def _show(found: PolicyReplay) -> None:
    heading(f"{found.policy}, replayed on {plural(found.decisions, 'decision')} in {plural(found.incidents, 'incident')}")
    facts = [("the same", str(found.same)), ("different", str(len(found.differences)))]
    if found.follow:
        facts.append(("not replayed", f"{found.follow}: the incident would have taken another course before"))
    facts += [("unknown", f"{many}: {why}") for why, many in found.unreadable.items()]
    if found.differences:
        priced = len(found.differences) - found.unpriced
        rest = f"; unknown for {plural(found.unpriced, 'difference')}" if found.unpriced else ""
        facts.append(("in all", f"{_signed(found.saved)} of compute{rest}" if priced else "the difference in compute is unknown"))
    if found.straggler_decisions:
        facts.append(("slow ranks", f"{found.straggler_decisions} decided, {len(found.slow)} differently"))
    echo_facts(facts)
    for slow in found.slow[:MAX_DIFFERENCES]:
        section(f"{slow.job}, slow rank {slow.rank} on {slow.node}")
        _detail("decided", f"{slow.decided}: {slow.decided_reason}")
        _detail("would have", f"{slow.would}: {slow.reason}")
    if found.differences:
        echo()
        _show_differences(found)


def _show_differences(found: PolicyReplay) -> None:
    shown = found.differences[:MAX_DIFFERENCES]
    rows = [
        [one.job, str(one.incident), one.kind, one.decided, one.would.action, NOTHING if one.hours is None else _signed(one.hours)]
        for one in shown
    ]
    echo_table(HEAD, rows)
    for one in shown:
        section(f"{one.job}, incident {one.incident}")
        _detail("decided", one.decided_reason)
        _detail("would have", one.would.reason)
        if one.hours is None:
            _detail("saved", f"unknown: {one.why_not}")
    if len(found.differences) > MAX_DIFFERENCES:
        echo(f"and {plural(len(found.differences) - MAX_DIFFERENCES, 'difference')} more; `--json` has all")
    echo()
    if not found.costs:
        echo("No recovery on record needed a single decision, so nothing can be priced.")
        return
    prices = ", ".join(f"{action} {duration(cost.seconds)} (of {cost.n:,})" for action, cost in sorted(found.costs.items()))
    echo_wrapped(
        f"Priced with the median of all recoveries on record that needed a single decision, recomputed steps included: {prices}. "
        "The capacity lost after a shrink is not counted.",
        width=WIDTH,
    )


def _detail(name: str, text: str) -> None:
    echo_wrapped(f"{name}: {text}", "  ", hanging="  ", width=WIDTH)


def _signed(amount: float) -> str:
    return f"{'lost' if amount < 0 else 'saved'} {hours(abs(amount))}" if amount else "equal"


def _record(found: PolicyReplay) -> dict[str, Any]:
    return {
        "policy": found.policy,
        "incidents": found.incidents,
        "decisions": found.decisions,
        "same": found.same,
        "not_replayed": found.follow,
        "unreadable": dict(found.unreadable),
        "hours_saved": found.saved if found.unpriced < len(found.differences) else None if found.differences else 0.0,
        "unpriced": found.unpriced,
        "actions": {action: {"seconds": cost.seconds, "n": cost.n} for action, cost in found.costs.items()},
        "differences": [_difference(one) for one in found.differences],
        "straggler_decisions": found.straggler_decisions,
        "slow_ranks": [dataclasses.asdict(one) for one in found.slow],
    }


def _difference(one: Difference) -> dict[str, Any]:
    return {
        "job": one.job,
        "job_id": one.job_id,
        "incident": one.incident,
        "kind": one.kind,
        "at": one.at,
        "decided": {"action": one.decided, "reason": one.decided_reason, "act": dict(one.decided_act)},
        "would": {"action": one.would.action, "reason": one.would.reason, "rule": one.rule, "act": act_of(one.would)},
        "passed_over": dict(one.passed_over),
        "hours_saved": one.hours,
        "why_unknown": one.why_not or None,
    }
