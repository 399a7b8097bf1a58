"""`holdfast policy`: what a policy does, whether a file is one, and how it came to a decision."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from detectors.all_kinds import CATALOGUE
from holdfast.cli.commands.history import found_incident
from holdfast.cli.job_view import find_job
from holdfast.cli.output import clock, heading, hint, say, say_facts, say_json
from holdfast.errors import UnknownPolicy
from holdfast.history import queries
from holdfast.history.models import DecisionRecord, Incident, Job, JobTransition
from holdfast.history.store import History
from holdfast.report.policy_text import changes, describe, describe_slowness, number, values
from holdfast.report.wording import duration, plural, seat
from holdfast.spec.job import is_policy_file
from holdfast.spec.load_policy import load_policy, policy_of, review_policy
from policies.policy import BASE, NAMED, Policy

MARK: Final = "*"
"""Stands before what differs from the policy that a file is based on."""
SLOW: Final = "slow"
"""Stands in place of an incident for what was decided about slow ranks."""
FAILED: Final = frozenset({"faulted", "gave-up"})
"""Events that end an attempt without success."""


def show(reference: str | None, *, as_json: bool) -> int:
    """Say what a policy does."""
    policy = named(reference or BASE)
    base = NAMED[policy.based_on]
    if as_json:
        say_json(record(policy))
        return 0
    heading(f"{policy.name}, based on {base.name}" if policy.name != base.name else policy.name)
    say("Rules, in their order; the first that has an answer decides:")
    usual = {describe(rule, base) for rule in base.rules}
    for place, rule in enumerate(policy.rules, 1):
        words = describe(rule, policy)
        say(f"{' ' if words in usual else MARK}{place:>3}  {type(rule).__name__}: {words}")
    _recommended_actions(policy)
    say()
    say(f"Slow ranks (`checks.straggler`): {describe_slowness(policy.slowness)}")
    say()
    heading("Numbers")
    before = dict(values(base))
    said = [(f"{' ' if before[name] == value else MARK} {name}", number(name, value)) for name, value in values(policy)]
    say_facts(said)
    differences = changes(base, policy)
    if differences:
        say()
        heading(f"Differs from {base.name} ({MARK})")
        for one in differences:
            say(f"  {one}")
    elif reference is None:
        hint(f"What a job follows that names none. Others: {', '.join(name for name in NAMED if name != BASE)}, or a file of your own.")
    return 0


def named(reference: str) -> Policy:
    """Return the policy of that name, or in that file; raise `UnknownPolicy` or `BadFile`."""
    if reference in NAMED:
        return NAMED[reference]
    if not is_policy_file(reference) and not Path(reference).exists():
        raise UnknownPolicy(reference, tuple(difflib.get_close_matches(reference, NAMED, n=1)), tuple(NAMED))
    return load_policy(reference)


def _recommended_actions(policy: Policy) -> None:
    if policy.recommended_actions:
        say()
        heading("Recommended actions that differ from the catalogue")
        said = [
            (f"{MARK} {kind}", f"{recommended_action} (was: {CATALOGUE[kind].recommended_action})")
            for kind, recommended_action in sorted(policy.recommended_actions.items())
        ]
        say_facts(said)


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
    """Say of each file whether it is a policy, and all that is wrong with it."""
    told, bad = [], 0
    for path in files:
        file, problems = review_policy(path)
        bad += bool(problems)
        differences = [] if problems or file is None else changes(NAMED[file.based_on], policy_of(file, name=str(path)))
        told.append({
            "file": str(path),
            "ok": not problems,
            "problems": [dataclasses.asdict(problem) for problem in problems],
            "differs": differences,
        })  # fmt: skip
        if as_json:
            continue
        if problems:
            say(f"{path}: {plural(len(problems), 'problem')}")
            for problem in problems:
                say(f"  {problem}")
        else:
            assert file is not None
            say(f"{path}: fine. Based on {file.based_on}, {plural(len(differences), 'difference')}.")
    if as_json:
        say_json(told)
    return 2 if bad else 0


def explain_slow(job: str | None, *, as_json: bool) -> int:
    """Say what was decided about slow ranks, with the sums."""
    book = History.open(create=False)
    try:
        owner = find_job(book, job) if job is not None else next(iter(queries.jobs(book, limit=1)), None)
        told = queries.straggler_decisions(book, owner.id) if owner is not None else []
    finally:
        book.close()
    name = owner.name if owner is not None else None
    if as_json:
        say_json({"job": name, "slow_ranks": [one.model_dump(exclude={"id", "job_id"}) for one in told]})
        return 0
    if not told:
        hint(f"No rank of job '{name}' was found to hold the others up." if name else "There is no job yet.")
        return 0
    heading(f"{name}, ranks that held the others up")
    for one in told:
        say(f"{clock(one.at)}  {one.act} ({one.kind}, policy {one.policy}): {one.reason}")
    return 0


def explain(reference: str, job: str | None, *, as_json: bool) -> int:
    """Say how each decision about an incident came about, or those about slow ranks."""
    if reference == SLOW:
        return explain_slow(job, as_json=as_json)
    book = History.open(create=False)
    try:
        one = found_incident(book, reference, job)
        with book.session() as session:
            owner = session.get(Job, one.job_id)
        told = list(attempts(one, queries.decisions(book, incident_id=one.id), queries.transitions(book, one.job_id)))
    finally:
        book.close()
    name = owner.name if owner else one.job_id
    if as_json:
        say_json({"job": name, "incident": one.number, "kind": one.kind, "subject": one.subject, "outcome": one.outcome, "attempts": told})
        return 0
    heading(f"{name}, incident {one.number}: {one.kind} on {one.subject}, {one.outcome or 'open'}")
    if not told:
        hint("Nothing was decided about it: " + ("it passed by itself." if one.outcome == "passed" else "see `holdfast show`."))
    for attempt in told:
        _attempt(attempt)
    return 0


def attempts(one: Incident, decisions: Sequence[DecisionRecord], moves: Sequence[JobTransition]) -> Iterator[dict[str, Any]]:
    """Yield each attempt to answer an incident: the decision, by which rule of which policy, and how it ended."""
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
            return "under way"
        if one.outcome == "recovered":
            return f"recovered, {duration(one.downtime_s)} after the fault"
        return {"gave-up": "the job was given up", "stopped": "the job was stopped meanwhile"}.get(one.outcome, one.outcome)
    failed = next((move.reason for move in moves if decision.at <= move.at <= later.at and move.event in FAILED), "")
    return f"failed after {duration(max(0.0, later.at - decision.at))}" + (f": {failed}" if failed else "")


def _attempt(one: dict[str, Any]) -> None:
    say()
    heading(f"{clock(one['at'])}  {one['action']}")
    facts = [("reason", one["reason"]), ("rule", one["rule"]), ("end", one["ended"])]
    facts += [("policy", one["policy"])] if one["policy"] else []
    facts += [("seats", "\n".join(seat(each) for each in one["seats"]))] if one["seats"] else []
    facts += [("noted", "\n".join(f"{rule}: {why}" for rule, why in one["noted"].items()))] if one["noted"] else []
    facts += [("passed over", "\n".join(f"{rule}: {why}" for rule, why in one["passed_over"].items()))] if one["passed_over"] else []
    say_facts(facts)
