"""`holdfast policy`: show a policy, check policy files, and explain decisions."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from holdfast.cli.commands.watch.incidents import find_incident
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, echo, echo_facts, echo_json, heading, hint, section
from holdfast.detectors.all_kinds import CATALOGUE
from holdfast.errors import UnknownPolicy
from holdfast.history import queries
from holdfast.history.models import DecisionRecord, Incident, Job, JobTransition
from holdfast.history.store import History
from holdfast.plurals import plural
from holdfast.policies.recovery.policy import BASE, NAMED, Policy
from holdfast.report.text.incident_text import rule_text
from holdfast.report.text.policy_text import changes, describe, describe_slowness, number, values
from holdfast.report.text.wording import duration, on_target, seat
from holdfast.spec.job import is_policy_file
from holdfast.spec.policy import load_policy, policy_of, review_policy

MARK: Final = "*"
"""Precedes what differs from the policy that a file is based on."""
SLOW: Final = "slow"
"""Replaces an incident, for decisions about slow ranks."""
FAILED: Final = frozenset({"faulted", "failed"})
"""Events that end an attempt without success."""
ENDS: Final = {"failed": "the job failed", "stopped": "the job was stopped meanwhile"}


def show(policy: str | None, *, as_json: bool) -> int:
    """Show what a policy does."""
    found = find_policy(policy or BASE)
    if as_json:
        echo_json(record(found))
        return 0
    _show_rules(found)
    if policy is None:
        others = ", ".join(name for name in NAMED if name != BASE)
        hint(f"The policy of a job that names none. Others: {others}, or a file of your own.")
    return 0


def _show_rules(policy: Policy) -> None:
    base = NAMED[policy.based_on]
    heading(f"{policy.name}, based on {base.name}" if policy.name != base.name else policy.name)
    echo("Rules, in order; the first one that applies decides:")
    usual = {describe(rule, base) for rule in base.rules}
    for place, rule in enumerate(policy.rules, 1):
        text = describe(rule, policy)
        echo(f"{' ' if text in usual else MARK}{place:>3}  {type(rule).__name__}: {text}")
    if policy.recommended_actions:
        section("Recommended actions that differ from the catalogue")
        echo_facts(
            [
                (f"{MARK} {kind}", f"{action} (was: {CATALOGUE[kind].recommended_action})")
                for kind, action in sorted(policy.recommended_actions.items())
            ]
        )
    echo()
    echo(f"Slow ranks (`checks.straggler`): {describe_slowness(policy.stragglers)}")
    section("Numbers")
    before = dict(values(base))
    echo_facts([(f"{' ' if before[name] == value else MARK} {name}", number(name, value)) for name, value in values(policy)])
    differences = changes(base, policy)
    if differences:
        section(f"Differs from {base.name} ({MARK})")
        for one in differences:
            echo(f"  {one}")


def find_policy(reference: str) -> Policy:
    """Return the policy of that name, or in that file; raise `UnknownPolicy` or `BadFile`."""
    if reference in NAMED:
        return NAMED[reference]
    if not is_policy_file(reference) and not Path(reference).exists():
        raise UnknownPolicy(reference, tuple(difflib.get_close_matches(reference, NAMED, n=1)), tuple(NAMED))
    return load_policy(reference)


def record(policy: Policy) -> dict[str, Any]:
    """Return a policy for programs; times in seconds."""
    base = NAMED[policy.based_on]
    usual = {describe(rule, base) for rule in base.rules}
    rules = [{"rule": repr(rule), "words": (words := describe(rule, policy)), "differs": words not in usual} for rule in policy.rules]
    return {
        "name": policy.name,
        "based_on": policy.based_on,
        "rules": rules,
        "actions": [str(action) for action in policy.order],
        "recommended_actions": {
            kind: {"recommended_action": recommended_action, "catalogue": CATALOGUE[kind].recommended_action}
            for kind, recommended_action in policy.recommended_actions.items()
        },
        "numbers": dict(values(policy)),
        "differs": changes(base, policy),
    }


def check(files: Sequence[Path], *, as_json: bool) -> int:
    """Show of each file whether it is a valid policy, and all its problems; return 2 when one is not."""
    records: list[dict[str, Any]] = []
    for path in files:
        file, problems = review_policy(path)
        differences = [] if problems or file is None else changes(NAMED[file.based_on], policy_of(file, name=str(path)))
        ok = not problems
        records.append({"file": str(path), "ok": ok, "problems": [dataclasses.asdict(one) for one in problems], "differs": differences})
        if as_json:
            continue
        if problems:
            echo(f"{path}: {plural(len(problems), 'problem')}")
            for problem in problems:
                echo(f"  {problem}")
        else:
            assert file is not None
            echo(f"{path}: valid. Based on {file.based_on}, {plural(len(differences), 'difference')}.")
    if as_json:
        echo_json(records)
    return 0 if all(one["ok"] for one in records) else 2


def explain(incident: str, job: str | None, *, as_json: bool) -> int:
    """Show how each decision about an incident was made, or those about slow ranks."""
    if incident == SLOW:
        return _explain_slow(job, as_json=as_json)
    with closing(History.open(create=False)) as history:
        one = find_incident(history, incident, job)
        with history.session() as session:
            owner = session.get(Job, one.job_id)
        found = list(attempts(one, queries.decisions(history, incident_id=one.id), queries.transitions(history, one.job_id)))
    name = owner.name if owner else one.job_id
    if as_json:
        echo_json({"job": name, "incident": one.number, "kind": one.kind, "target": one.target, "outcome": one.outcome, "attempts": found})
        return 0
    heading(f"{name}, incident {one.number}: {one.kind} on {on_target(one.target)}, {one.outcome or 'open'}")
    if not found:
        hint("No decision was made about it: " + ("it passed by itself." if one.outcome == "passed" else "see `holdfast incidents show`."))
    for attempt in found:
        section(f"{clock(attempt['at'])}  {attempt['action']}")
        facts = [
            ("reason", attempt["reason"]),
            ("rule", rule_text(attempt["rule"])),
            ("end", attempt["ended"]),
            ("policy", attempt["policy"]),
            ("seats", "\n".join(seat(each) for each in attempt["seats"])),
            ("noted", "\n".join(f"{rule_text(rule)}: {why}" for rule, why in attempt["noted"].items())),
            ("skipped", "\n".join(f"{rule_text(rule)}: {why}" for rule, why in attempt["passed_over"].items())),
        ]
        echo_facts([(name, text) for name, text in facts if text])
    return 0


def _explain_slow(job: str | None, *, as_json: bool) -> int:
    """Show what was decided about slow ranks, with the costs."""
    with closing(History.open(create=False)) as history:
        owner = find_job(history, job) if job is not None else next(iter(queries.jobs(history, limit=1)), None)
        found = queries.straggler_decisions(history, owner.id) if owner is not None else []
    name = owner.name if owner is not None else None
    if as_json:
        echo_json({"job": name, "slow_ranks": [one.model_dump(exclude={"id", "job_id"}) for one in found]})
    elif not found:
        hint(f"No rank of job '{name}' was found to slow the others down." if name else "There is no job yet.")
    else:
        heading(f"{name}, ranks that slowed the others down")
        for one in found:
            echo(f"{clock(one.at)}  {one.act} ({one.kind}, policy {one.policy}): {one.reason}")
    return 0


def attempts(one: Incident, decisions: Sequence[DecisionRecord], moves: Sequence[JobTransition]) -> Iterator[dict[str, Any]]:
    """Yield each attempt to recover from an incident: the decision, by which rule of which policy, and how it ended."""
    for place, decision in enumerate(decisions):
        later = decisions[place + 1] if place + 1 < len(decisions) else None
        act = decision.act or {}
        yield {
            "at": decision.at,
            "action": decision.action,
            "rule": decision.rule,
            "reason": decision.reason,
            "policy": act.get("policy"),
            "noted": act.get("noted") or {},
            "passed_over": decision.passed_over,
            "seats": act.get("seats") or [],
            "ended": _end(one, decision, later, moves),
        }


def _end(one: Incident, decision: DecisionRecord, later: DecisionRecord | None, moves: Sequence[JobTransition]) -> str:
    if later is None:
        if one.outcome is None:
            return "in progress"
        if one.outcome == "recovered":
            return f"recovered, {duration(one.downtime_s)} after the fault"
        return ENDS.get(one.outcome, one.outcome)
    failed = next((move.reason for move in moves if decision.at <= move.at <= later.at and move.event in FAILED), "")
    return f"failed after {duration(max(0.0, later.at - decision.at))}" + (f": {failed}" if failed else "")
