"""`holdfast nodes check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.cli.commands.nodes_bootstrap import nodes_meant, progress, ssh_cluster
from holdfast.cli.output import say, say_json, say_rows
from holdfast.probe.readiness import Inspection, InspectionScope, ReadinessFinding, ReadinessState
from holdfast.probe.readiness.judge import judge
from holdfast.report.wording import plural
from holdfast.spec import load_job

DOUBTS: Final = 3
"""Exit status where jobs run and something should be mended."""
HEAD: Final = ("NODE", "CHECK", "STATE", "SEEN, AND WHAT TO DO")


def inspect(cluster_file: Path, job_file: Path | None, only: Sequence[str], *, as_json: bool) -> int:
    """Say of each host what is missing for a job, and the cure; return 1 when something is, 3 when something should be mended."""
    cluster = ssh_cluster(cluster_file)
    nodes = nodes_meant(cluster, only)
    wanted = InspectionScope.of(load_job(job_file)[0]) if job_file is not None else InspectionScope()
    with progress(nodes, quiet=as_json) as shown, Inspection(cluster, wanted, shown) as inspection:
        facts = inspection.look(nodes)
    found = judge(facts, gpus=cluster.gpus_of, snapshots=wanted.snapshots)
    if as_json:
        rows = [
            {"node": node, "ready": _worst(found, node) is not ReadinessState.MISSING, "checks": _records(found, node)} for node in nodes
        ]
        say_json({"cluster": cluster.name, "nodes": rows})
    else:
        _tell(nodes, found)
    worst = {_worst(found, node) for node in nodes}
    return 1 if ReadinessState.MISSING in worst else 0 if worst <= {ReadinessState.OK} else DOUBTS


def _worst(found: Sequence[ReadinessFinding], node: str) -> ReadinessState:
    order = list(ReadinessState)
    return max((one.state for one in found if one.node == node), key=order.index, default=ReadinessState.UNKNOWN)


def _records(found: Sequence[ReadinessFinding], node: str) -> list[dict[str, str]]:
    return [{name: value for name, value in dataclasses.asdict(one).items() if name != "node"} for one in found if one.node == node]


def _tell(nodes: Sequence[str], found: Sequence[ReadinessFinding]) -> None:
    rows = []
    for node in nodes:
        ours = [one for one in found if one.node == node]
        wrong = [one for one in ours if one.state is not ReadinessState.OK]
        fine = ", ".join(one.message for one in ours if one.state is ReadinessState.OK)
        rows += [(node, one.check, str(one.state), f"{one.message}\n-> {one.cure}" if one.cure else one.message) for one in wrong]
        rows += [(node, "the rest" if wrong else "all", str(ReadinessState.OK), fine)] if fine else []
    say_rows(HEAD, rows, coloured=2, last="folded")
    ready = [node for node in nodes if _worst(found, node) is not ReadinessState.MISSING]
    say(f"\n{len(ready)} of {plural(len(nodes), 'host')} are ready for jobs.")
