"""`holdfast node approve`: list the approvals that programs request before they isolate nodes, and answer them."""

from __future__ import annotations

import time
from contextlib import closing

import click

from holdfast.cli.arguments import operator
from holdfast.cli.output import clock, echo, echo_json, heading, hint
from holdfast.history import approvals
from holdfast.history.approvals import ISOLATE, KEEP, ApprovalAnswer
from holdfast.history.store import History


def approve(number: int | None, *, deny: bool, nodes: tuple[str, ...], reason: str, as_json: bool) -> int:
    """Answer the approval *number*, or list the pending ones."""
    if number is None:
        if deny or nodes:
            raise click.UsageError("Name the approval to answer; `holdfast node approve` lists them.")
        return _list_pending(as_json=as_json)
    if deny and nodes:
        raise click.UsageError("--deny keeps all nodes in service: leave out --node, or --deny.")
    given = ApprovalAnswer(answer=KEEP if deny else ISOLATE, picked=nodes, by=operator(), comment=reason)
    with closing(History.open()) as history:
        done = approvals.answer(history, number, given, now=time.time())
    if as_json:
        echo_json(approvals.facts(done))
    else:
        echo(f"approval {done.number} of job {done.job} is answered: {approvals.describe(done)}")
    return 0


def _list_pending(*, as_json: bool) -> int:
    with closing(History.open()) as history:
        found = approvals.pending_approvals(history)
    if as_json:
        echo_json([approvals.facts(one) for one in found])
        return 0
    for one in found:
        heading(f"Approval {one.number}, job {one.job}, cluster {one.cluster}, requested {clock(one.at)}")
        echo(one.reason)
        for node, facts in one.nodes.items():
            echo(f"  {node}: {facts['reason']}")
        default = {KEEP: "they stay in service", ISOLATE: "they are isolated"}[one.otherwise]
        echo(f"Without an answer by {clock(one.until)}, {default}.")
        echo()
    if not found:
        echo("No approval is pending.")
    else:
        hint(
            f"`holdfast node approve {found[0].number}` isolates them, `--deny` keeps them in service, `--node` isolates only those named."
        )
    return 0
