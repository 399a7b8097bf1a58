"""`holdfast approve`: what programs ask before they isolate nodes, and a person's answer."""

from __future__ import annotations

import time

from holdfast.cli.actor import signature
from holdfast.cli.output import clock, heading, hint, say, say_json
from holdfast.history import approvals
from holdfast.history.approvals import ISOLATE, KEEP, ApprovalAnswer
from holdfast.history.models import ApprovalRequest
from holdfast.history.store import History


def open_questions(*, as_json: bool) -> int:
    """List what is asked."""
    history = History.open()
    try:
        found = approvals.pending_approvals(history)
    finally:
        history.close()
    if as_json:
        say_json([approvals.facts(one) for one in found])
        return 0
    for one in found:
        _tell(one)
    if not found:
        say("Nothing is asked.")
    else:
        hint(f"`holdfast approve {found[0].number}` isolates them, with `--refuse` they stay, with `--node` only those named go.")
    return 0


def answer(number: int, *, refuse: bool, nodes: tuple[str, ...], reason: str, as_json: bool) -> int:
    """Answer one question; raise an `OperatorError` where it is answered already, or none."""
    said = ApprovalAnswer(answer=KEEP if refuse else ISOLATE, picked=nodes, by=signature(), comment=reason)
    history = History.open()
    try:
        done = approvals.answer(history, number, said, now=time.time())
    finally:
        history.close()
    if as_json:
        say_json(approvals.facts(done))
    else:
        say(f"question {done.number} of job {done.job} is answered: {approvals.describe(done)}")
    return 0


def _tell(one: ApprovalRequest) -> None:
    heading(f"Question {one.number}, job {one.job}, cluster {one.cluster}, since {clock(one.at)}")
    say(one.reason)
    for node, told in one.nodes.items():
        say(f"  {node}: {told['reason']}")
    what = {KEEP: "they stay in service", ISOLATE: "they are isolated"}[one.otherwise]
    say(f"If nobody answers by {clock(one.until)}, {what}.")
    say()
