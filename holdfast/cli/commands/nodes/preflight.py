"""`holdfast node preflight`: what hosts need before a job can run on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.cli.arguments import known_nodes
from holdfast.cli.commands.nodes.bootstrap import over_ssh, progress, ssh_cluster
from holdfast.cli.output import echo, echo_json, echo_table
from holdfast.errors import BadFile
from holdfast.exit_codes import FAILED, WARNINGS
from holdfast.plurals import plural
from holdfast.probe.readiness import Inspection, InspectionScope, ReadinessFinding, ReadinessState
from holdfast.probe.readiness.judge import judge
from holdfast.spec import load_job
from holdfast.spec.check import checks
from holdfast.spec.files.problems import shown

HEAD: Final = ("NODE", "CHECK", "STATE", "FOUND, AND WHAT TO DO")


def preflight(
    nodes: Sequence[str], cluster_file: Path | None, job_file: Path | None, *, default_cluster: Path | None, as_json: bool
) -> int:
    """Show for each host what a job lacks there, and the cure; return 1 when something is missing, 3 when something should be fixed."""
    job, own = load_job(job_file) if job_file is not None else (None, None)
    cluster = over_ssh(own) if own is not None and cluster_file is None else ssh_cluster(cluster_file or default_cluster)
    if job is not None and job_file is not None and (problems := checks(job, cluster)):
        raise BadFile(shown(str(job_file)), tuple(problems))
    nodes = known_nodes(nodes, cluster.name, cluster.names)
    wanted = InspectionScope.of(job) if job is not None else InspectionScope()
    with progress(nodes, quiet=as_json) as on_stage, Inspection(cluster, wanted, on_stage) as inspection:
        facts = inspection.look(nodes)
    found = judge(facts, gpus=cluster.gpus_of, snapshots=wanted.snapshots)
    order = list(ReadinessState)
    by_node = {node: [one for one in found if one.node == node] for node in nodes}
    worst = {node: max((one.state for one in ours), key=order.index, default=ReadinessState.UNKNOWN) for node, ours in by_node.items()}
    if as_json:
        rows = [
            {
                "node": node,
                "ready": worst[node] is not ReadinessState.MISSING,
                "checks": [{name: value for name, value in dataclasses.asdict(one).items() if name != "node"} for one in ours],
            }
            for node, ours in by_node.items()
        ]
        echo_json({"cluster": cluster.name, "nodes": rows})
    else:
        echo_table(HEAD, [row for node, ours in by_node.items() for row in _rows(node, ours)], coloured=2, last="wrapped")
        ready = sum(state is not ReadinessState.MISSING for state in worst.values())
        echo(f"\n{ready} of {plural(len(nodes), 'host')} are ready for jobs.")
    states = set(worst.values())
    return FAILED if ReadinessState.MISSING in states else 0 if states <= {ReadinessState.OK} else WARNINGS


def _rows(node: str, found: Sequence[ReadinessFinding]) -> list[tuple[str, str, str, str]]:
    """Return a row for each finding, and one for all checks that passed."""
    wrong = [one for one in found if one.state is not ReadinessState.OK]
    passed = ", ".join(one.message for one in found if one.state is ReadinessState.OK)
    rows = [(node, one.check, str(one.state), f"{one.message}\n-> {one.cure}" if one.cure else one.message) for one in wrong]
    return [*rows, (node, "the rest" if wrong else "all", str(ReadinessState.OK), passed)] if passed else rows
