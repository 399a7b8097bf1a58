"""`holdfast node burn-in`: test nodes with real work."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli.arguments import cluster_in, known_nodes, operator
from holdfast.cli.output import COLOURS, echo, echo_json, hint
from holdfast.cluster import names_of
from holdfast.detectors.nodes.burn_in_results import Check, CheckMark
from holdfast.errors import NodeNotChanged, NodesBusy
from holdfast.history.store import History
from holdfast.policies.nodes.burn_in import BurnInOutcome, explain_still_isolated, node_result, seen
from holdfast.policies.nodes.cordons import TESTABLE, Owner
from holdfast.policies.nodes.node_states import NodeState
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.repair import Repair
from holdfast.report.text.wording import duration, visible

MARKS: Final = {CheckMark.PASSED: COLOURS["healthy"], CheckMark.FAILED: COLOURS["unhealthy"], CheckMark.SKIPPED: COLOURS["unknown"]}


def burn_in(nodes: Sequence[str], cluster_file: Path | None, *, short: bool, seconds: float | None, as_json: bool) -> int:
    """Test *nodes*, show each check as it ends and the results last; return 0 when all passed."""
    cluster = cluster_in(cluster_file)
    wanted = list(dict.fromkeys(nodes))
    plan = BurnInPlan.of(cluster.burn_in, seconds=seconds, short=short)
    with closing(History.open()) as history, Repair(cluster, history, Owner(name=operator(), person=True), plan) as repair:
        if not as_json:
            repair.on_check = _ProgressLines(max(len(node) for node in wanted))
        known_nodes(wanted, cluster.name, names_of(cluster))
        if not short:
            _begin(repair, wanted)
        begun = list(repair.trials)
        found = repair.try_out(wanted)
        repair.conclude()
        _show(repair, found, begun, as_json=as_json)
    return int(any(one.mark is not CheckMark.PASSED for one in found.values()))


def _begin(repair: Repair, nodes: Sequence[str]) -> None:
    """Begin burn-ins that may lift cordons; refuse nodes that are in use."""
    jobs, known = repair.jobs(), repair.known()
    busy = {node: jobs[node] for node in nodes if node in jobs}
    if busy:
        reasons = tuple(f"job '{job}' trains on {node}" for node, job in busy.items())
        node, job = next(iter(busy.items()))
        cure = f"Migrate it with `holdfast node migrate {job} --from {node}`, or test the node during training with `--short`"
        raise NodesBusy("no burn-in can run now", reasons, cure)
    testable = [node for node in nodes if known[node].of_kind(*TESTABLE) and known[node].state is not NodeState.DECOMMISSIONED]
    repair.begin(testable)
    for node in testable:
        if node in repair.skipped:
            raise NodeNotChanged(node, repair.cluster.name, repair.skipped[node].rstrip("."))


class _ProgressLines:
    """Writes a line for each check, from any thread."""

    def __init__(self, width: int) -> None:
        self._width, self._lock = width, threading.Lock()

    def __call__(self, node: str, check: Check) -> None:
        mark = click.style(str(check.mark).ljust(7), fg=MARKS[check.mark])
        text = visible(f"{seen(check)}, {duration(check.seconds)}")
        with self._lock:
            click.echo(f"{node.ljust(self._width)}  {check.name.ljust(8)}  {mark}  {text}")


def _show(repair: Repair, found: dict[str, BurnInOutcome], begun: Sequence[str], *, as_json: bool) -> None:
    after = repair.known()
    moves = dict(repair.transitions)
    if as_json:
        rows = [_record(one, str(after[node].state), node in begun) for node, one in found.items()]
        echo_json({"cluster": repair.cluster.name, "short": repair.plan.short, "nodes": rows})
        return
    echo()
    for node, one in found.items():
        moved = f"; {moves[node].before} -> {moves[node].after}" if node in moves else ""
        echo(f"{node}: {one.reason}{moved}" if one.mark is CheckMark.PASSED else f"{node} {node_result(one.mark)}: {one.reason}{moved}")
        state = after[node].state
        if one.mark is CheckMark.FAILED and state in {NodeState.HEALTHY, NodeState.SUSPECT}:
            hint(f'Jobs may still get {node}. `holdfast node cordon {node} --reason "failed a burn-in"` cordons it.')
        if one.mark is CheckMark.SKIPPED and state is NodeState.QUARANTINED:
            hint(explain_still_isolated(one, str(state)))
        if one.mark is CheckMark.PASSED and repair.plan.short and state is NodeState.QUARANTINED:
            hint(f"{node} stays quarantined: a short burn-in does not lift it. Leave out `--short`.")


def _record(one: BurnInOutcome, state: str, counted: bool) -> dict[str, Any]:  # noqa: FBT001 (a field of the record)
    checks = [dataclasses.asdict(check) for check in one.checks]
    outcome = node_result(one.mark)
    return {"node": one.node, "outcome": outcome, "reason": one.reason, "state": state, "for_a_hold": counted, "checks": checks}
